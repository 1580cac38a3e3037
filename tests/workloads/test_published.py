"""Published workloads: prompts, answers, scoring and what is refused, from lines in the format of
each release."""

from __future__ import annotations

import gzip
import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from records import completion, request

from hydraspec.config.schema import RunConfig, WorkloadConfig
from hydraspec.config.workloads import PACKAGES
from hydraspec.models.tokenizer import Tokenizer
from hydraspec.types import ConfigurationError, Request, WorkloadError
from hydraspec.workloads import reading as workloads
from hydraspec.workloads.scoring import final_number, score_completion, score_number

GSM8K = [
    {"question": f"Ann has {i} pens and buys {i}.", "answer": f"{i}+{i}=<<{i}+{i}={2 * i}>>{2 * i}"}
    for i in range(1, 5)
]
for number, entry in enumerate(GSM8K, start=1):
    entry["answer"] += f"\n#### {2 * number * 1000:,}"


def written(path: Path, entries: Any, *, as_array: bool = False) -> str:
    lines = [json.dumps(entry) for entry in entries] if isinstance(entries, list) else [entries]
    text = f"[{','.join(lines)}]" if as_array else "\n".join(lines)
    path.write_text(text, encoding="utf-8")
    return str(path)


def read(config: RunConfig, name: str, path: str | None, **keys: object) -> list[Request]:
    config.workload = WorkloadConfig(name=name, path=path, **keys)  # type: ignore[arg-type]
    found = workloads.read(config)
    assert found is not None
    return found.requests


def said(request: Request) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in request.messages or ()]


# ---------------------------------------------------------------- gsm8k


@pytest.mark.parametrize("as_array", [False, True])
def test_gsm8k_questions(config: RunConfig, tmp_path: Path, as_array: bool) -> None:
    requests = read(config, "gsm8k", written(tmp_path / "f", GSM8K, as_array=as_array), limit=3)
    assert [r.answer for r in requests] == ["2,000", "4,000", "6,000"]
    assert {(r.category, r.scoring) for r in requests} == {("math", "number")}
    ((role, content),) = said(requests[0])
    assert role == "user"
    assert content.startswith("Ann has 1 pens")
    assert content.endswith("after ####.")


def test_entries_beyond_the_limit_are_counted(config: RunConfig, tmp_path: Path) -> None:
    """Catches entries counted that are no question, and an unread one that cannot be read."""
    path = written(tmp_path / "f", GSM8K)
    config.workload = WorkloadConfig(name="gsm8k", path=path, limit=2, num_shots=1)
    found = workloads.read(config)
    assert found is not None
    assert (found.num_lines, found.num_lines_in_all) == (2, 3)
    config.workload.path = written(tmp_path / "g", [*GSM8K, {"question": 1, "answer": "#### 1"}])
    found = workloads.read(config)
    assert found is not None
    assert (found.num_lines, found.num_lines_in_all) == (2, None)


def test_gsm8k_examples_are_not_asked(config: RunConfig, tmp_path: Path) -> None:
    path = written(tmp_path / "f", GSM8K)
    first, second = read(config, "gsm8k", path, num_shots=2)
    assert [role for role, _ in said(first)] == ["user", "assistant", "user", "assistant", "user"]
    assert said(first)[1][1] == "1+1=2\n#### 2,000"  # without <<1+1=2>>
    assert said(first)[4][1].startswith("Ann has 3")
    assert said(second)[:4] == said(first)[:4]
    others = written(tmp_path / "train", GSM8K[2:])
    requests = read(config, "gsm8k", path, num_shots=2, shots_path=others)
    assert len(requests) == 4
    assert said(requests[0])[0][1].startswith("Ann has 3")


def test_gsm8k_as_plain_text(config: RunConfig, tmp_path: Path) -> None:
    path = written(tmp_path / "f", GSM8K)
    first, *_ = read(config, "gsm8k", path, num_shots=1, chat=False)
    assert first.prompt == (
        "Question: Ann has 1 pens and buys 1.\nAnswer: 1+1=2\n#### 2,000\n\n"
        "Question: Ann has 2 pens and buys 2.\nAnswer:"
    )
    assert first.sampling.stop == ("\nQuestion:",)


NUMBERS = {
    "so 1,234 + 1 is\n#### 1,235": "1235",
    "#### $12.50 each": "12.5",
    "#### -3": "-3",
    "Half of 10 is 5. The answer is 5 pens (not 7).": "5",
    "I get 4, then 9.": "9",
    "#### none, so 8": "8",
    "no number": None,
    "": None,
    "x = .5": "0.5",
}


@pytest.mark.parametrize("text", NUMBERS)
def test_final_number(text: str) -> None:
    expected = NUMBERS[text]
    found = final_number(text)
    assert (found is None) == (expected is None)
    assert expected is None or score_number(text, expected) is True
    assert score_number(text, "77") is False


def test_numbers_are_scored_where_the_workload_says() -> None:
    """Catches an exact match, which fails on 1000 for 1,000."""
    asked, ended = request(answer="1,000", scoring="number"), completion(text="#### 1000")
    assert score_completion(asked, ended) is True
    asked.scoring = "text"
    assert score_completion(asked, ended) is False
    ended.finish_reason = "error"
    assert score_completion(asked, ended) is None


# ---------------------------------------------------------------- humaneval, mt_bench, spec_bench

TASK = {
    "task_id": "HumanEval/0",
    "prompt": 'def double(x):\n    """Twice x."""\n',
    "entry_point": "double",
    "canonical_solution": "    return 2 * x\n",
    "test": "raise SystemExit",
}
QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
    {"question_id": 82, "category": "math", "turns": ["2 + 2?"], "reference": ["4"]},
]


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, package: str, place: str, content: bytes
) -> None:
    """A package with this file, whose code must not be imported."""
    (folder / place).parent.mkdir(parents=True)
    (folder / place).write_bytes(content)
    (folder / place.split("/")[0] / "__init__.py").write_text("raise SystemExit('imported')")
    info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(folder))


def test_humaneval_of_the_package(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = gzip.compress(json.dumps(TASK).encode())
    install(tmp_path, monkeypatch, *PACKAGES["humaneval"], content)
    (request,) = read(config, "humaneval", None)
    assert (request.id, request.category, request.answer) == ("HumanEval/0", "code", "double")
    assert request.scoring == "defines"
    assert request.meta == {"entry_point": "double"}
    ((_, content_said),) = said(request)
    assert content_said.endswith('```python\ndef double(x):\n    """Twice x."""\n```')
    (plain,) = read(config, "humaneval", None, chat=False)
    assert plain.prompt == TASK["prompt"]
    assert "\ndef" in plain.sampling.stop


def test_mt_bench_has_turns_that_wait(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = "\n".join(map(json.dumps, QUESTIONS)).encode()
    install(tmp_path, monkeypatch, *PACKAGES["mt_bench"], content)
    requests = read(config, "mt_bench", None, thinking=False)
    assert [(r.id, r.turn, r.after) for r in requests] == [
        ("81/1", 1, None),
        ("81/2", 2, 0),
        ("82/1", 1, None),
    ]
    assert [r.category for r in requests] == ["writing", "writing", "math"]
    assert {(r.answer, r.thinking) for r in requests} == {(None, False)}
    assert said(requests[1]) == [("user", "Again.")]


def test_spec_bench_and_a_limit(config: RunConfig, tmp_path: Path) -> None:
    requests = read(config, "spec_bench", written(tmp_path / "f", QUESTIONS), limit=1)
    assert [r.id for r in requests] == ["81/1", "81/2"]


# ---------------------------------------------------------------- sharegpt


def spoken(*messages: tuple[str, str], **beside: object) -> dict[str, object]:
    return {"conversations": [{"from": who, "value": what} for who, what in messages], **beside}


CONVERSATIONS = [
    spoken(("system", "Be kind."), ("human", "a"), ("gpt", "b"), ("human", "c"), id="x"),
    spoken(("gpt", "goes on"), ("user", "d"), ("gpt", "e"), id="x"),
    spoken(("human", " ")),
    spoken(("human", "f"), ("chatgpt", "g"), ("human", ""), ("gpt", "h"), ("human", "i")),
]


@pytest.mark.parametrize("as_array", [False, True])
def test_sharegpt_turns_are_answered_by_the_target(
    config: RunConfig, tmp_path: Path, as_array: bool
) -> None:
    path = written(tmp_path / "f", CONVERSATIONS, as_array=as_array)
    requests = read(config, "sharegpt", path)
    assert [r.id for r in requests] == ["0/1", "0/2", "1/1", "2/1"]
    assert said(requests[0]) == [("system", "Be kind."), ("user", "a")]
    assert [said(r)[-1][1] for r in requests] == ["a", "c", "d", "f"]
    assert requests[2].meta == {"id": "x"}
    assert len(read(config, "sharegpt", path, max_turns=1)) == 3
    found = workloads.read(config)
    assert found is not None
    assert found.warnings == [
        "1 of 4 conversations have no message of a user, and are left out",
        "1 of 4 conversations begin with an answer, which is left out",
    ]


# ---------------------------------------------------------------- what is refused


REFUSED: dict[str, tuple[str, Any, str]] = {
    "gsm8k without a number": ("gsm8k", [{"question": "a", "answer": "b"}], "must end with ####"),
    "gsm8k without a question": ("gsm8k", [*GSM8K, {"answer": "#### 1"}], "f:5: question: null is"),
    "gsm8k as workload lines": ("gsm8k", [{"prompt": "a"}], "f:1: question: null is not allowed"),
    "humaneval without a task": ("humaneval", [{**TASK, "task_id": 3}], "f:1: task_id: 3 is not"),
    "mt_bench without turns": ("mt_bench", [{"category": "a"}], "f:1: turns: must be a non-empty"),
    "mt_bench with turns of no text": (
        "mt_bench",
        [{"category": "a", "turns": [3]}],
        "f:1: turns[0]: 3 is not allowed",
    ),
    "spec_bench twice": ("spec_bench", [QUESTIONS[0]] * 2, "f:2: id: '81/1' is the id of"),
    "sharegpt without conversations": ("sharegpt", [{"turns": ["a"]}], "f:1: conversations: must"),
    "sharegpt of another kind": (
        "sharegpt",
        [spoken(("alien", "a"))],
        "f:1: conversations[0]: {",
    ),
    "sharegpt with no user": ("sharegpt", [spoken(("gpt", "a"))], "there is no request in it"),
    "broken JSON": ("sharegpt", "[{", "f: not JSON"),
    "no objects": ("gsm8k", [1], "f:1: must be a JSON object"),
    "nothing": ("gsm8k", [], "there is nothing in it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_format_is_one_message(case: str, config: RunConfig, tmp_path: Path) -> None:
    name, entries, says = REFUSED[case]
    with pytest.raises(WorkloadError) as raised:
        read(config, name, written(tmp_path / "f", entries))
    assert says in str(raised.value)


def test_more_examples_than_there_are(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="4 lines"):
        read(config, "gsm8k", written(tmp_path / "f", GSM8K), num_shots=4)


def not_installed(package: str) -> None:
    raise PackageNotFoundError(package)


def test_a_missing_file_says_where_it_is_had(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WorkloadError, match=r"github\.com/openai/grade-school-math"):
        read(config, "gsm8k", "/nowhere")
    monkeypatch.setattr("hydraspec.workloads.files.distribution", not_installed)
    for name in ("humaneval", "mt_bench"):
        with pytest.raises(WorkloadError, match=f"{PACKAGES[name][0]} is not installed"):
            read(config, name, None)
    damaged = tmp_path / "damaged.gz"
    damaged.write_bytes(gzip.compress(b"x" * 999)[:20])
    with pytest.raises(WorkloadError, match="cannot be unpacked"):
        read(config, "humaneval", str(damaged))
    path = written(tmp_path / "f", GSM8K)
    with pytest.raises(WorkloadError, match=r"workload\.shots_path=/nowhere cannot be read"):
        read(config, "gsm8k", path, num_shots=1, shots_path="/nowhere")


# ---------------------------------------------------------------- thinking


class Template:
    """A tokenizer of transformers with a chat template that has a switch, or none."""

    def __init__(self, variable: str | None) -> None:
        self.chat_template = "{% for m in messages %}{% endfor %}" + (
            "" if variable is None else "{% if " + variable + " %}think{% endif %}"
        )

    def apply_chat_template(self, messages: list[dict[str, str]], **keys: object) -> str:
        known = {"tokenize", "add_generation_prompt"}
        return f"{messages[0]['content']} { ({k: v for k, v in keys.items() if k not in known}) }"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


@pytest.mark.parametrize("variable", ["enable_thinking", "thinking"])
def test_thinking_is_the_templates_switch(variable: str) -> None:
    tokenizer, messages = Tokenizer(Template(variable)), [{"role": "user", "content": "a"}]
    assert bytes(tokenizer.encode_chat(messages)).decode() == "a {}"
    for value in (True, False):
        made = bytes(tokenizer.encode_chat(messages, thinking=value)).decode()
        assert made == f"a { ({variable: value}) }"


def test_a_template_without_the_switch_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"workload\.thinking=false: the chat template has no"):
        Tokenizer(Template(None)).encode_chat([{"role": "user", "content": "a"}], thinking=False)


def test_thinking_reaches_requests_with_messages_only(config: RunConfig, tmp_path: Path) -> None:
    chat, plain = {"messages": [{"role": "user", "content": "a"}]}, {"prompt": "a"}
    path = written(tmp_path / "f", [chat, plain])
    assert [r.thinking for r in read(config, "jsonl", path, thinking=True)] == [True, None]
    config.workload = WorkloadConfig(
        name="jsonl", path=written(tmp_path / "g", [plain]), thinking=False
    )
    found = workloads.read(config)
    assert found is not None
    assert found.warnings == [
        "workload.thinking=false has no effect: no line has messages or turns of text"
    ]

"""Published workloads: prompts, answers, scoring and what is refused, from lines in the format of
each release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hydraspec.config.schema import RunConfig, WorkloadConfig
from hydraspec.lab import workloads
from hydraspec.lab.scoring import final_number, score_completion, score_number
from hydraspec.models.tokenizer import Tokenizer
from hydraspec.types import Completion, ConfigurationError, Request, WorkloadError

GSM8K = [
    {"question": f"Ann has {i} pens and buys {i}.", "answer": f"{i}+{i}=<<{i}+{i}={2 * i}>>{2 * i}"}
    for i in range(1, 5)
]
for number, entry in enumerate(GSM8K, start=1):
    entry["answer"] += f"\n#### {2 * number * 1000:,}"


def written(path: Path, entries: list[Any], *, as_array: bool = False) -> str:
    lines = [json.dumps(entry) for entry in entries]
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
    request = Request(index=0, id="a", sampling=None, answer="1,000", scoring="number")  # type: ignore[arg-type]
    completion = Completion(
        index=0,
        prompt_token_ids=[1],
        output_token_ids=[1],
        text="#### 1000",
        finish_reason="stop",
        error=None,
        ttft_ms=None,
        latency_ms=0.0,
    )
    assert score_completion(request, completion) is True
    request.scoring = "text"
    assert score_completion(request, completion) is False
    completion.finish_reason = "error"
    assert score_completion(request, completion) is None


# ---------------------------------------------------------------- what is refused


REFUSED: dict[str, tuple[str, list[Any], str]] = {
    "gsm8k without a number": ("gsm8k", [{"question": "a", "answer": "b"}], "must end with ####"),
    "gsm8k without a question": ("gsm8k", [*GSM8K, {"answer": "#### 1"}], "f:5: question: null is"),
    "gsm8k as workload lines": ("gsm8k", [{"prompt": "a"}], "f:1: question: null is not allowed"),
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


def test_a_missing_file_says_where_it_is_had(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"github\.com/openai/grade-school-math"):
        read(config, "gsm8k", "/nowhere")
    with pytest.raises(WorkloadError, match=r"workload\.shots_path=/nowhere cannot be read"):
        path = written(tmp_path / "f", GSM8K)
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

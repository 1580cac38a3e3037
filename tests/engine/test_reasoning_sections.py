"""Grammars after the reasoning sections of released chat templates, whose markers are tokens of the
tokenizer: Qwen 3's plain ones, Gemma 4's special ones, in the output or at the prompt's end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from zoo_engines import engine_of

from hydraspec.config.structured import as_structured
from hydraspec.engine.native import NativeEngine
from hydraspec.models.checkpoint.reader import resolve_folder
from hydraspec.types import Completion, Request, SamplingParams, StepRecord

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["age"],
}
QUESTION = "Olga has 41 books and buys 9 bags of 6 books. How many books does Olga have now?"
BEGIN, END = 766, 767  # the newest words of the zoo's vocabulary, which no other is made of
TURNS = (
    "{{ bos_token }}{% for m in messages %}{{ '<|turn>' + m['role'] + '\\n' + m['content'] + "
    "'<turn|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|turn>model\\n' }}"
)
WITHOUT = "enable_thinking is defined and enable_thinking is false"


@dataclass(frozen=True)
class Style:
    """Markers, whether they are special tokens, and what a template writes behind the prompt."""

    begin: str
    end: str
    is_special: bool
    behind: str


STYLES = {
    "qwen3": Style(
        "<think>",
        "</think>",
        False,
        "{% if " + WITHOUT + " %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}",
    ),
    "qwen3.5": Style(
        "<think>",
        "</think>",
        False,
        "{% if " + WITHOUT + " %}{{ '<think>\\n\\n</think>\\n\\n' }}"
        "{% else %}{{ '<think>\\n' }}{% endif %}",
    ),
    "gemma4": Style(
        "<|channel>",
        "<channel|>",
        True,
        "{% if not enable_thinking | default(true) %}"
        "{{ '<|channel>thought\\n<channel|>' }}{% endif %}",
    ),
    "gemma4 opened": Style("<|channel>", "<channel|>", True, "{{ '<|channel>thought\\n' }}"),
}


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    engine_of.cache_clear()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The zoo's Qwen 3 with each style's markers and template."""
    return {
        name: write_folder(tmp_path_factory.mktemp("style") / "target", style)
        for name, style in STYLES.items()
    }


def write_folder(folder: Path, style: Style) -> Path:
    shutil.copytree(resolve_folder("zoo:tiny_qwen3"), folder)
    path = folder / "tokenizer.json"
    known = json.loads(path.read_text())
    words = known["model"]["vocab"]
    known["model"]["vocab"] = {word: i for word, i in words.items() if i < BEGIN}
    del known["model"]["merges"][BEGIN - END - 1 :]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    known["added_tokens"] += [
        {"id": i, "content": content, "special": style.is_special, **flags}
        for i, content in ((BEGIN, style.begin), (END, style.end))
    ]
    path.write_text(json.dumps(known))
    (folder / "chat_template.jinja").write_text(TURNS + style.behind + "{% endif %}")
    return folder


def engine(folder: Path, method: str) -> NativeEngine:
    return engine_of("tiny_qwen3", method, f"target.checkpoint={folder}", "engine.max_num_seqs=5")


def asked(text: str, thinking: bool | None = None, **sampling: Any) -> Request:
    return Request(
        index=0,
        id="0",
        sampling=SamplingParams(
            max_tokens=60, structured=as_structured({"json": SCHEMA}), **sampling
        ),
        messages=[{"role": "user", "content": text}],
        thinking=thinking,
    )


def completed(asking: NativeEngine, request: Request) -> tuple[Completion, int]:
    """The request's end, and how many drafts were accepted."""
    asking.tokenize([request])
    events = list(asking.run([request], concurrency=None))
    (found,) = (event for event in events if isinstance(event, Completion))
    records = (event for event in events if isinstance(event, StepRecord))
    assert found.error is None
    return found, sum(part.num_accepted for record in records for part in record.requests)


def ends(engine: NativeEngine, text: str, thinking: bool | None) -> bool | None:
    tokenizer = engine.parts.tokenizer
    assert tokenizer is not None
    messages = [{"role": "user", "content": text}]
    prompt = tokenizer.encode_chat(messages, thinking=thinking)
    return tokenizer.reasoning_at_end(prompt)


@pytest.mark.parametrize(
    ("name", "by_default", "without"),
    [
        ("qwen3", None, False),
        ("qwen3.5", True, False),
        ("gemma4", None, False),
        ("gemma4 opened", True, True),
    ],
)
def test_markers_and_the_ends_of_prompts_are_found(
    folders: dict[str, Path], name: str, by_default: bool | None, without: bool
) -> None:
    """A section that is open, closed, or none; markers within messages are text, not sections."""
    style, found = STYLES[name], engine(folders[name], "none")
    tokenizer = found.parts.tokenizer
    assert tokenizer is not None
    assert tokenizer.reasoning_markers == (BEGIN, END)
    assert (BEGIN in tokenizer.special_token_ids) == style.is_special
    has_switch = "enable_thinking" in style.behind
    for text in ("Who?", f"Say {style.begin}", f"{style.begin}a{style.end}", style.end):
        assert ends(found, text, None) is by_default
        if has_switch:
            assert ends(found, text, True) is by_default
            assert ends(found, text, False) is without


@pytest.mark.parametrize("name", ["qwen3", "gemma4"])
def test_a_marker_in_a_message_does_not_free_the_output(
    folders: dict[str, Path], name: str
) -> None:
    request = asked(f"What does {STYLES[name].begin} mean?")
    found, _ = completed(engine(folders[name], "none"), request)
    assert found.finish_reason == "stop"
    check_age(found.text or "")


def closing_bias(plain: NativeEngine, prompt: list[int]) -> float:
    """The bias with which greedy free text after the prompt has its first END after a few tokens,
    at one that is more likely there than before."""
    ids, least = list(prompt), float("inf")
    for place in range(40):
        logits = plain.next_token_logits(ids)
        best = int(logits.argmax())
        margin = float(logits[best] - logits[END])
        if place > 1 and margin < least:
            return (margin + least) / 2
        least = min(least, margin)
        ids.append(best)
    raise AssertionError


@pytest.mark.parametrize("name", STYLES)
def test_a_section_is_free_and_the_grammar_holds_after_it(
    folders: dict[str, Path], name: str
) -> None:
    """With and without drafts; greedy. Fails if a section is not seen, or its end is missed."""
    plain, drafting = (engine(folders[name], method) for method in ("none", "eagle3"))
    tokenizer = plain.parts.tokenizer
    assert tokenizer is not None
    request = asked(QUESTION)
    plain.tokenize([request])
    prompt = list(request.prompt_token_ids or [])
    opened = [] if tokenizer.reasoning_at_end(prompt) else [BEGIN]
    bias = ((BEGIN, 5.0), (END, closing_bias(plain, prompt + opened)))
    request = asked(QUESTION, logit_bias=bias)
    found, _ = completed(plain, request)
    output = found.output_token_ids
    end = output.index(END)
    assert end > 1 + len(opened)
    assert output[: len(opened)] == opened
    assert found.finish_reason == "stop"
    check_age(tokenizer.decode(output[end + 1 :]))
    drafted, num_accepted = completed(drafting, request)
    assert drafted.output_token_ids == output
    assert num_accepted > 0


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "gemma4"])
def test_without_thinking_the_grammar_holds_from_the_first_token(
    folders: dict[str, Path], name: str
) -> None:
    """Though the model would rather begin a section."""
    request = asked(QUESTION, thinking=False, logit_bias=((BEGIN, 50.0),))
    found, _ = completed(engine(folders[name], "none"), request)
    check_age(found.text or "")


def check_age(text: str) -> None:
    assert 0 <= json.loads(text)["age"] <= 150

"""Scoring: answers in texts, and code that defines a task's function, which is never run."""

from __future__ import annotations

import warnings

import pytest
from records import completion, request

from hydraspec.metrics.accuracy import accuracy, accuracy_name
from hydraspec.workloads.scoring import MAX_CODE, score, score_completion, score_defines

PROMPT = 'import math\n\n\ndef double(x):\n    """Twice x."""\n'
WHOLE = "def double(x):\n    return 2 * x\n"

CHATS = {
    WHOLE: True,
    f"Here it is:\n\n```python\n{WHOLE}```\nDone.": True,
    f"```\nx = (\n```\nNo:\n```py\n{WHOLE}```": True,
    f"```python\n{WHOLE}": True,  # cut by max_tokens after its last line
    f"Here it is: {WHOLE}": False,
    "async def double(x):\n    return x": True,
    "def double(x):\n    return 2 *": False,
    "def triple(x):\n    return 3 * x": False,
    "class A:\n    def double(self):\n        return 1": False,
    "double = lambda x: 2 * x": False,
    'def double(x):\n    """Twice x."""': False,
    "def double(x):\n    pass": False,
    "def double(x): ...": False,
    "raise SystemExit\n" + WHOLE: True,  # catches a check that runs it
    "def double(x):\n    return '\\d'": True,  # a warning of Python's, which is none of ours
    "": False,
    "\0": False,
    "\ud800": False,
}


@pytest.mark.parametrize("text", CHATS)
def test_code_of_a_chat(text: str) -> None:
    assert score_defines(text, None, "double") is CHATS[text]


PLAIN = {
    "    return 2 * x\n": True,
    "    return math.prod((2, x))": True,
    "": False,  # the prompt's docstring alone is a body for Python
    "    pass": False,
    "  return 2": False,  # indented otherwise than the docstring
    "    return (": False,
}


@pytest.mark.parametrize("text", PLAIN)
def test_code_that_continues_the_prompt(text: str) -> None:
    assert score_defines(text, PROMPT, "double") is PLAIN[text]


NESTED = {
    "parentheses": "(" * 9_000 + ")" * 9_000,
    "minus": "-" * 18_000 + "1",
    "attributes": "a" + ".a" * 9_000,
    "conditions": "1 if 1 else " * 1_500 + "1",
    "lists": "[" * 18_000,
    "elif": "if 1: pass\n" + "elif 1: pass\n" * 1_400,
}


@pytest.mark.parametrize("name", NESTED)
def test_nesting_without_end_is_no_code(name: str) -> None:
    """Catches a RecursionError or MemoryError of the parser that ends the run."""
    text = NESTED[name]
    assert len(text) < MAX_CODE
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert score_defines(text, None, "double") is False


def test_more_code_than_is_parsed() -> None:
    assert score_defines(f"{WHOLE}#{'a' * MAX_CODE}", None, "double") is False


def test_the_figures_are_named_for_what_they_are() -> None:
    """Catches a share of outputs that merely parse under the name of an exact match."""
    texts = [WHOLE, "no", None]
    requests = [request(i, answer="double", scoring="defines") for i in range(len(texts))]
    ended = [completion(text=text) for text in texts]
    scores = [score_completion(*both) for both in zip(requests, ended, strict=True)]
    assert scores == [True, False, None]
    found = accuracy(requests, scores)
    assert (found["exact_match"], found["num_scored"], found["scoring"]) == (0.5, 2, "defines")
    assert accuracy_name([found, None]) == "parses and defines"
    assert accuracy_name([None]) == accuracy_name([{**found, "scoring": "number"}]) == "exact match"
    assert accuracy_name([found, {**found, "scoring": "text"}]) == "correct"
    assert accuracy_name([{**found, "scoring": "of a later version"}]) == "correct"
    del found["scoring"]  # a run of an earlier version
    assert accuracy_name([found]) == "exact match"


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("3 + 4 = 7. The answer is 7", "7", True),
        ("3 + 4 = 7. The answer is 7.", "7", False),
        ("the answer is 3, no, the answer is\n 7 \n", " 7 ", True),
        ("the answer is 7 apples", "7", False),
        ("7", "7", True),
        (" abc. ", "abc.", True),
        (" abc. ", "abc", False),
        ("The Answer Is 7", "7", False),
        (None, "7", None),
        ("7", None, None),
    ],
)
def test_the_text_after_the_last_phrase_is_the_answer(
    text: str | None, answer: str | None, expected: bool | None
) -> None:
    assert score(text, answer) is expected


def test_accuracy_counts_scored_requests_only() -> None:
    requests = [request(i, category="ab"[i % 2]) for i in range(4)]
    result = accuracy(requests, [True, None, False, True])
    assert result == {
        "exact_match": 2 / 3,
        "num_scored": 3,
        "scoring": "text",
        "by_category": {
            "a": {"exact_match": 0.5, "num_scored": 2},
            "b": {"exact_match": 1.0, "num_scored": 1},
        },
    }
    assert accuracy(requests, [None] * 4) is None

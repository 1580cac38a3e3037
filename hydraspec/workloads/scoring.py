"""Scores of outputs: exact match of the text, or of its final number, with the answer of the
workload line, or whether the output defines the function that the line names. No code is run.
"""

from __future__ import annotations

import ast
import re
import warnings
from decimal import Decimal

from hydraspec.types import Completion, Request

MARKER = "answer is"
FENCED = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
MAX_CODE = 20_000  # characters that are parsed; of HumanEval's solutions the longest has 1,400
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def score(text: str | None, answer: str | None) -> bool | None:
    """Returns whether the final answer in `text` is `answer`; None if either is missing.

    The final answer is what follows the last "answer is", or the whole text where that phrase is
    absent; both sides are compared without surrounding white space, to the letter.
    """
    if text is None or answer is None:
        return None
    return text.rpartition(MARKER)[2].strip() == answer.strip()


def score_number(text: str | None, answer: str | None) -> bool | None:
    """Returns whether the final number in `text` is that of `answer`; None if either is missing.

    The final number is the first one after the last "####", or else after the last "answer is", or
    else the last one of the text. 1,000 and 1000.0 are equal; signs of currency and units are no
    part of a number.
    """
    if text is None or answer is None:
        return None
    return final_number(text) == final_number(answer) is not None


def final_number(text: str) -> Decimal | None:
    """The number that `score_number` compares; None where there is none."""
    for marker in ("####", MARKER):
        _, found, after = text.rpartition(marker)
        if found and (first := NUMBER.search(after)) is not None:
            return Decimal(first[0].replace(",", ""))
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def score_defines(text: str | None, prompt: str | None, name: str | None) -> bool | None:
    """Returns whether the code in `text` parses as Python and defines `name`; None if text or name
    is missing.

    The code is a fenced block of the text, or the text after the prompt that it continues (a chat
    has no such prompt). Its top level has a function `name` whose body is more than a docstring,
    `pass` or `...`. The function is not tested: this is no pass@1.
    """
    if text is None or name is None:
        return None
    candidates = [*FENCED.findall(text[:MAX_CODE]), (prompt or "") + text]
    return any(_defines(code, name) for code in candidates)


def _defines(code: str, name: str) -> bool:
    if len(code) > MAX_CODE:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in the model's strings
            body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(
        isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        and each.name == name
        and not all(_is_filler(statement) for statement in each.body)
        for each in body
    )


def _is_filler(statement: ast.stmt) -> bool:
    """Returns whether a statement is a docstring, `...` or `pass`."""
    is_constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_constant or isinstance(statement, ast.Pass)


def score_completion(request: Request, completion: Completion) -> bool | None:
    """Returns whether a request's output is right, as its `scoring` says; None for a request that
    ended with an error, or has no answer."""
    if completion.finish_reason == "error":
        return None
    if request.scoring == "defines":
        return score_defines(completion.text, request.prompt, request.answer)
    judge = score_number if request.scoring == "number" else score
    return judge(completion.text, request.answer)

"""One line of a workload file: JSON to Request, or a message that says what is wrong with it."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from hydraspec.types import Request, SamplingParams, WorkloadError

PROMPTS = ("prompt", "messages", "prompt_token_ids")
KEYS = ("id", *PROMPTS, "category", "answer", "max_tokens", "sampling")
MAX_SEED = (1 << 63) - 1


def parse_line(raw: bytes, *, place: str, index: int, defaults: SamplingParams) -> Request:
    """Read one line. What it says of sampling is laid over `defaults`; null means not said.

    Raises:
        WorkloadError: beginning with `place`, naming the key, the value and what is allowed.
    """
    line = _Line(place)
    values = line.decode(raw)
    line.refuse_unknown(values, KEYS, "")
    given = [key for key in PROMPTS if values.get(key) is not None]
    if len(given) != 1:
        found = " and ".join(given) if given else "none of them"
        line.fail(f"give exactly one of {', '.join(PROMPTS)}; it has {found}")
    return Request(
        index=index,
        id=line.identifier(values.get("id"), str(index)),
        sampling=line.sampling(values, defaults),
        prompt=line.prompt(values.get("prompt")),
        messages=line.messages(values.get("messages")),
        prompt_token_ids=line.token_ids("prompt_token_ids", values.get("prompt_token_ids")),
        category=line.text("category", values.get("category")),
        answer=line.answer(values.get("answer")),
    )


class _Line:
    """Checks of one line; every failure begins with its place."""

    def __init__(self, place: str) -> None:
        self.place = place

    def fail(self, reason: str) -> NoReturn:
        raise WorkloadError(f"{self.place}: {reason}")

    def refuse(self, key: str, value: object, allowed: str) -> NoReturn:
        shown = json.dumps(value, ensure_ascii=False)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        self.fail(f"{key}: {shown} is not allowed; it must be {allowed}")

    def decode(self, raw: bytes) -> Mapping[str, Any]:
        try:
            values = json.loads(raw.decode("utf-8-sig"), parse_constant=self._no_constant)
        except WorkloadError:
            raise
        except UnicodeDecodeError as error:
            self.fail(f"not UTF-8 text (byte {error.start}); save the file as UTF-8")
        except json.JSONDecodeError as error:
            self.fail(
                f"not JSON: {error.msg} at column {error.colno}; write one JSON object a line"
            )
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, say
            self.fail(f"not a workload line: {error}")
        if not isinstance(values, dict):
            self.fail(f"a line must be a JSON object, not {type(values).__name__}")
        return values

    def _no_constant(self, name: str) -> NoReturn:
        self.fail(f"not JSON: {name} is no JSON number")

    def refuse_unknown(
        self, values: Mapping[str, Any], known: tuple[str, ...], prefix: str
    ) -> None:
        for key in values:
            if key in known:
                continue
            if prefix and key == "max_tokens":
                self.fail('"max_tokens" belongs beside "sampling", not inside it')
            if not prefix and key in _SAMPLING_CHECKS:
                self.fail(f'{key!r} belongs inside "sampling": {{"sampling": {{"{key}": ...}}}}')
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            self.fail(f"unknown key {prefix + key!r}{hint} Allowed: {', '.join(known)}")

    # ------------------------------------------------------------------ fields

    def identifier(self, value: object, default: str) -> str:
        if value is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str) or not value:
            self.refuse("id", value, "a non-empty string or an integer")
        return value

    def text(self, key: str, value: object) -> str | None:
        if value is not None and not isinstance(value, str):
            self.refuse(key, value, "a string")
        return value

    def answer(self, value: object) -> str | None:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        if value is not None and not isinstance(value, str):
            self.refuse("answer", value, "a string or a number")
        return value

    def prompt(self, value: object) -> str | None:
        if value is not None and (not isinstance(value, str) or not value.strip()):
            self.refuse("prompt", value, "a string with something in it")
        return value

    def messages(self, value: object) -> list[dict[str, str]] | None:
        if value is None:
            return None
        allowed = 'a non-empty list of {"role": "user", "content": "..."}, both strings'
        if not isinstance(value, list) or not value:
            self.refuse("messages", value, allowed)
        for message in value:
            if not isinstance(message, dict) or set(message) != {"role", "content"}:
                self.refuse("messages", message, allowed)
            if not all(isinstance(part, str) and part for part in message.values()):
                self.refuse("messages", message, allowed)
        return value

    def token_ids(self, key: str, value: object) -> list[int] | None:
        if value is None:
            return None
        allowed = "a non-empty list of token ids, whole numbers from 0"
        if not isinstance(value, list) or not value:
            self.refuse(key, value, allowed)
        for token in value:
            if not _is_integer(token, 0):
                self.refuse(key, token, allowed)
        return value

    def sampling(self, values: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
        merged = {name: getattr(defaults, name) for name in SamplingParams.__dataclass_fields__}
        if (max_tokens := values.get("max_tokens")) is not None:
            if not _is_integer(max_tokens, 1):
                self.refuse("max_tokens", max_tokens, "a whole number from 1")
            merged["max_tokens"] = max_tokens
        given = values.get("sampling")
        if given is None:
            return SamplingParams(**merged)
        if not isinstance(given, dict):
            self.refuse("sampling", given, "a JSON object")
        self.refuse_unknown(given, tuple(_SAMPLING_CHECKS), "sampling.")
        for key, value in given.items():
            if value is None:
                continue
            check, allowed = _SAMPLING_CHECKS[key]
            if not check(value):
                self.refuse(f"sampling.{key}", value, allowed)
            if key in ("stop", "stop_token_ids"):
                value = (value,) if isinstance(value, str) else tuple(value)
            merged[key] = value
        return SamplingParams(**merged)


def _is_integer(value: object, low: int, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object, low: float, high: float = math.inf) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and low <= value <= high


def _is_stop(value: object) -> bool:
    if isinstance(value, str):
        return bool(value)
    return isinstance(value, list) and all(isinstance(s, str) and s for s in value)


_SAMPLING_CHECKS: dict[str, tuple[Callable[[object], bool], str]] = {
    "temperature": (lambda v: _is_number(v, 0), "a number from 0 (0 is greedy)"),
    "top_k": (lambda v: _is_integer(v, 0), "a whole number from 0 (0 is off)"),
    "top_p": (lambda v: _is_number(v, 0, 1) and v != 0, "a number above 0 up to 1 (1 is off)"),
    "min_p": (lambda v: _is_number(v, 0, 1), "a number from 0 to 1 (0 is off)"),
    "seed": (lambda v: _is_integer(v, 0, MAX_SEED), f"a whole number from 0 to {MAX_SEED}"),
    "stop": (_is_stop, "a non-empty string or a list of them"),
    "stop_token_ids": (
        lambda v: isinstance(v, list) and all(_is_integer(t, 0) for t in v),
        "a list of token ids, whole numbers from 0",
    ),
    "ignore_eos": (lambda v: isinstance(v, bool), "true or false"),
}

"""Parsing one line of a workload file: JSON to a Request, or an error with place, key and value."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from hydraspec.config.ranges import SAMPLING_RANGES
from hydraspec.types import Request, SamplingParams, WorkloadError

PROMPTS = ("prompt", "messages", "prompt_token_ids")
KEYS = ("id", *PROMPTS, "category", "answer", "max_tokens", "sampling", "meta")
MAX_META_DEPTH = 50  # levels; deeper nesting could not be written to requests.jsonl
SAMPLING_KEYS = (
    *("temperature", "top_k", "top_p", "min_p", "seed"),
    *("stop", "stop_token_ids", "ignore_eos"),
)


def parse_line(raw: bytes, *, place: str, index: int, defaults: SamplingParams) -> Request:
    """Parse one line. Its sampling keys override `defaults`; a null key is as good as absent.

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
        meta=line.meta(values.get("meta")),
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
            values = json.loads(
                raw.decode("utf-8-sig"),
                parse_constant=self._no_constant,
                parse_float=self._finite,
                object_pairs_hook=self._object,
            )
            if isinstance(values, dict):
                self.refuse_half_characters(values)
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

    def _finite(self, digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            self.fail(f"{digits[:80]} is infinite as a float; write a number below 1.8e308")
        return value

    def _object(self, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                self.fail(f"key {key!r} stands twice in one object; keep one of the two")
            values[key] = value
        return values

    def refuse_half_characters(self, values: Mapping[str, Any]) -> None:
        """Refuse an unpaired surrogate, which JSON allows and UTF-8 cannot encode."""
        for key, value in values.items():
            try:
                json.dumps([key, value], ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                half = ascii(error.object[error.start])
                self.fail(
                    f"{ascii(key)[1:-1]}: {half} is half a character; allowed is text that UTF-8 "
                    "can hold: write the character itself, or both halves of its escape"
                )

    def refuse_unknown(
        self, values: Mapping[str, Any], known: tuple[str, ...], prefix: str
    ) -> None:
        for key in values:
            if key in known:
                continue
            if prefix and key == "max_tokens":
                self.fail('"max_tokens" belongs beside "sampling", not inside it')
            if not prefix and key in SAMPLING_KEYS:
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

    def meta(self, value: object) -> object:
        if _depth(value) > MAX_META_DEPTH:
            self.fail(f"meta: is nested too deeply; allowed are {MAX_META_DEPTH} levels")
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
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                self.refuse(key, token, allowed)
        return value

    def sampling(self, values: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
        merged = {name: getattr(defaults, name) for name in SamplingParams.__dataclass_fields__}
        if (max_tokens := values.get("max_tokens")) is not None:
            self.within("max_tokens", "max_tokens", max_tokens)
            merged["max_tokens"] = max_tokens
        given = values.get("sampling")
        if given is None:
            return SamplingParams(**merged)
        if not isinstance(given, dict):
            self.refuse("sampling", given, "a JSON object")
        self.refuse_unknown(given, SAMPLING_KEYS, "sampling.")
        for key, value in given.items():
            if value is None:
                continue
            self.check_sampling(key, value)
            if key in ("stop", "stop_token_ids"):
                value = (value,) if isinstance(value, str) else tuple(value)
            merged[key] = value
        return SamplingParams(**merged)

    def check_sampling(self, key: str, value: object) -> None:
        name = f"sampling.{key}"
        if key == "ignore_eos":
            if not isinstance(value, bool):
                self.refuse(name, value, "true or false")
        elif key == "stop":
            if not _is_stop(value):
                self.refuse(name, value, "a non-empty string or a list of them")
        elif key == "stop_token_ids":
            if not isinstance(value, list):
                self.refuse(name, value, f"a list of {SAMPLING_RANGES[key].allowed}")
            for i, token in enumerate(value):
                self.within(f"{name}[{i}]", key, token)
        else:
            self.within(name, key, value)

    def within(self, shown: str, key: str, value: object) -> None:
        known = SAMPLING_RANGES[key]
        if not known.allows(value):
            self.refuse(shown, value, f"{known.allowed}; {known.remedy}")


def _depth(value: object) -> int:
    """Nesting depth of lists and objects, without recursion."""
    depth, level = 0, [value]
    while level := [
        inner
        for part in level
        if isinstance(part, dict | list)
        for inner in (part.values() if isinstance(part, dict) else part)
    ]:
        depth += 1
    return depth


def _is_stop(value: object) -> bool:
    if isinstance(value, str):
        return bool(value)
    return isinstance(value, list) and all(isinstance(s, str) and s for s in value)

"""Parsing one line of a workload file: JSON to requests, or an error with place, key and value."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from hydraspec.config import structured
from hydraspec.config.ranges import MAX_INT64, SAMPLING_RANGES, Range, entries, too_many_ends
from hydraspec.types import Picture, Request, SamplingParams, WorkloadError
from hydraspec.workloads.messages import check_order, parse_messages
from hydraspec.workloads.pictures import read_picture

PROMPTS = ("prompt", "messages", "prompt_token_ids", "turns")
KEYS = ("id", *PROMPTS, "system", "category", "answer", "max_tokens", "sampling", "meta")
MAX_META_DEPTH = 50  # levels; deeper nesting could not be written to requests.jsonl
SAMPLING_KEYS = (
    *("temperature", "top_k", "top_p", "min_p", "seed"),
    *("stop", "stop_token_ids", "ignore_eos", "min_tokens", "n"),
    *("logprobs", "prompt_logprobs", "structured"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words"),
)


def parse_line(
    raw: bytes,
    *,
    place: str,
    index: int,
    number: int,
    defaults: Callable[[int], SamplingParams],
    folder: Path | None = None,
) -> list[Request]:
    """Parse one line: a request, or with `turns` one for each. The first has place `index` among
    the requests of the workload; the line, counted from 0, is number `number`. A line's sampling
    keys override `defaults` of a request's place; a null key is as good as absent. Paths of
    pictures begin in `folder`; a picture that cannot be read has its `error` set.

    Raises:
        WorkloadError: beginning with `place`, naming the key, the value and what is allowed.
    """
    line = _Line(place, folder)
    values = line.decode(raw)
    line.refuse_unknown(values, KEYS, "")
    given = [key for key in PROMPTS if values.get(key) is not None]
    if len(given) != 1:
        found = " and ".join(given) if given else "none of them"
        line.fail(f"give exactly one of {', '.join(PROMPTS)}; it has {found}")
    own_id = line.checked("id", values.get("id"))
    id_ = str(number if own_id is None else own_id)
    turns = line.turns(values)
    answers = line.answers(values.get("answer"), len(turns))
    messages, pictures = line.messages(values.get("messages"))
    token_ids = line.token_ids("prompt_token_ids", values.get("prompt_token_ids"))
    requests = [
        Request(
            index=index + i,
            id=f"{id_}/{i + 1}" if turns else id_,
            sampling=line.sampling(values, defaults(index + i)),
            prompt=line.checked("prompt", values.get("prompt")),
            messages=turns[i].messages if turns else messages,
            prompt_token_ids=turns[i].token_ids if turns else token_ids,
            category=line.checked("category", values.get("category")),
            answer=answer,
            meta=line.meta(values.get("meta")),
            pictures=pictures,
            after=index + i - 1 if i else None,
            turn=i + 1,
        )
        for i, answer in enumerate(answers)
    ]
    num_samples = requests[0].sampling.n
    if num_samples == 1:
        return requests
    if turns:
        line.refuse("sampling.n", num_samples, "1 in a conversation")
    has_own_seed = (values.get("sampling") or {}).get("seed") is not None
    return [_sample(requests[0], i, None if has_own_seed else defaults) for i in range(num_samples)]


def _sample(
    first: Request, number: int, defaults: Callable[[int], SamplingParams] | None
) -> Request:
    """Sample `number`, counted from 0, of a prompt whose first sample is given. Its seed is that of
    its place or, for a line with its own (no `defaults`), so many more."""
    index, seed = first.index + number, (first.sampling.seed + number) & MAX_INT64
    if defaults is not None:
        seed = defaults(index).seed
    sampling = replace(first.sampling, seed=seed)
    return replace(first, index=index, id=f"{first.id}#{number + 1}", sampling=sampling)


@dataclass(slots=True, frozen=True)
class _Turn:
    """The new part of a turn's prompt: messages or token ids."""

    messages: list[dict[str, Any]] | None
    token_ids: list[int] | None


class _Line:
    """Checks of one line; every error message begins with the line's place."""

    def __init__(self, place: str, folder: Path | None) -> None:
        self.place, self.folder = place, folder

    def fail(self, reason: str) -> NoReturn:
        raise WorkloadError(f"{self.place}: {reason}")

    def refuse(self, key: str, value: object, allowed: str) -> NoReturn:
        self.fail(f"{key}: {shown(value)} is not allowed; it must be {allowed}")

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

    def checked(self, key: str, value: Any) -> Any:
        """The value, which is refused unless it is null or FIELDS allows it."""
        holds, allowed = FIELDS[key]
        if value is not None and not holds(value):
            self.refuse(key, value, allowed)
        return value

    def answer(self, value: object) -> str | None:
        return None if self.checked("answer", value) is None else str(value)

    def answers(self, value: object, num_turns: int) -> list[str | None]:
        """An answer for each request of the line; in a conversation, an answer that is not a list
        is that of the last turn."""
        if not num_turns:
            return [self.answer(value)]
        if not isinstance(value, list):
            return [*[None] * (num_turns - 1), self.answer(value)]
        if len(value) != num_turns:
            self.refuse("answer", value, f"one answer, of the last turn, or a list of {num_turns}")
        return [self.answer(one) for one in value]

    def meta(self, value: object) -> object:
        if _depth(value) > MAX_META_DEPTH:
            self.fail(f"meta: is nested too deeply; allowed are {MAX_META_DEPTH} levels")
        return value

    def messages(self, value: object) -> tuple[list[dict[str, Any]] | None, tuple[Picture, ...]]:
        """The messages, and the pictures of their parts."""
        if value is None:
            return None, ()
        read = partial(read_picture, folder=self.folder)
        messages, pictures = parse_messages(value, self.refuse, read)
        check_order([message["role"] for message in messages], self.fail)
        return messages, pictures

    def turns(self, values: Mapping[str, Any]) -> list[_Turn]:
        """The new part of each turn; empty where the line is no conversation."""
        value, system = values.get("turns"), self.checked("system", values.get("system"))
        if value is None:
            if system is not None:
                self.fail(
                    '"system" belongs to "turns"; with "messages" write a message of that role'
                )
            return []
        allowed = "a non-empty list of user messages, all strings or all lists of token ids"
        if not isinstance(value, list) or not value:
            self.refuse("turns", value, allowed)
        if isinstance(value[0], list):
            if system is not None:
                self.fail('"system" is text, and the turns are token ids: put it into the first')
            return [_Turn(None, self.token_ids(f"turns[{i}]", v)) for i, v in enumerate(value)]
        for i, content in enumerate(value):
            if not isinstance(content, str) or not content.strip():
                self.refuse(f"turns[{i}]", content, "a string with something in it, as the first")
        first = [{"role": "system", "content": system}] if system else []
        messages = [[{"role": "user", "content": content}] for content in value]
        return [_Turn([*first, *messages[0]], None), *(_Turn(m, None) for m in messages[1:])]

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
        given = self.checked("sampling", values.get("sampling")) or {}
        self.refuse_unknown(given, SAMPLING_KEYS, "sampling.")
        for key, value in given.items():
            if value is None:
                continue
            self.check_sampling(key, value)
            merged[key] = as_params(key, value)
        return self.checked_together(SamplingParams(**merged))

    def checked_together(self, sampling: SamplingParams) -> SamplingParams:
        """The parameters, which are refused where one does not fit the other."""
        if sampling.min_tokens > sampling.max_tokens:
            allowed = f"at most max_tokens, which is {sampling.max_tokens}"
            self.refuse("sampling.min_tokens", sampling.min_tokens, allowed)
        num_stops = len(sampling.stop_token_ids)
        if allowed := too_many_ends(sampling.min_tokens, num_stops):
            self.refuse("sampling.stop_token_ids (entries)", num_stops, allowed)
        if sampling.n > 1 and sampling.temperature == 0:
            allowed = "1 at temperature 0, where all samples are the same"
            self.refuse("sampling.n", sampling.n, allowed)
        if key := structured.clash(sampling):
            allowed = f"{structured.BESIDE[key]} beside sampling.structured"
            self.refuse(f"sampling.{key}", getattr(sampling, key), allowed)
        return sampling

    def check_sampling(self, key: str, value: Any) -> None:
        name = f"sampling.{key}"
        if name not in FIELDS:
            self.within(name, key, value)
            return
        self.checked(name, value)
        if key == "structured":
            self.refuse_unknown(value, tuple(structured.ALLOWED), f"{name}.")
            if (wrong := structured.misuse(value)) is not None:
                self.refuse(f"{name}{wrong.place}", wrong.value, wrong.allowed)
        for place, known, entry in entries(key, value):
            self.inside(f"{name}{place}", known, entry)

    def within(self, name: str, key: str, value: object) -> None:
        self.inside(name, SAMPLING_RANGES[key], value)

    def inside(self, name: str, known: Range, value: object) -> None:
        if not known.allows(value):
            self.refuse(name, value, f"{known.allowed}; {known.remedy}")


def as_params(key: str, value: Any) -> Any:
    """The checked value of a sampling key as SamplingParams has it: tuples in place of lists."""
    if key in ("stop", "stop_token_ids"):
        return (value,) if isinstance(value, str) else tuple(value)
    if key == "logit_bias":
        return tuple(sorted((int(token), float(bias)) for token, bias in value.items()))
    if key == "structured":
        return structured.as_structured(value)
    return tuple(map(tuple, value)) if key == "bad_words" else value


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


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_id(value: object) -> bool:
    return bool(value) if isinstance(value, str) else isinstance(value, int) and _is_number(value)


def _is_stop(value: object) -> bool:
    if isinstance(value, str):
        return bool(value)
    return isinstance(value, list) and all(isinstance(s, str) and s for s in value)


def shown(value: object) -> str:
    """Text of a value for a message, cut after 80 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


TEXT = (lambda value: isinstance(value, str), "a string")
# Key → a test of its values, and the allowed values in words.
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "id": (_is_id, "a non-empty string or an integer"),
    "prompt": (
        lambda value: isinstance(value, str) and bool(value.strip()),
        "a string with something in it",
    ),
    "category": TEXT,
    "system": TEXT,
    "answer": (lambda value: isinstance(value, str) or _is_number(value), "a string or a number"),
    "sampling": (lambda value: isinstance(value, dict), "a JSON object"),
    "sampling.ignore_eos": (lambda value: isinstance(value, bool), "true or false"),
    "sampling.stop": (_is_stop, "a non-empty string or a list of them"),
    "sampling.stop_token_ids": (
        lambda value: isinstance(value, list),
        f"a list of {SAMPLING_RANGES['stop_token_ids'].allowed}",
    ),
    "sampling.logit_bias": (
        lambda value: isinstance(value, dict),
        'an object of biases by token id: {"42": -1.5}',
    ),
    "sampling.structured": (lambda value: isinstance(value, dict), "a JSON object"),
    "sampling.bad_words": (
        lambda value: isinstance(value, list) and all(isinstance(word, list) for word in value),
        "a list of lists of token ids: [[42], [7, 8]]",
    ),
}

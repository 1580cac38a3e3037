"""Values of `sampling.structured`, for the configuration and for lines of a workload."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydraspec.config.engines import NATIVE
from hydraspec.config.rules import Rule
from hydraspec.config.schema import RunConfig, StructuredConfig, Verification
from hydraspec.parameters import SamplingParams, Structured

ALLOWED = {  # by kind
    "json": "a JSON schema: an object, or one as text",
    "regex": "a regular expression, as text of one character or more",
    "grammar": "EBNF, as text of one character or more",
    "choice": "a list of different strings of one character or more",
}
BESIDE = {  # sampling keys that leave a grammar no token, or no end, and their values beside one
    "ignore_eos": "false",
    "min_tokens": "0",
    "bad_words": "[]",
    "stop": "[]",  # these two could cut an output before its end
    "stop_token_ids": "[]",
}


def holds(kind: str, value: object) -> bool:
    """Returns whether a value may be a grammar of this kind; the engine compiles it."""
    if kind == "choice":
        is_list = isinstance(value, list) and bool(value)
        texts = value if is_list and isinstance(value, list) else []
        return all(isinstance(text, str) and text for text in texts) and (
            is_list and len(set(texts)) == len(texts)
        )
    if kind == "json":
        return isinstance(value, dict) or (isinstance(value, str) and _is_object(value))
    return isinstance(value, str) and bool(value)


@dataclass(slots=True, frozen=True)
class Misuse:
    """A value that is not allowed; `place` is to be written after the key sampling.structured."""

    place: str
    value: object
    allowed: str


def misuse(given: Mapping[str, Any]) -> Misuse | None:
    """The first value of a line, by kind, that is not allowed; None: there is none."""
    named = {kind: value for kind, value in given.items() if value is not None}
    if len(named) != 1:
        return Misuse("", list(named), f"one of {', '.join(ALLOWED)}")
    wrong = (Misuse(f".{k}", v, ALLOWED[k]) for k, v in named.items() if not holds(k, v))
    return next(wrong, None)


def as_structured(given: Mapping[str, Any]) -> Structured | None:
    """The grammar of checked values by kind, of which one at most is not None."""
    for kind, value in given.items():
        if value is not None:
            if kind == "json" and isinstance(value, str):
                value = json.loads(value)
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            return Structured(kind, text)
    return None


def by_kind(config: StructuredConfig) -> dict[str, Any]:
    """The values of the configuration by kind."""
    return {kind: getattr(config, kind) for kind in ALLOWED}


def clash(sampling: SamplingParams) -> str | None:
    """The first key that has a value which is not allowed beside a grammar; None: there is none."""
    if sampling.structured is None:
        return None
    return next((key for key in BESIDE if getattr(sampling, key)), None)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _any(config: RunConfig) -> bool:
    return as_structured(by_kind(config.sampling.structured)) is not None


def _rules_of(kind: str, before: Sequence[str]) -> Iterator[Rule]:
    def is_alone(value: object, config: RunConfig) -> bool:
        others = (getattr(config.sampling.structured, other) for other in before)
        return value is None or all(other is None for other in others)

    key = f"sampling.structured.{kind}"
    yield Rule(
        key,
        lambda value, c: value is None or holds(kind, value),
        f"{ALLOWED[kind]}, or null",
        "is no grammar",
    )
    yield Rule(
        key,
        is_alone,
        "one of " + ", ".join(ALLOWED),
        "is given beside another grammar",
        "leave one of the two out",
    )


def _rules() -> Iterator[Rule]:
    kinds = list(ALLOWED)
    for i, kind in enumerate(kinds):
        yield from _rules_of(kind, kinds[:i])
    for name, allowed in BESIDE.items():
        yield Rule(
            f"sampling.{name}",
            lambda value, c: not value,
            f"{allowed} with sampling.structured",
            "may leave the grammar no token, or no end",
            "leave one of the two out",
            when=_any,
        )
    yield Rule(
        "method.verification",
        lambda rule, c: rule is not Verification.synthetic,
        "standard, block with sampling.structured",
        "accepts drafts that the grammar forbids",
        "choose one of these, or leave sampling.structured out",
        when=_any,
    )
    yield Rule(
        "engine.name",
        lambda name, c: name == NATIVE,
        "native with sampling.structured",
        "follows no grammar here",
        "choose engine=native, or leave sampling.structured out",
        when=_any,
    )
    yield Rule(
        "parallelism.pipeline",
        lambda stages, c: stages == 1,
        "1 with sampling.structured",
        "is not available with a grammar: a stage knows no drafts before its step",
        "choose another parallelism, or leave sampling.structured out",
        when=_any,
    )


STRUCTURED_RULES = tuple(_rules())

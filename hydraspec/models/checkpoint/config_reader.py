"""Looks keys of a raw config.json up and says what is wrong with them, naming the folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hydraspec.errors import CheckpointError

MAX_COUNT = 1 << 24  # sixteen million: more than any vocabulary, width or length of a model
MAX_SHOWN = 200  # characters of a value in a message
MAX_NUMBER = 1e30  # float32 holds this number, its inverse, and sums of multiples
MAX_EPS = 1.0  # of a norm: a larger one would outweigh the mean square of activations


class ConfigReader:
    """Reader of a config's keys. An absent or null key has the family's default, if one exists."""

    def __init__(
        self, values: Mapping[str, Any], where: str, defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.values, self.where, self.defaults = values, where, defaults or {}

    def fail(self, key: str, expected: str) -> CheckpointError:
        """The error for a key's value, for the caller to raise; `expected` may end with what to do,
        after a colon."""
        found = shown(self.values[key]) if key in self.values else "nothing"
        remedy = "" if ": " in expected else ": mend the config, or download the checkpoint again"
        return CheckpointError(
            f"config.json of {self.where!r}: {key} is {found}; expected {expected}{remedy}"
        )

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; if absent or null, the family's default, else `default`."""
        value = self.values.get(key)
        return self.defaults.get(key, default) if value is None else value

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """The integer of a key. Raises CheckpointError unless it is from `least` to MAX_COUNT."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.fail(key, f"an integer of at least {least}")
        if value > MAX_COUNT:  # tables of this size would exhaust the memory before any message
            raise self.fail(key, f"an integer of at most {MAX_COUNT}")
        return value

    def optional_count(self, *keys: str) -> int | None:
        """The count of the first of these keys that is given; None where all are absent or null."""
        return next((self.count(key) for key in keys if self.get(key) is not None), None)

    def flag(self, *keys: str) -> bool | None:
        """The flag under these keys; None where all are absent or null. Raises CheckpointError for
        a value of another type, and where two of the keys contradict each other."""
        found = {key: value for key in keys if (value := self.get(key)) is not None}
        for key, value in found.items():
            if not isinstance(value, bool):
                raise self.fail(key, "true or false: mend the config")
            first = next(iter(found))
            if value != found[first]:
                raise self.fail(key, f"the same as {first}, {found[first]}: mend the config")
        return next(iter(found.values()), None)

    def number(
        self,
        key: str,
        default: float | None = None,
        *,
        least: float = 1 / MAX_NUMBER,
        most: float = MAX_NUMBER,
    ) -> float:
        """The number of a key. Raises CheckpointError unless it is above 0 and from `least` to
        `most`; the defaults are the range that float32 can compute with."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.fail(key, "a number above 0")
        if not least <= value <= most:
            raise self.fail(key, f"a number from {least:g} to {most:g}")
        return float(value)

    def eps(self, key: str, default: float | None = None) -> float:
        """The number that a norm adds to the mean square. Raises CheckpointError unless it is above
        0 and at most MAX_EPS."""
        return self.number(key, default, most=MAX_EPS)

    def part(self, key: str, values: Mapping[str, Any]) -> ConfigReader:
        """A reader of `values`, which stand under `key`; messages name both."""
        return ConfigReader({f"{key}.{name}": value for name, value in values.items()}, self.where)


def number_that_is_not_finite(config: Mapping[str, Any]) -> tuple[str, float] | None:
    """Key and value of a NaN or an infinity (1e400 is one) anywhere in a config, or None."""
    rest: list[tuple[str, Any]] = [(str(key), value) for key, value in config.items()]
    while rest:
        key, value = rest.pop()
        if isinstance(value, float) and not math.isfinite(value):
            return key, value
        if isinstance(value, Mapping):
            rest += [(f"{key}.{name}", inner) for name, inner in value.items()]
        elif isinstance(value, list):
            rest += [(f"{key}[{i}]", inner) for i, inner in enumerate(value)]
    return None


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's keys: top level, or `text_config` of a multimodal wrapper."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def shown(value: object) -> str:
    """Text of a file's value for a message: its start if it is long, its type if it has no text."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # ValueError: an integer of thousands of digits
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."

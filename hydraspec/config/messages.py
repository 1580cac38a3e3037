"""The form of a configuration error: key, value given, what is wrong, what is allowed, remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from hydraspec.errors import ConfigurationError

REMEDY = "choose a value that is allowed"  # unless a better one is known
_ON, _OFF = ("full", "wandb", "online"), ("none", "disabled")
# Other words for choices, which may be spelt like a choice that means something else ("gpu" like
# "cpu", "enabled" like "disabled"): the first choice that the key has is meant, else no choice.
OTHER_WORDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpu", "nvidia"), ("cuda",)),
    **dict.fromkeys(("npu", "tpu", "xpu"), ()),
    **dict.fromkeys(("fp16", "f16", "half"), ("float16",)),
    **dict.fromkeys(("bf16", "bfloat"), ("bfloat16",)),
    **dict.fromkeys(("fp32", "f32", "float"), ("float32",)),
    **dict.fromkeys(("fp64", "f64", "double"), ("float64",)),
    **dict.fromkeys(("float8", "f8", "e4m3"), ("fp8",)),
    **dict.fromkeys(("on", "true", "yes", "enable", "enabled"), _ON),
    **dict.fromkeys(("off", "false", "no", "disable"), _OFF),
    "dummy": ("random",),
    "unprocessed": ("raw",),
}


def refusal(
    key: str, value: object, problem: str, *, allowed: str, remedy: str = ""
) -> ConfigurationError:
    """The error for the value of a key, shown as it would be typed."""
    return ConfigurationError(
        f"{key}={show(value)} {problem}\n  allowed: {allowed}\n  to do: {remedy or REMEDY}",
        key=key,
    )


def show(value: object) -> str:
    """A value as a person types it in YAML or on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value if value else "''"
    if isinstance(value, list):
        return "[" + ", ".join(show(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {show(item)}" for key, item in value.items()) + "}"
    return str(value)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant: a similar one, or else one that begins with `word`,
    or that `word` begins with; None without any."""
    by_lower = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=0.6)
    if len(word) > 2:
        matches += [name for name in by_lower if name.startswith(word.lower())]
        matches += [name for name in by_lower if len(name) > 2 and word.lower().startswith(name)]
    return by_lower[matches[0]] if matches else None


def meant_choice(word: str, choices: Iterable[str]) -> str | None:
    """The choice that was probably meant: that of OTHER_WORDS, whose words are looked up without
    what follows a colon ("gpu:0"), else the `nearest` one; None without any."""
    known = list(choices)
    others = OTHER_WORDS.get(word.lower().partition(":")[0])
    if others is None:
        return nearest(word, known)
    return next((choice for choice in others if choice in known), None)


def listing(words: Iterable[str]) -> str:
    """The words in alphabetical order, separated by commas."""
    return ", ".join(sorted(words))

"""Options of a method: the keys under method.options, which the method declares in a dataclass.

A built-in method names its dataclass in OPTIONS, a method of another package in an entry point. A
field's type is checked as that of any key; `between` gives it a range.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hydraspec import plugins
from hydraspec.config.messages import refusal

OPTIONS = {  # method -> "module:dataclass"
    "dspark": "hydraspec.config.options:DSparkOptions",
    "ngram": "hydraspec.config.options:NgramOptions",
    "suffix": "hydraspec.config.options:SuffixOptions",
}
KEY = "method.options"
LONGEST = 32  # tokens that method=ngram compares at each place of a text


@dataclasses.dataclass(slots=True, kw_only=True)
class NoOptions:
    """The options of a method that has none."""


def between(least: float, most: float) -> dict[str, Any]:
    """Field metadata with the range of a number, both ends allowed: `field(metadata=between(1,
    8))`."""
    return {"range": (least, most)}


@dataclasses.dataclass(slots=True, kw_only=True)
class NgramOptions:
    """Options of method=ngram.

    Attributes:
        prompt_lookup_min: number of last tokens that must have stood together before.
        prompt_lookup_max: number of last tokens that are looked up at most.
    """

    prompt_lookup_min: int = dataclasses.field(default=2, metadata=between(1, LONGEST))
    prompt_lookup_max: int = dataclasses.field(default=5, metadata=between(1, LONGEST))

    def __post_init__(self) -> None:
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if least > most:
            raise refusal(
                f"{KEY}.prompt_lookup_min",
                least,
                f"is above {KEY}.prompt_lookup_max={most}",
                allowed=f"1 to {most}",
                remedy="raise prompt_lookup_max, or lower prompt_lookup_min",
            )


@dataclasses.dataclass(slots=True, kw_only=True)
class DSparkOptions:
    """Options of method=dspark.

    Attributes:
        min_survival: drafts from the first one on whose estimated probability to be accepted, with
            all before it, is below this are not verified; None: all K are.
    """

    min_survival: float | None = dataclasses.field(default=None, metadata=between(0, 1))


@dataclasses.dataclass(slots=True, kw_only=True)
class SuffixOptions:
    """Options of method=suffix, with vLLM's names, less the prefix suffix_decoding_.

    Attributes:
        max_tree_depth: tokens of the longest strings that are counted. A match has one token less
            at most; drafts may go on further.
        max_cached_requests: finished outputs that are drafted from at most; 0: none.
        max_cache_mib: MiB of host memory that these take at most.
        max_spec_factor: drafts at most, for each token of the match.
        min_token_prob: least probability of a draft and all before it, by counts.
        min_acceptance: least share of a step's requests that are expected to accept a draft at a
            position, by recent steps; below it the step has no rows there. 0: it always has.
    """

    max_tree_depth: int = dataclasses.field(default=24, metadata=between(2, 64))
    max_cached_requests: int = dataclasses.field(default=10000, metadata=between(0, 1000000))
    max_cache_mib: int = dataclasses.field(default=1024, metadata=between(1, 65536))
    max_spec_factor: float = dataclasses.field(default=1.0, metadata=between(0.1, 32))
    min_token_prob: float = dataclasses.field(default=0.1, metadata=between(0, 1))
    min_acceptance: float = dataclasses.field(default=0.15, metadata=between(0, 1))


def options_of(method: object) -> type:
    """The dataclass of a method's options; NoOptions for a method without any.

    Raises:
        ConfigurationError: the entry point names no dataclass.
    """
    points = plugins.offered(plugins.OPTIONS, OPTIONS)
    if method not in points:
        return NoOptions
    point = points[str(method)]
    schema = plugins.load(point)
    if not (isinstance(schema, type) and dataclasses.is_dataclass(schema)):
        raise plugins.broken(point, f"{schema!r} is no dataclass")
    return schema


def is_option(name: str) -> bool:
    """Returns whether some method has an option of this name."""
    methods = plugins.offered(plugins.OPTIONS, OPTIONS)
    return any(
        field.name == name for method in methods for field in dataclasses.fields(options_of(method))
    )


def check_options(options: Any) -> None:
    """Raise ConfigurationError for the first option whose number is outside its range."""
    for field in dataclasses.fields(options):
        least, most = field.metadata.get("range", (None, None))
        value = getattr(options, field.name)
        if least is not None and value is not None and not least <= value <= most:
            key = f"{KEY}.{field.name}"
            raise refusal(key, value, "is out of range", allowed=f"{least} to {most}")

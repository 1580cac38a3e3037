"""Rules of the configuration as data, and the loop that turns a broken one into its message."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from hydraspec.config.messages import meant_choice, refusal
from hydraspec.config.schema import RunConfig

# A format string with {value}, and {c.…} for the configuration, or a function of the two.
Text = str | Callable[[Any, RunConfig], str]


@dataclass(slots=True, frozen=True)
class Rule:
    """A condition that the value of a key must satisfy.

    Attributes:
        key: dotted; the message shows its value. `<group>.name` is shown as it is typed, `<group>`,
            unless `names` is true.
        holds: whether a value is allowed, given the whole configuration.
        allowed, problem, remedy: parts of the message.
        when: whether the rule applies to a configuration.
    """

    key: str
    holds: Callable[[Any, RunConfig], object]
    allowed: Text
    problem: Text = "is out of range"
    remedy: Text = ""
    when: Callable[[RunConfig], bool] = lambda config: True
    names: bool = False


def enforce(rules: Iterable[Rule], config: RunConfig) -> None:
    """Raise the ConfigurationError of the first rule that does not hold."""
    for rule in rules:
        if not rule.when(config):
            continue
        value = attrgetter(rule.key)(config)
        if not rule.holds(value, config):
            problem, allowed, remedy = (
                text.format(value=value, c=config) if isinstance(text, str) else text(value, config)
                for text in (rule.problem, rule.allowed, rule.remedy)
            )
            given = getattr(value, "value", value)  # plain value of an Enum
            key = rule.key if rule.names else rule.key.removesuffix(".name")
            raise refusal(key, given, problem, allowed=allowed, remedy=remedy)


def at_least(key: str, least: int, allowed: str = "") -> Rule:
    """The rule that the value of `key` is `least` or more, or null; `allowed` says so in words."""
    return Rule(key, lambda v, c: v is None or v >= least, allowed or f"{least} or more")


def goodput_limits(group: str) -> Iterator[Rule]:
    """Rules of the keys of a group's `goodput`."""
    for name in ("ttft_ms", "inter_token_ms"):
        yield Rule(
            f"{group}.goodput.{name}",
            lambda limit, c: limit is None or 0 < limit < math.inf,
            "milliseconds above 0, or null for no limit",
        )


def did_you_mean(key: str, word: str, known: Iterable[str], otherwise: str = "") -> str:
    """A remedy: the known value of `key` that is nearest to `word`, and where `word` goes on after
    it the known ones that do; else `otherwise`."""
    names = list(known)
    meant = meant_choice(word, names)
    if meant is None:
        return otherwise
    longer = [name for name in names if name.startswith(f"{meant}_")]
    found = [meant, *sorted(longer)] if word.startswith(f"{meant}_") else [meant]
    return f"did you mean {' or '.join(f'{key}={name}' for name in found)}?"

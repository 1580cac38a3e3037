"""Rules that a record can be replayed under, typed as key=value[,value…]."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hydraspec.analysis.replay.record import Record
from hydraspec.config.messages import listing, nearest
from hydraspec.study.runs import refuse

K = "method.num_speculative_tokens"
VERIFICATION = "method.verification"
MAX_TOKENS = "sampling.max_tokens"
MIN_PROBABILITY = "min_probability"
CANDIDATES = "candidates"
SAME_IF_GREEDY = ("standard", "block")  # both accept the same drafts of a greedy request
A_NEW_RUN = "run it: what the target or the drafter would compute then is not recorded"


@dataclass(slots=True, frozen=True, kw_only=True)
class Rule:
    """A way to draft and to accept.

    Attributes:
        num_speculative_tokens: the most drafts of a step.
        max_tokens: the length at which outputs are cut; None: they are not.
        min_probability: a step offers only the drafts before the first to which the drafter gives
            a smaller probability.
        candidates: the number of the drafter's best tokens among which the target's is accepted, at
            every position: a tree in which each token has that many children.
    """

    num_speculative_tokens: int
    max_tokens: int | None = None
    min_probability: float = 0.0
    candidates: int = 1

    @property
    def name(self) -> str:
        """The rule in words: "K=2, min_probability=0.4"."""
        parts = [f"K={self.num_speculative_tokens}"]
        if self.max_tokens is not None:
            parts.append(f"{MAX_TOKENS}={self.max_tokens}")
        if self.min_probability:
            parts.append(f"{MIN_PROBABILITY}={self.min_probability:g}")
        if self.candidates > 1:
            parts.append(f"{CANDIDATES}={self.candidates}")
        return ", ".join(parts)


@dataclass(slots=True, frozen=True)
class _Key:
    field: str | None  # of Rule; None: the key has no effect
    read: Callable[[str], Any]
    allows: Callable[[Any, Record], bool]
    allowed: Callable[[Record], str]
    remedy: str = A_NEW_RUN


KEYS = {
    K: _Key(
        "num_speculative_tokens",
        int,
        lambda k, record: 1 <= k <= record.num_drafts,
        lambda record: f"1 to {record.num_drafts}, what was recorded",
        "record a run with more drafts: those of other steps are not known",
    ),
    VERIFICATION: _Key(
        None,
        str,
        lambda name, record: name in SAME_IF_GREEDY,
        lambda record: "standard, block",
    ),
    MAX_TOKENS: _Key(
        "max_tokens", int, lambda count, record: count >= 1, lambda record: "1 or more"
    ),
    MIN_PROBABILITY: _Key(
        "min_probability",
        float,
        lambda share, record: 0 <= share <= 1,
        lambda record: "0 to 1",
        "choose a probability",
    ),
    CANDIDATES: _Key(
        "candidates", int, lambda count, record: count >= 1, lambda record: "1 or more"
    ),
}


def read_rules(typed: Sequence[str], record: Record) -> list[Rule]:
    """All combinations of the values typed; every K up to the recorded one if no K is typed.

    Raises:
        ConfigurationError: a key or value that cannot be replayed from the record.
    """
    values: dict[str, list[Any]] = {K: list(range(1, record.num_drafts + 1))}
    for each in typed:
        key, equals, text = each.partition("=")
        if not equals:
            problem = "is no key=value"
            raise refuse(each, problem, allowed=listing(KEYS), remedy=f"write {K}=1,2")
        key = K if key == "K" else key
        if key not in KEYS:
            # A key of the run's own configuration is no misspelling of another.
            meant = None if key in record.run.settings else nearest(key, KEYS)
            remedy = f"did you mean {meant}?" if meant else A_NEW_RUN
            problem = "cannot be replayed"
            raise refuse(each, problem, allowed=f"K, {listing(KEYS)}", remedy=remedy)
        values[key] = [_value(key, one, record) for one in text.split(",")]
    _check_sources(values, record)
    names = [name for name in values if KEYS[name].field is not None]
    return [
        Rule(**{KEYS[name].field or "": value for name, value in zip(names, chosen, strict=True)})
        for chosen in itertools.product(*(dict.fromkeys(values[name]) for name in names))
    ]


def _value(key: str, text: str, record: Record) -> Any:
    known = KEYS[key]
    try:
        value = known.read(text)
    except ValueError:
        value = None
    if value is None or not known.allows(value, record):
        problem = "cannot be replayed" if key in (K, VERIFICATION) else "is out of range"
        allowed = known.allowed(record)
        raise refuse(f"{key}={text}", problem, allowed=allowed, remedy=known.remedy)
    return value


def _check_sources(values: dict[str, list[Any]], record: Record) -> None:
    if any(values.get(MIN_PROBABILITY, [])) and record.source == "trace":
        raise refuse(
            f"{MIN_PROBABILITY}={values[MIN_PROBABILITY][0]}",
            "needs the drafter's own probabilities, which a trace has not",
            allowed="0",
            remedy="record the run with metrics.all_positions=true",
        )
    ran = str(record.run.summary["verification"])
    asked = values.get(VERIFICATION, [ran])
    if record.num_sampled and any(name != ran for name in asked):
        raise refuse(
            f"{VERIFICATION}={asked[0]}",
            f"accepts otherwise than {ran} where requests are sampled, as {record.num_sampled} are",
            allowed=ran,
            remedy=A_NEW_RUN,
        )

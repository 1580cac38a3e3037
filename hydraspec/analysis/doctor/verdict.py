"""The verdict on a drafter, from what its variants, its weights and its parts show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hydraspec.analysis.doctor.diagnosis import Diagnosis, Tried
from hydraspec.analysis.doctor.expected import Expected
from hydraspec.analysis.doctor.parts import Effect, module_of
from hydraspec.analysis.doctor.tensors import Oddity
from hydraspec.analysis.doctor.variants import Variant

Class = Literal["convention", "weights", "weak", "healthy"]
SHORT = 0.9  # share of the expected acceptance length that a healthy drafter reaches
RECOVERED = 0.5  # share of what is missing that the repair of a convention brings
LEAST_GAIN = 0.1  # of the acceptance length, below which no repair is proposed
POOR = 1.3  # acceptance length that is weak whatever is expected
MAX_EVIDENCE = 8


@dataclass(slots=True, kw_only=True)
class Damage:
    """What the weights show.

    Attributes:
        oddities: weights with values that training does not leave.
        effects: edits with which drafts are better than as loaded, the strongest first.
    """

    oddities: list[Oddity] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    is_examined: bool = False

    @property
    def certain(self) -> list[Oddity]:
        """Oddities that need no further evidence."""
        return [each for each in self.oddities if each.is_certain]

    @property
    def module(self) -> str | None:
        """The part of the head that is damaged."""
        if self.certain:
            return module_of(self.certain[0].name)
        return module_of(self.effects[0].name) if self.effects else None

    @property
    def best(self) -> float:
        """The acceptance length that the best edit reaches."""
        return max((effect.acceptance for effect in self.effects), default=0.0)


@dataclass(slots=True, kw_only=True)
class Judgement:
    """What is wrong with a drafter.

    Attributes:
        verdict: None where there are too few texts to tell.
        repairs: the conventions that are wrong, in the order in which they were found.
        damage: evidence about the weights; empty where it was not needed.
    """

    verdict: Class | None
    repairs: list[Tried[Variant]] = field(default_factory=list)
    damage: Damage = field(default_factory=Damage)


def judge(
    diagnosis: Diagnosis, expected: Expected | None, examine_weights: Callable[[], Damage]
) -> Judgement:
    """Weigh the evidence; weights are examined only where conventions do not explain enough."""
    if diagnosis.is_unsure:
        return Judgement(verdict=None)
    acceptance = diagnosis.base.acceptance
    if expected is not None and acceptance >= SHORT * expected.acceptance_length:
        return Judgement(verdict="healthy")
    repairs = _worth_proposing(diagnosis, expected)
    if repairs and expected is not None:
        return Judgement(verdict="convention", repairs=repairs)
    damage = examine_weights()
    is_damaged = bool(damage.certain or damage.effects)
    if repairs and not damage.certain and damage.best < _reached(repairs[-1]):
        return Judgement(verdict="convention", repairs=repairs, damage=damage)
    if is_damaged:
        return Judgement(verdict="weights", damage=damage)
    is_weak = expected is not None or acceptance < POOR
    return Judgement(verdict="weak" if is_weak else "healthy", damage=damage)


def _worth_proposing(diagnosis: Diagnosis, expected: Expected | None) -> list[Tried[Variant]]:
    """Repairs that gain enough each, and together recover enough of what is missing."""
    first = before = diagnosis.base.acceptance
    kept = []
    for tried in diagnosis.found:
        if _reached(tried) < (1 + LEAST_GAIN) * before:
            break
        kept.append(tried)
        before = _reached(tried)
    if expected is not None and before - first < RECOVERED * (expected.acceptance_length - first):
        return []
    return kept


def _reached(tried: Tried[Variant]) -> float:
    """The acceptance length with a change."""
    return 1.0 if tried.scores is None else tried.scores.acceptance


def evidence(damage: Damage) -> list[dict[str, object]]:
    """The `evidence` of doctor.json: what is odd, certain findings first."""
    rows: list[dict[str, object]] = [
        {"module": module_of(each.name), "tensor": each.name, "says": each.says}
        for each in damage.certain
    ]
    rows += [
        {
            "module": module_of(each.name),
            "tensor": each.name,
            "says": each.says,
            "acceptance_if_replaced": each.acceptance,
            "nats_gained": each.nats,
        }
        for each in damage.effects
    ]
    return rows[:MAX_EVIDENCE]


def sentence(judgement: Judgement, diagnosis: Diagnosis, expected: Expected | None) -> str:
    """What the verdict means, without the repairs of conventions, which have their own words."""
    accepted = f"acceptance length {diagnosis.base.acceptance:.2f}"
    if expected is not None:
        accepted += f", of {expected.acceptance_length:.2f} that {expected.source} says"
    if judgement.verdict == "weights":
        return f"Weights: {_findings(judgement.damage)} ({accepted})."
    if judgement.verdict == "weak":
        return (
            f"Weak: {accepted}. No convention and no damaged weight explains it: the drafter is "
            "trained too little, for another target, or for other texts."
        )
    if expected is not None:
        return f"Healthy: {accepted}."
    return f"Nothing wrong found: every part helps, and no variant is better ({accepted})."


def _findings(damage: Damage) -> str:
    said: Sequence[tuple[str, str]] = [
        *((each.name, each.says) for each in damage.certain),
        *((each.name, each.says) for each in damage.effects),
    ]
    name, says = said[0]
    return f"{module_of(name)} is damaged: {name} {says}"

"""The verdict on a drafter, from what its variants, its weights and its parts show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from hydraspec.analysis.doctor.diagnosis import LEAST_GAIN, Diagnosis, Tried
from hydraspec.analysis.doctor.expected import Expected
from hydraspec.analysis.doctor.parts import module_of
from hydraspec.analysis.doctor.retraining import Retrained
from hydraspec.analysis.doctor.tensors import Oddity
from hydraspec.analysis.doctor.variants import Variant

Class = Literal["convention", "weights", "weak", "healthy"]
RECOVERED = 0.5  # share of what is missing that the repair of a convention brings
EXPLAINED = 0.08  # share of what is missing that training a damaged part for some steps brings
AHEAD = 1.2  # times the drafts that training the next part gains, of a damaged part
POOR = 1.3  # acceptance length that is weak whatever is expected
MAX_EVIDENCE = 8


@dataclass(slots=True, kw_only=True)
class Damage:
    """What the weights show.

    Attributes:
        oddities: weights with values that training does not leave.
        parts: parts of the head, trained alone, that help most first; empty where it was not tried.
    """

    oddities: list[Oddity] = field(default_factory=list)
    parts: list[Retrained] = field(default_factory=list)

    def explains(self, missing: float | None) -> bool:
        """Returns whether training one part alone brings enough of the acceptance length that is
        missing; where that is not known, whether it brings enough, and more than any other.
        """
        if not self.parts or self.parts[0].drafts <= 0:
            return False
        first = self.parts[0]
        if missing is not None:
            return first.drafts >= EXPLAINED * missing
        second = max((each.drafts for each in self.parts[1:]), default=0.0)
        return first.gain >= LEAST_GAIN and first.drafts >= AHEAD * second

    @property
    def module(self) -> str | None:
        """The part of the head that is damaged."""
        if self.oddities:
            return module_of(self.oddities[0].name)
        return self.parts[0].module if self.parts else None


@dataclass(slots=True, kw_only=True)
class Judgement:
    """What is wrong with a drafter.

    Attributes:
        verdict: None where there are too few texts to tell.
        repairs: the conventions that are wrong, in the order in which they were found.
        damage: evidence about the weights.
    """

    verdict: Class | None
    repairs: list[Tried[Variant]] = field(default_factory=list)
    damage: Damage = field(default_factory=Damage)


def judge(
    diagnosis: Diagnosis,
    expected: Expected | None,
    oddities: list[Oddity],
    retrain: Callable[[], list[Retrained]],
) -> Judgement:
    """Weigh the evidence; parts are trained only where nothing else explains enough."""
    if diagnosis.is_unsure:
        return Judgement(verdict=None)
    damage = Damage(oddities=oddities)
    acceptance = diagnosis.base.acceptance
    is_enough = expected is not None and acceptance >= expected.least
    if is_enough and expected is not None and expected.is_own:
        return Judgement(verdict="healthy", damage=damage)
    repairs = _worth_proposing(diagnosis, expected)
    is_whole = expected is None or (bool(repairs) and _reached(repairs[-1]) >= expected.least)
    if repairs and (not damage.oddities or is_whole):
        return Judgement(verdict="convention", repairs=repairs, damage=damage)
    if damage.oddities:
        return Judgement(verdict="weights", damage=damage)
    if is_enough:
        return Judgement(verdict="healthy", damage=damage)
    damage.parts = retrain()
    missing = None if expected is None else expected.acceptance_length - acceptance
    if damage.explains(missing):
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
        for each in damage.oddities
    ]
    rows += [
        {
            "module": each.module,
            "tensor": each.tensor,
            "says": "drafts better once it is trained alone",
            "acceptance_if_trained": each.acceptance,
            "drafts_gained": each.drafts,
            "probability_gained": each.probability,
        }
        for each in damage.parts
    ]
    return rows[:MAX_EVIDENCE]


def sentence(judgement: Judgement, diagnosis: Diagnosis, expected: Expected | None) -> str:
    """What the verdict means, without the repairs of conventions, which have their own words."""
    accepted = f"acceptance length {diagnosis.base.acceptance:.2f}"
    if expected is not None:
        accepted += f", of {expected.acceptance_length:.2f} that {expected.source}"
    if judgement.verdict == "weights":
        return f"Weights: {_finding(judgement.damage)} ({accepted})."
    if judgement.verdict == "weak":
        seen = (
            "" if judgement.damage.parts else " by its values alone (engine.device=cpu sees more)"
        )
        return (
            f"Weak: {accepted}. No convention explains it, and no weight is damaged{seen}: the "
            "drafter is trained too little, for another target, or for other texts."
        )
    if expected is not None and expected.is_own:
        return f"Healthy: {accepted}."
    return f"Nothing wrong found: no weight is odd, and no variant is better ({accepted})."


def _finding(damage: Damage) -> str:
    if damage.oddities:
        odd = damage.oddities[0]
        return f"{module_of(odd.name)} is damaged: {odd.name} {odd.says}"
    first = damage.parts[0]
    return (
        f"{first.module} is damaged, most likely {first.tensor}: a few training steps on that part "
        f"alone take acceptance to {first.acceptance:.2f}, on any other part to less"
    )

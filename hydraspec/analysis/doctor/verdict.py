"""The verdict on a drafter, from its variants, its weights and the training of its parts."""

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
# Missing: the expected acceptance length minus the measured one.
RECOVERED = 0.5  # least share of what is missing that repaired conventions bring back
EXPLAINED = 0.08  # least share of it that training a damaged part alone brings back, in drafts
AHEAD = 1.2  # if nothing is expected: a damaged part gains this many times what the next one does
POOR = 1.3  # if nothing is expected: a lower acceptance length is called weak
MAX_EVIDENCE = 8


@dataclass(slots=True, kw_only=True)
class Damage:
    """Evidence about damaged weights.

    Attributes:
        oddities: findings about single weights, see `tensors`.
        parts: results of training each part alone, largest gain first; empty if none was trained.
    """

    oddities: list[Oddity] = field(default_factory=list)
    parts: list[Retrained] = field(default_factory=list)

    def explains(self, missing: float | None) -> bool:
        """Returns whether the best part is damaged: trained alone it brings back EXPLAINED of the
        `missing` acceptance length. If that is None (nothing expected), it has to raise acceptance
        by LEAST_GAIN, and AHEAD times as much as the next part.
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
        """The part of the head with the strongest evidence of damage; None without evidence."""
        if self.oddities:
            return module_of(self.oddities[0].name)
        return self.parts[0].module if self.parts else None


@dataclass(slots=True, kw_only=True)
class Judgement:
    """The verdict on a drafter, with its reasons.

    Attributes:
        verdict: None if there are too few texts to tell.
        repairs: changes of wrong conventions, in the order in which they were found.
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
    """Decide the verdict.

    expected: the acceptance length that the drafter should reach, if known.
    oddities: findings about its weights.
    retrain: trains the parts of the head; called only if neither conventions nor findings decide.
    """
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
    """The repairs found that each raise acceptance by LEAST_GAIN; none if together they bring back
    less than RECOVERED of what is missing.
    """
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
    """The acceptance length with a change; 1 if the target does not answer."""
    return 1.0 if tried.scores is None else tried.scores.acceptance


def evidence(damage: Damage) -> list[dict[str, object]]:
    """The `evidence` of doctor.json: findings about weights first, then trained parts."""
    rows: list[dict[str, object]] = [
        {"module": module_of(each.name), "tensor": each.name, "says": each.says}
        for each in damage.oddities
    ]
    rows += [
        {
            "module": each.module,
            "tensor": each.tensor,
            "says": "acceptance rises when this part alone is trained",
            "acceptance_if_trained": each.acceptance,
            "drafts_gained": each.drafts,
            "probability_gained": each.probability,
        }
        for each in damage.parts
    ]
    return rows[:MAX_EVIDENCE]


def sentence(judgement: Judgement, diagnosis: Diagnosis, expected: Expected | None) -> str:
    """The verdict in one sentence, for every verdict but "convention", whose repairs have their
    own.
    """
    accepted = f"acceptance length {diagnosis.base.acceptance:.2f}"
    if expected is not None:
        accepted += f", of {expected.acceptance_length:.2f} that {expected.source}"
    if judgement.verdict == "weights":
        return f"Weights: {_finding(judgement.damage)} ({accepted})."
    if judgement.verdict == "weak":
        seen = "" if judgement.damage.parts else " by its values (engine.device=cpu trains parts)"
        return (
            f"Weak: {accepted}. No convention explains it, and no weight is damaged{seen}: the "
            "drafter is trained too little, for another target, or for other texts."
        )
    if expected is not None and expected.is_own:
        return f"Healthy: {accepted}."
    return f"Nothing wrong found: no odd weight, and no other convention is better ({accepted})."


def _finding(damage: Damage) -> str:
    if damage.oddities:
        odd = damage.oddities[0]
        return f"{module_of(odd.name)} is damaged: {odd.name} {odd.says}"
    first = damage.parts[0]
    return (
        f"{first.module} is damaged: a few training steps on that part alone take acceptance from "
        f"{first.before:.2f} to {first.acceptance:.2f}, on any other part to less; {first.tensor} "
        "gained most, which need not be the weight that is wrong"
    )

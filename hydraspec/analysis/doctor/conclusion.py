"""From a drafter and texts to a verdict: conventions first, then the weights where those do not
explain enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hydraspec.analysis.doctor import parts, tensors
from hydraspec.analysis.doctor.diagnosis import Diagnosis, diagnose
from hydraspec.analysis.doctor.expected import Expected
from hydraspec.analysis.doctor.patient import Patient
from hydraspec.analysis.doctor.scores import Scores, score
from hydraspec.analysis.doctor.verdict import Damage, Judgement, judge, sentence
from hydraspec.speculators.teacher_forcing.texts import Texts
from hydraspec.speculators.teacher_forcing.trial import Trial


@dataclass(slots=True, frozen=True, kw_only=True)
class Conclusion:
    """All that decides about a drafter, and the verdict."""

    diagnosis: Diagnosis
    judgement: Judgement
    expected: Expected | None

    @property
    def words(self) -> str:
        """See verdict.sentence."""
        return sentence(self.judgement, self.diagnosis, self.expected)


def conclude(
    patient: Patient,
    trial: Trial,
    texts: Texts,
    *,
    expected: Expected | None,
    known: Conclusion | None = None,
    on_variant: Callable[[int, int], None] = lambda done, total: None,
) -> Conclusion:
    """Examine a trial of the patient's drafter. `known`: of the same trial, with another
    expectation; what it found is not computed again.
    """
    if known is None:
        diagnosis = diagnose(trial, texts, patient.target, patient.k, on_variant=on_variant)
    else:
        diagnosis = known.diagnosis

    def damage() -> Damage:
        if known is not None and known.judgement.damage.is_examined:
            return known.judgement.damage
        return damage_of(trial, texts, diagnosis.base, patient.k)

    return Conclusion(
        diagnosis=diagnosis, judgement=judge(diagnosis, expected, damage), expected=expected
    )


def damage_of(trial: Trial, texts: Texts, base: Scores, k: int) -> Damage:
    """What the weights of a head show: by themselves, and by what drafts are without them."""
    weights = parts.weights_of(trial.head)
    found = parts.effects(trial.head, base, lambda: score(trial, texts, k), weights)
    return Damage(
        oddities=tensors.oddities(weights), effects=parts.damaged(list(found)), is_examined=True
    )

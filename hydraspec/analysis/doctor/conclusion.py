"""From a drafter and texts to a verdict: conventions first, then the weights where those do not
explain enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hydraspec.analysis.doctor import tensors
from hydraspec.analysis.doctor.diagnosis import Diagnosis, diagnose
from hydraspec.analysis.doctor.expected import Expected, usual
from hydraspec.analysis.doctor.parts import weights_of
from hydraspec.analysis.doctor.patient import Patient
from hydraspec.analysis.doctor.retraining import Retrained, retrained
from hydraspec.analysis.doctor.verdict import Judgement, judge, sentence
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
    """Examine a trial of the patient's drafter. Where its own acceptance length is not known,
    what its method usually reaches is expected. `known`: of the same trial, with another
    expectation; what it found is not computed again.
    """
    k, target = patient.k, patient.target
    expected = expected or usual(patient.config.method.name, k, certainty(texts))
    if known is None:
        diagnosis = diagnose(trial, texts, target, k, patient=patient, on_variant=on_variant)
        oddities = tensors.oddities(weights_of(trial.head))
        parts: list[Retrained] = []
    else:
        diagnosis, damage = known.diagnosis, known.judgement.damage
        oddities, parts = damage.oddities, damage.parts
    judgement = judge(
        diagnosis, expected, oddities, lambda: parts or retrained(trial, target, texts, k)
    )
    return Conclusion(diagnosis=diagnosis, judgement=judgement, expected=expected)


def certainty(texts: Texts) -> float:
    """The mean probability of the target's best token where a chain starts."""
    found: torch.Tensor = texts.target.probs[texts.chains.row + 1, 0]
    return float(found.mean())

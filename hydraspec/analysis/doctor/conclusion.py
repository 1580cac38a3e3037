"""The whole examination of a drafter on given texts: its conventions, then its weights if the
conventions do not explain a low acceptance length.
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
    """The verdict on a drafter, with the measurements it rests on."""

    diagnosis: Diagnosis
    judgement: Judgement
    expected: Expected | None

    @property
    def words(self) -> str:
        """The verdict as a sentence; see verdict.sentence."""
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
    """Examine the drafter of `trial` on the target's texts.

    expected: the acceptance length that this drafter should reach; None: the usual one of its
        method, if that is known for such texts.
    known: an earlier conclusion about the same trial and texts, made with another expectation. Its
        measurements are used again.
    on_variant: see diagnosis.diagnose.
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
    """Mean probability, 0 to 1, of the target's most likely token at the places of first drafts."""
    found: torch.Tensor = texts.target.probs[texts.chains.row + 1, 0]
    return float(found.mean())

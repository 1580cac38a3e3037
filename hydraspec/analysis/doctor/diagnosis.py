"""Ranks the variants of a drafter by acceptance, and says what the matter is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch

from hydraspec.analysis.doctor import contents, feeding, fields
from hydraspec.analysis.doctor.patient import Patient
from hydraspec.analysis.doctor.scores import MIN_TEXTS, Gain, Scores, gain, score
from hydraspec.analysis.doctor.variants import Change, Subject, Variant
from hydraspec.models.base import TargetModel
from hydraspec.speculators.teacher_forcing.texts import Texts, read_texts
from hydraspec.speculators.teacher_forcing.trial import Trial

FAMILIES = (*feeding.FAMILIES, *contents.FAMILIES, *fields.FAMILIES)
MAX_ROUNDS = 3  # a drafter may have several faults: the best variant is kept, and all tried again
LEAST_GAIN = 0.1  # of the acceptance length, below which no repair is proposed
MIN_GAIN = 0.02  # drafts more per start, below which a difference of acceptance is no cause
MIN_NATS = 0.02  # per start, the same of likelihood
SCREENED = 4  # first, variants are compared over one text in so many
KEPT = 8  # variants that are compared over all texts
FEWEST = 8  # texts of a screening
NEAR = 0.9  # variants with this share of the best one's gain are told apart by likelihood


C = TypeVar("C", bound=Change)


@dataclass(slots=True, frozen=True, kw_only=True)
class Tried(Generic[C]):
    """A change and what it brings."""

    change: C
    scores: Scores | None  # None: the target does not answer
    gain: Gain  # drafts accepted per start
    nats: Gain | None = None  # log likelihood of the target's distribution, over a start's K drafts
    is_cause: bool  # the drafter is surely better so


@dataclass(slots=True, kw_only=True)
class Diagnosis:
    """Findings, round after round.

    Attributes:
        base: the drafter as it is.
        rounds: of each round all variants, best first.
        found: the variant that each round kept, in order; empty for a healthy drafter.
        best: the scores after the last variant that was kept.
    """

    base: Scores
    rounds: list[list[Tried[Variant]]] = field(default_factory=list)
    found: list[Tried[Variant]] = field(default_factory=list)
    best: Scores

    @property
    def is_unsure(self) -> bool:
        """Returns whether there are too few texts for an interval."""
        return sum(count > 0 for count in self.base.num_of) < MIN_TEXTS


def diagnose(
    trial: Trial,
    texts: Texts,
    target: TargetModel,
    k: int,
    *,
    patient: Patient | None = None,
    max_rounds: int = MAX_ROUNDS,
    on_variant: Callable[[int, int], None] = lambda done, total: None,
) -> Diagnosis:
    """Try every variant, keep the best if it is surely better, and try again from there.

    on_variant(done, total) is called after each. `patient`: its files are read with other fields.
    """
    base = score(trial, texts, k)
    few = None
    if len(texts.texts) >= SCREENED * FEWEST:
        few = read_texts(target, texts.texts[::SCREENED], k=k, keep=sorted(texts.states))
    result = Diagnosis(base=base, best=base)
    for _ in range(max_rounds):
        subject = Subject(trial=trial, texts=texts, target=target, k=k, patient=patient)
        first, *others = ranked(subject, result.best, few, on_variant)
        result.rounds.append([first, *others])
        if not first.is_cause or first.scores is None:
            break
        before = result.best.acceptance
        result.found.append(first)
        result.best, trial = first.scores, first.change.trial
        if first.scores.acceptance < (1 + LEAST_GAIN) * before:
            break  # it is no repair that anybody is advised
    return result


def variants(subject: Subject) -> Iterator[Variant]:
    """The variants of all families that apply."""
    for family in FAMILIES:
        yield from family(subject)


def ranked(
    subject: Subject, base: Scores, few: Texts | None, on_variant: Callable[[int, int], None]
) -> list[Tried[Variant]]:
    """All variants by acceptance. Causes come first, and of those that accept about as much the
    likeliest; of those that draft alike the least doubtful. Where there are `few` texts, only the
    best over those are compared over all, and no other is a cause.
    """
    with torch.no_grad():
        tried = list(variants(subject))
        screened: list[Tried[Variant]] = []
        if few is not None:
            before = score(subject.trial, few, subject.k)
            screened = _all(tried, replace(subject, texts=few), before, on_variant)
            by_nats = sorted(screened, key=lambda each: -each.nats.mean if each.nats else 0.0)
            best = sorted(screened, key=_place)[:KEPT] + by_nats[:KEPT]
            tried = [each for each in tried if any(each is one.change for one in best)]
            screened = [
                replace(each, is_cause=False)
                for each in screened
                if not any(each.change is one for one in tried)
            ]
        found = _all(tried, subject, base, on_variant, len(tried) + len(screened))
    found.sort(key=_place)
    causes = [each for each in found if each.is_cause]
    near = [each for each in causes if each.gain.mean >= NEAR * causes[0].gain.mean]
    near.sort(key=lambda each: (-round(each.nats.mean if each.nats else 0.0, 6), each.change.doubt))
    first = near[:1]
    others = [each for each in (*found, *screened) if each not in first]
    return first + sorted(others, key=_place)


def _place(tried: Tried[Variant]) -> tuple[float, int]:
    return -round(tried.gain.mean, 9), tried.change.doubt


def _all(
    tried: list[Variant],
    subject: Subject,
    base: Scores,
    on_variant: Callable[[int, int], None],
    num_compared: int | None = None,
) -> list[Tried[Variant]]:
    found = []
    for number, variant in enumerate(tried, start=1):
        found.append(_compared(variant, subject, base, num_compared or len(tried)))
        on_variant(number, len(tried))
    return found


def _compared(
    variant: Variant, subject: Subject, base: Scores, num_compared: int
) -> Tried[Variant]:
    """A variant is a cause if more is accepted; or if as much is, and the target's tokens are
    likelier."""
    scores = score(variant.trial, subject.texts, subject.k)
    likelier = scores.log_probs.sum(1), base.log_probs.sum(1)
    gained = gain(scores.accepted, base.accepted, base.num_of, num_compared=num_compared)
    nats = gain(*likelier, base.num_of, num_compared=num_compared)
    accepts = gained.is_sure and gained.mean >= MIN_GAIN
    is_likelier = nats.is_sure and nats.mean >= MIN_NATS and gained.mean >= 0
    return Tried(
        change=variant, scores=scores, gain=gained, nats=nats, is_cause=accepts or is_likelier
    )

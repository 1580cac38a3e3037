"""Comparison of a drafter with its variants, and search for those that accept more drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch

from hydraspec.analysis.doctor import blocks, contents, feeding, fields
from hydraspec.analysis.doctor.patient import Patient
from hydraspec.analysis.doctor.scores import MIN_TEXTS, Gain, Scores, gain, score
from hydraspec.analysis.doctor.variants import Change, Subject, Variant
from hydraspec.models.base import TargetModel
from hydraspec.speculators.teacher_forcing.texts import Texts, read_texts
from hydraspec.speculators.teacher_forcing.trial import Trial

FAMILIES = (*feeding.FAMILIES, *blocks.FAMILIES, *contents.FAMILIES, *fields.FAMILIES)
MAX_ROUNDS = 3  # each keeps the best variant and tries all others on top of it
LEAST_GAIN = 0.1  # least share by which a proposed repair raises the acceptance length
MIN_GAIN = 0.02  # accepted drafts per start that a cause adds at least
MIN_NATS = 0.02  # log likelihood per start that a cause adds at least, if no drafts
SCREENED = 4  # every fourth text is used for the first comparison of all variants
KEPT = 8  # best variants by drafts, and as many by likelihood, that are compared on all texts
FEWEST = 8  # texts of the first comparison; with fewer, all variants are compared on all texts
NEAR = 0.9  # causes that gain this share of the best gain are ranked by likelihood


C = TypeVar("C", bound=Change)


@dataclass(slots=True, frozen=True, kw_only=True)
class Tried(Generic[C]):
    """A change, measured against the drafter without it on the same texts."""

    change: C
    scores: Scores | None  # with the change; None: the target does not answer
    gain: Gain  # of drafts accepted per start
    nats: Gain | None = None  # of the log likelihood (Scores.log_probs), summed over K drafts
    is_cause: bool  # the gain is significant and at least MIN_GAIN or MIN_NATS


@dataclass(slots=True, kw_only=True)
class Diagnosis:
    """Variants by round; each round starts from the variant that the last one kept.

    Attributes:
        base: scores of the drafter as configured.
        rounds: all variants of each round, best first.
        found: the variant kept by each round, in order; empty if no variant was better.
        best: scores of the last variant kept; `base` if there is none.
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
    """Compare a trial with all its variants, for at most `max_rounds` rounds. Each keeps the best
    variant, if that is a cause, as the start of the next.

    patient: the drafter whose files are read again with changed configuration fields; None: such
        variants are left out.
    on_variant(done, total) is called after each comparison.
    """
    base = score(trial, texts, k)
    few = None
    if len(texts.texts) >= SCREENED * FEWEST:
        keep, some = sorted(texts.states), texts.texts[::SCREENED]
        few = read_texts(target, some, k=k, keep=keep, encode=texts.encode)
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
            break  # too small a gain to build further repairs on
    return result


def variants(subject: Subject) -> Iterator[Variant]:
    """All variants that apply to this drafter."""
    for family in FAMILIES:
        yield from family(subject)


def ranked(
    subject: Subject, base: Scores, few: Texts | None, on_variant: Callable[[int, int], None]
) -> list[Tried[Variant]]:
    """All variants compared with `base`, the scores of the subject, best first.

    The first place goes to a cause: among causes with at least NEAR of the best gain, the one with
    the highest log likelihood, then the least `doubt`. The others follow by drafts gained.
    few: a part of the texts. If given, all variants are compared on it first, and only the best
        KEPT of them on all texts; no other can be a cause.
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
    """A variant compared with `base`. It is a cause if it accepts significantly more drafts, or no
    fewer with a significantly higher log likelihood.
    """
    scores = score(variant.trial, subject.texts, subject.k)
    likelier = scores.log_probs.sum(1), base.log_probs.sum(1)
    gained = gain(scores.accepted, base.accepted, base.num_of, num_compared=num_compared)
    nats = gain(*likelier, base.num_of, num_compared=num_compared)
    accepts = gained.is_sure and gained.mean >= MIN_GAIN
    is_likelier = nats.is_sure and nats.mean >= MIN_NATS and gained.mean >= 0
    return Tried(
        change=variant, scores=scores, gain=gained, nats=nats, is_cause=accepts or is_likelier
    )

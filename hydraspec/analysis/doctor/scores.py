"""Acceptance and likelihood of a trial on the texts, and the interval of a difference of trials.

The likelihood is minus the cross entropy of the drafter's distribution with the target's: the loss
of drafters' training, with its sign turned. It is highest with the conventions of the training, and
differs significantly on far fewer texts than the number of accepted drafts does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from hydraspec.metrics.draft_figures import ChainDrafts
from hydraspec.metrics.statistics import student_quantile
from hydraspec.speculators.teacher_forcing.scores import DraftVocabulary
from hydraspec.speculators.teacher_forcing.texts import Texts
from hydraspec.speculators.teacher_forcing.trial import StepStates, Trial, draft_states

ALPHA = 0.05  # chance of one or more false alarms among all variants of a round
MIN_TEXTS = 5  # with places to draft from, for an interval
LEAST_LOG_PROB = -12.0  # nats; also for tokens that the drafter cannot propose


@dataclass(slots=True, frozen=True, kw_only=True)
class Scores(ChainDrafts):
    """Results of the K drafts from each of the N starting places in the texts; see ChainDrafts."""

    log_probs: NDArray[np.float64]  # [N, K] nats, see `likelihood`


def score(trial: Trial, texts: Texts, k: int) -> Scores:
    """Draft K tokens from every starting place in the texts, teacher-forced, and compare them with
    the target's tokens.
    """
    truth = texts.chains.truth
    found = torch.zeros(4, *truth.shape, dtype=torch.float64, device=truth.device)
    vocabulary = DraftVocabulary.of(trial.head, texts.vocab_size)
    for part in draft_states(trial, texts, k):
        logits = part.logits(trial.head).float()
        wanted = truth[part.chains, part.step]
        own = vocabulary.scores(logits, wanted)
        matches = logits.argmax(-1) == vocabulary.places_of(wanted)
        expected = likelihood(vocabulary, texts, part, logits)
        rows = torch.stack((matches, own.ranks, own.probs, expected)).double()
        found[:, part.chains, part.step] = rows
    matches, ranks, probs, log_probs = found.cpu().numpy()
    return Scores(
        matches=matches > 0,
        ranks=ranks.astype(np.int64),
        probs=probs,
        log_probs=log_probs,
        num_of=tuple(texts.chains.num_of),
    )


def likelihood(
    vocabulary: DraftVocabulary, texts: Texts, part: StepStates, logits: Tensor
) -> Tensor:
    """Log probability that the drafter gives the target's likely tokens, weighted by the target's
    probabilities: [n] nats, from the logits [n, V_draft] of one draft step of n chains.
    """
    rows = texts.chains.row[part.chains] + 1 + part.step  # where the target predicts those tokens
    ids, weights = texts.target.ids[rows], texts.target.probs[rows]
    total = logits.logsumexp(-1, keepdim=True)
    likely = (vocabulary.logits_of(logits, ids) - total).clamp(min=LEAST_LOG_PROB)
    return (likely * weights).sum(-1)


@dataclass(slots=True, frozen=True)
class Gain:
    """A mean difference per starting place, with an interval: paired over texts, Student's t, 95 %
    for all variants of a round together (Bonferroni).
    """

    mean: float
    low: float
    high: float

    @property
    def is_sure(self) -> bool:
        """Returns whether the whole interval is above zero."""
        return self.low > 0


def gain(
    variant: ArrayLike, base: ArrayLike, num_of: tuple[int, ...], *, num_compared: int
) -> Gain:
    """The gain of `variant` over `base`, values [N] at the same starting places.

    num_of: number of places in each text; they sum to N.
    num_compared: number of variants that the interval's confidence is shared by.
    """
    used = np.array([count for count in num_of if count], float)
    if not used.size:
        return Gain(0.0, -np.inf, np.inf)
    starts = np.cumsum([0, *used[:-1]]).astype(int)
    difference = np.add.reduceat(np.asarray(variant, float) - np.asarray(base, float), starts)
    mean, n = float(difference.sum() / used.sum()), len(used)
    if n < MIN_TEXTS:
        return Gain(mean, -np.inf, np.inf)
    residuals = difference - mean * used  # the mean is a ratio of two sums
    error = float(np.sqrt(n / (n - 1) * (residuals**2).sum()) / used.sum())
    half = student_quantile(ALPHA / (2 * max(1, num_compared)), n - 1) * error
    return Gain(mean, mean - half, mean + half)

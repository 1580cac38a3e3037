"""Acceptance of a trial over the texts, and how sure it is that one trial beats another.

Beside acceptance a trial has a likelihood: the cross entropy of the target's distribution under the
drafter's, which is the loss that drafters are trained with. It tells apart what acceptance alone
needs many more texts for, and what a drafter was trained with is where it is best.
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

ALPHA = 0.05  # over all variants of a round together
MIN_TEXTS = 5  # with chains, for an interval
LEAST_LOG_PROB = -12.0  # nats, of tokens that the drafter cannot propose


@dataclass(slots=True, frozen=True, kw_only=True)
class Scores(ChainDrafts):
    """Matches, ranks and likelihoods of a trial's drafts from every place of the texts."""

    log_probs: NDArray[np.float64]  # [N, K] nats, expected over the target's likely tokens


def score(trial: Trial, texts: Texts, k: int) -> Scores:
    """The drafts of a trial from every place, compared with the target's tokens."""
    truth = texts.chains.truth
    found = torch.zeros(4, *truth.shape, dtype=torch.float64, device=truth.device)
    vocabulary = DraftVocabulary.of(trial.head, texts.vocab_size)
    for part in draft_states(trial, texts, k):
        logits: Tensor = trial.head.compute_logits(part.states).float()
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
    """Log probability of the target's likely tokens in logits [n, V_draft] of a step, expected
    under the target's distribution: [n] nats.
    """
    rows = texts.chains.row[part.chains] + 1 + part.step  # that the truth comes from
    ids, weights = texts.target.ids[rows], texts.target.probs[rows]
    total = logits.logsumexp(-1, keepdim=True)
    likely = (vocabulary.logits_of(logits, ids) - total).clamp(min=LEAST_LOG_PROB)
    return (likely * weights).sum(-1)


@dataclass(slots=True, frozen=True)
class Gain:
    """A mean difference per start, and an interval that holds for all variants of a round together
    (paired over texts, Student's t, Bonferroni).
    """

    mean: float
    low: float
    high: float

    @property
    def is_sure(self) -> bool:
        """Returns whether the interval is above zero."""
        return self.low > 0


def gain(
    variant: ArrayLike, base: ArrayLike, num_of: tuple[int, ...], *, num_compared: int
) -> Gain:
    """The mean of variant - base, [N] each; `num_of` says how many belong to each text."""
    used = np.array([count for count in num_of if count], float)
    if not used.size:
        return Gain(0.0, -np.inf, np.inf)
    starts = np.cumsum([0, *used[:-1]]).astype(int)
    difference = np.add.reduceat(np.asarray(variant, float) - np.asarray(base, float), starts)
    mean, n = float(difference.sum() / used.sum()), len(used)
    if n < MIN_TEXTS:
        return Gain(mean, -np.inf, np.inf)
    residuals = difference - mean * used  # of a ratio of sums
    error = float(np.sqrt(n / (n - 1) * (residuals**2).sum()) / used.sum())
    half = student_quantile(ALPHA / (2 * max(1, num_compared)), n - 1) * error
    return Gain(mean, mean - half, mean + half)

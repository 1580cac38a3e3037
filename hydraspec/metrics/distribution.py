"""Judges whether two sets of sampled outputs come from one distribution: chi-squared on their first
tokens, with a null distribution by exchange of samples, and the smallest shift that it detects.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hydraspec.metrics.paired import POWER
from hydraspec.metrics.statistics import SEED, normal_quantile

LEVEL = 0.01  # share of false alarms; a run makes one such test
NUM_EXCHANGES = 1999
MIN_EXPECTED = 5  # samples of each side in a cell; rarer tokens share a cell
ENDED = -1  # in place of a token after the end of an output
Samples = NDArray[np.int64]  # [prompts, samples, tokens]
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SameDistribution:
    """Result of the test of two sets of samples.

    Attributes:
        chi2: the sum over prompts and places in the output of two-sample chi-squared.
        degrees_of_freedom: the sum over those tables of cells less one.
        p: the share of exchanges of samples within prompts that give at least this chi2.
        detectable: the total variation distance that the test detects with power POWER, if that
            probability moves between the two most frequent tokens at every place; None where
            outputs do not vary, or no shift is detected.
    """

    chi2: float
    degrees_of_freedom: int
    p: float
    detectable: float | None

    @property
    def says(self) -> Literal["same", "different", "cannot_tell"]:
        """The answer of the test; "cannot_tell" if it finds no difference and has no power."""
        if self.p <= LEVEL:
            return "different"
        return "cannot_tell" if self.detectable is None else "same"


def same_distribution(ours: Samples, theirs: Samples) -> SameDistribution:
    """Compare samples [P, N, L] of the same P prompts, drawn independently on both sides.

    Tokens of one sample depend on each other, so the null distribution is drawn by exchanging
    whole samples of a prompt between the sides, which keeps that dependence.
    """
    num_samples = ours.shape[1]
    rng = np.random.default_rng(SEED)
    sides = np.zeros((NUM_EXCHANGES + 1, 2 * num_samples))
    sides[:, :num_samples] = 1
    found, freedom, sensitivity = np.zeros(NUM_EXCHANGES + 1), 0, 0.0
    for mine, other in zip(ours, theirs, strict=True):
        chosen = np.concatenate([sides[:1], rng.permuted(sides[1:], axis=1)])
        both = np.concatenate([mine, other])
        for place in range(both.shape[1]):
            cells = _cells(both[:, place])
            if cells.shape[1] < 2:
                continue
            totals = cells.sum(axis=0)
            counts = chosen @ cells  # [exchanges, cells] of the first side
            # Both sides have as many samples, so that each is expected to have half of a cell.
            found += (2 * (counts - totals / 2) ** 2 / (totals / 2)).sum(axis=1)
            freedom += cells.shape[1] - 1
            largest = np.sort(totals)[-2:] / (2 * num_samples)
            sensitivity += num_samples / 2 * float((1 / largest).sum())
    if freedom == 0:
        return SameDistribution(chi2=0.0, degrees_of_freedom=0, p=1.0, detectable=None)
    p = float((found[1:] >= found[0] * (1 - 1e-12)).sum() + 1) / (NUM_EXCHANGES + 1)
    return SameDistribution(
        chi2=float(found[0]),
        degrees_of_freedom=freedom,
        p=p,
        detectable=_detectable(found[1:], sensitivity),
    )


def _cells(tokens: NDArray[np.int64]) -> Array:
    """Indicators [2N, cells] of `tokens` [2N]: one column a frequent token, one for the rest."""
    values, counts = np.unique(tokens, return_counts=True)
    frequent = values[counts >= 2 * MIN_EXPECTED]
    columns: Array = (tokens[:, None] == frequent[None, :]).astype(float)
    rest = 1 - columns.sum(axis=1, keepdims=True)
    if rest.sum() >= 2 * MIN_EXPECTED or not len(frequent):
        columns = np.concatenate([columns, rest], axis=1)
        return columns
    columns[:, [0]] += rest  # too few for a separate cell
    return columns


def _detectable(null: Array, sensitivity: float) -> float | None:
    """The shift in probability at every place that the test detects with power POWER; None above 1.

    A shift d adds sensitivity x d² to the null mean of chi2 and four times that to its variance
    (Patnaik, 1949), which makes a quadratic equation in the addition.
    """
    gap = float(np.quantile(null, 1 - LEVEL)) - float(null.mean())
    reach = normal_quantile(POWER)
    half = gap + 2 * reach**2
    added = half + sqrt(half**2 - gap**2 + reach**2 * float(null.var()))
    shift = sqrt(added / sensitivity)
    return shift if shift <= 1 else None

"""Statistics that several metrics need: ratios of sums with bootstrap intervals over requests, and
the distributions that scipy has.

scipy.special is imported by the functions that call it: `--help` needs none of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_RESAMPLES = 2000
MAX_INDICES_AT_ONCE = 4_000_000  # bounds the memory of a bootstrap over very many requests
MIN_REQUESTS = 5  # that must contribute to an interval
UNBOUNDED = 1000  # times the low end, if that is above 1: an end beyond says nothing
SEED = 0x5EED  # intervals of equal counts are equal, whatever the run's own seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean and its 95 % interval; both are None where there is nothing to estimate from.

    The interval is None where fewer than MIN_REQUESTS requests contribute: a bootstrap over so few
    would claim certainty.
    """

    mean: float | None
    ci95: tuple[float, float] | None


def range_words(ci95: Sequence[float], digits: int = 2) -> str:
    """An interval as "1.75 to 2.20"; a huge end, which few blocks can give, as "over 1000"."""
    low, high = ci95
    bound = UNBOUNDED * max(1.0, low)
    end = f"{high:,.{digits}f}" if high < bound else f"over {bound:.0f}"
    return f"{low:,.{digits}f} to {end}"


def ratio(numerator: float, denominator: float) -> float | None:
    """numerator / denominator; None where that is no finite number."""
    if denominator == 0:
        return None
    value = float(numerator) / float(denominator)
    return value if np.isfinite(value) else None


def student_tail(t: float, freedom: int) -> float:
    """P(T ≥ t) of Student's t with `freedom` degrees of freedom."""
    from scipy import special

    return float(special.stdtr(freedom, -t))


def student_quantile(tail: float, freedom: int) -> float:
    """The t with P(T ≥ t) = tail for Student's t with `freedom` degrees of freedom."""
    from scipy import special

    return -float(special.stdtrit(freedom, tail))


def normal_tail(z: float) -> float:
    """P(Z ≥ z) of a standard normal variable."""
    from scipy import special

    return float(special.ndtr(-z))


def normal_quantile(probability: float) -> float:
    """The z with P(Z ≤ z) = probability for a standard normal variable."""
    from scipy import special

    return float(special.ndtri(probability))


def sign_test(a: int, b: int) -> float:
    """Two-sided p: the probability of a split of a + b fair coins at least as uneven as a to b."""
    if a == b:
        return 1.0  # the usual case, without scipy's import
    from scipy import special

    return min(1.0, 2 * float(special.bdtr(min(a, b), a + b, 0.5)))


def leading(matches: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Number of true columns before the first false one, [N, K] -> [N]."""
    counts: NDArray[np.int64] = np.cumprod(matches, axis=1).sum(axis=1)
    return counts


def ratio_of_sums(
    numerators: ArrayLike, denominators: ArrayLike, *, offset: float = 0.0
) -> Estimate:
    """Estimate of offset + Σ numerators / Σ denominators over requests [R], with its percentile
    bootstrap interval.
    """
    top, bottom = np.asarray(numerators, float), np.asarray(denominators, float)
    mean = ratio(top.sum(), bottom.sum())
    if mean is None:
        return Estimate(mean=None, ci95=None)
    sums = _resampled_sums(np.stack([top, bottom]))
    return Estimate(mean=offset + mean, ci95=_interval(offset + _divide(sums[0], sums[1])))


def _resampled_sums(columns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums of each column [C, R] over NUM_RESAMPLES draws of R requests with replacement: [C,
    NUM_RESAMPLES]; [C, 0] where fewer than MIN_REQUESTS requests have a count that is not 0.
    """
    num_requests = columns.shape[1]
    if np.count_nonzero(columns.any(axis=0)) < MIN_REQUESTS:
        return np.empty((columns.shape[0], 0))
    rng = np.random.default_rng(SEED)
    size = max(1, MAX_INDICES_AT_ONCE // num_requests)
    parts = []
    for first in range(0, NUM_RESAMPLES, size):
        draws = rng.integers(0, num_requests, (min(size, NUM_RESAMPLES - first), num_requests))
        parts.append(np.stack([column[draws].sum(axis=1) for column in columns]))
    return np.concatenate(parts, axis=1)


def _divide(top: NDArray[np.float64], bottom: NDArray[np.float64]) -> NDArray[np.float64]:
    kept = bottom != 0
    quotients: NDArray[np.float64] = top[kept] / bottom[kept]
    return quotients


def _interval(values: NDArray[np.float64]) -> tuple[float, float] | None:
    if values.size == 0:
        return None
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)

"""Paired comparison of two runs over the same requests: studentised bootstrap, Holm, power.

Every figure compared is a product of sums over requests and of their inverses, such as a ratio of
two speedups, so that one bootstrap of its logarithm serves all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, exp, hypot, log, sqrt

import numpy as np
from numpy.typing import NDArray

from hydraspec.metrics.statistics import MIN_REQUESTS, SEED, student_quantile, student_tail
from hydraspec.metrics.step_costs import CostRatio

LEVEL = 0.05  # false alarms that are accepted, over a family of comparisons
POWER = 0.8  # probability that the number of requests said to be needed suffices
NUM_RESAMPLES = 9_999  # p-values down to 1e-4, which Holm's correction needs
FEW_CHANGED = 14  # requests up to which all choices of signs are counted
NUM_BLOCKS = 8  # at least, where requests suffice: few long blocks hold slow noise too
MIN_BLOCKS = 4  # at least, where requests that share steps would leave fewer
MOST_BLOCKS = 200  # where a request is a block; of more requests, neighbours are put together
TURNOVERS = 2  # length of a block / the requests that run at once
LARGEST = 50.0  # logarithm of a bound, which few blocks may leave without end
SPEEDUP = (1, -1, -1, 1)  # signs of tokens and times of both sides
NUM_ROUNDS = 2  # parts of a run that were measured apart: the rounds of hydraspec/lab
COST_FREEDOM = 8  # degrees of freedom of a step cost's error: a run sees drift a few times
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Critical:
    """Critical values of the test that a ratio is 1, in standard errors of its logarithm.

    Attributes:
        num_blocks: blocks of requests, whose differences gave the error.
        num_turnovers: the largest number of blocks that share no steps.
        largest: the largest studentised resamples, a share LEVEL, in ascending order; None with
            fewer than NUM_BLOCKS blocks.
        num_resamples: the number of all studentised resamples.
    """

    num_blocks: int
    num_turnovers: float
    largest: Array | None = field(default=None, compare=False, repr=False)
    num_resamples: int = 0

    def at(self, level: float, num_blocks: int | None = None) -> float:
        """Standard errors beyond which p is at most `level`, which is LEVEL or less; for another
        `num_blocks` than this test's, those of Student's t."""
        blocks = num_blocks or self.num_blocks
        by_student = student_quantile(level / 2, _freedom(blocks))
        if self.largest is None or blocks != self.num_blocks:
            return by_student
        count = int(level * (self.num_resamples + 1))
        return float(self.largest[-count] if count else max(self.largest[-1], by_student))

    def reach(self, level: float, num_blocks: int | None = None) -> float:
        """Standard errors, as estimated here, of an effect that a repeat detects with power POWER.

        The repeat's own estimate of the error may be larger: by more than the factor `larger` with
        a probability of 1 - POWER, as the root of F with equal degrees of freedom, which Student's
        t gives (Cacoullos, 1965). Half of the blocks count as degrees of freedom, a quarter for
        another number of blocks: speed has noise with long tails, and with these the recorded
        repeats had the power that was stated (ADR 29).
        """
        is_other = num_blocks not in (None, self.num_blocks)
        freedom = max(1, self.num_blocks // (4 if is_other else 2))
        quantile = student_quantile(1 - POWER, freedom)
        larger = quantile / sqrt(freedom) + sqrt(1 + quantile**2 / freedom)
        return larger * self.at(level, num_blocks) + quantile


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRatio:
    """A ratio with its 95 % interval and the two-sided p-value of the hypothesis that it is 1.

    `log_error` is the standard error of the ratio's logarithm. Error, interval and p are None where
    fewer than MIN_REQUESTS requests contribute; `critical` is None then and where the error is 0.
    """

    ratio: float | None
    ci95: tuple[float, float] | None
    p: float | None
    log_error: float | None
    num_requests: int
    critical: Critical | None = None

    def num_more_needed(self, level: float = LEVEL) -> int | None:
        """Further requests that are needed to tell a ratio as large as this one from 1 with power
        POWER, if the error falls with their root; None where the ratio is 1 or has no interval.
        Below NUM_BLOCKS blocks, more requests make more blocks, whose errors are better known."""
        if self.ratio is None or self.log_error is None or abs(log(self.ratio)) < 1e-9:
            return None
        if self.critical is None:
            return 0
        growths = []
        for blocks in range(
            self.critical.num_blocks, max(NUM_BLOCKS, self.critical.num_blocks) + 1
        ):
            growth = (self.critical.reach(level, blocks) * self.log_error / log(self.ratio)) ** 2
            if blocks > self.critical.num_blocks:
                growth = max(growth, blocks / self.critical.num_turnovers)
            growths.append(growth)
        return max(0, ceil(self.num_requests * (min(growths) - 1)))

    def detectable(self, level: float = LEVEL) -> float | None:
        """The smallest ratio above 1 that a repeat with as many requests tells from 1 with power
        POWER; None without an interval."""
        if self.log_error is None or self.critical is None:
            return None if self.log_error is None else 1.0
        return exp(min(self.critical.reach(level) * self.log_error, LARGEST))


def paired_ratio(
    columns: Array, signs: Sequence[int], *, at_once: int | None, num_rounds: int = NUM_ROUNDS
) -> PairedRatio:
    """The ratio Π (Σ column)^sign over requests [R] of columns [C, R], whose `signs` [C] sum to 0.

    The interval is a symmetric studentised bootstrap of the logarithm (Hall, The Bootstrap and
    Edgeworth Expansion, 1992, 3.6) over blocks of requests that follow each other, since requests
    `at_once` in the engine share the noise of their steps. Fewer than NUM_BLOCKS blocks have too
    few resamples: they use Student's t, with a degree of freedom less for slow noise that they
    share. The standard error is at least that of the mean of `num_rounds` equal parts, as noise
    that lasts as long as a round is not seen within one. Counts, which no clock disturbs, have
    `at_once` None: every request is a block.
    """
    columns = columns[:, columns.any(axis=0)]
    least = 0.0
    if at_once is not None and columns.size:
        least = _error_of_rounds(columns, np.asarray(signs, float), num_rounds)
    turnover = 1 if at_once is None else TURNOVERS * at_once
    parts = [in_blocks(columns, at_once)] if columns.size else []
    return _ratio(columns, parts, signs, least=least, turnover=turnover)


def costed_ratio(
    columns: Array,
    signs: Sequence[int],
    *,
    measured: float | None,
    costs: CostRatio,
    strata: Sequence[str | None],
) -> PairedRatio:
    """The `measured` ratio without the drift that `costs` found, with errors of counts and costs.

    The columns are as for `paired_ratio`, but counts alone, without the noise of a clock. Requests
    are drawn one by one within each of `strata` [R], since a workload's mix is no accident; the
    costs' error is drawn too.
    """
    members: dict[str | None, list[int]] = {}
    for place in np.flatnonzero(columns.any(axis=0)).tolist():
        members.setdefault(strata[place], []).append(place)
    chosen = list(members.values())
    if min(map(len, chosen), default=0) < 2:
        chosen = [[place for of in chosen for place in of]]
    parts = [in_blocks(columns[:, of], None) for of in chosen if of]
    columns = columns[:, columns.any(axis=0)]
    found = log(measured) + costs.correction if measured else None
    return _ratio(columns, parts, signs, found=found, own_error=costs.log_error)


def _ratio(
    columns: Array,
    parts: Sequence[Array],
    signs: Sequence[int],
    *,
    found: float | None = None,
    least: float = 0.0,
    own_error: float = 0.0,
    turnover: int = 1,
) -> PairedRatio:
    """The ratio of columns [C, R] from its blocks [C, G] in independent parts.

    Args:
        found: the ratio's logarithm, if it is not that of the columns' sums.
        least: the lower bound of the standard error over requests.
        own_error: a standard error that does not come from requests.
        turnover: requests of a block.
    """
    num_requests, totals = columns.shape[1], columns.sum(axis=1)
    if num_requests == 0 or not (totals > 0).all():
        return PairedRatio(ratio=None, ci95=None, p=None, log_error=None, num_requests=num_requests)
    powers = np.asarray(signs, float)
    of_sums = float(powers @ np.log(totals))
    found = of_sums if found is None else found
    if num_requests < MIN_REQUESTS:
        return PairedRatio(
            ratio=exp(found), ci95=None, p=None, log_error=None, num_requests=num_requests
        )
    # Each block's share in the logarithm; all of them sum to 0.
    shares = [powers @ (blocks / totals[:, None]) for blocks in parts]
    num_blocks = sum(map(len, shares))
    error = hypot(max(sqrt(sum(map(_variance, shares))), least), own_error)
    if error < 1e-9:  # the same in every request
        p = 1.0 if abs(found) < 1e-9 else 1 / (NUM_RESAMPLES + 1)
        same = (exp(found), exp(found))
        return PairedRatio(
            ratio=exp(found), ci95=same, p=p, log_error=0.0, num_requests=num_requests
        )
    resampled = None
    if num_blocks >= NUM_BLOCKS:
        resampled = np.sort(np.abs(_studentised(parts, shares, powers, of_sums, own_error)))
    critical = _critical(resampled, num_blocks, num_requests / turnover)
    reach = min(critical.at(LEVEL) * error, LARGEST)
    return PairedRatio(
        ratio=exp(found),
        ci95=(exp(found - reach), exp(found + reach)),
        p=two_sided(abs(found) / error, resampled, num_blocks),
        log_error=error,
        num_requests=num_requests,
        critical=critical,
    )


def _variance(shares: Array) -> float:
    """Variance of the sum of independent shares."""
    return float(((shares - shares.mean()) ** 2).sum() * len(shares) / (len(shares) - 1))


def two_sided(t: float, resampled: Array | None, num_blocks: int) -> float:
    """p-value of t standard errors: the share of sorted resamples as large. If none is as large, or
    without resamples, it is Student's t's, with a degree of freedom less for shared noise."""
    by_student = 2 * student_tail(t, _freedom(num_blocks))
    if resampled is None:
        return by_student
    count = len(resampled) - int(np.searchsorted(resampled, t))
    p = (count + 1) / (len(resampled) + 1)
    return p if count else min(p, by_student)


def _critical(resampled: Array | None, num_blocks: int, num_turnovers: float) -> Critical:
    if resampled is None or not resampled.size:
        return Critical(num_blocks=num_blocks, num_turnovers=num_turnovers)
    return Critical(
        num_blocks=num_blocks,
        num_turnovers=num_turnovers,
        largest=resampled[-int(LEVEL * (len(resampled) + 1)) :].copy(),
        num_resamples=len(resampled),
    )


def _freedom(num_blocks: int) -> int:
    return max(1, num_blocks - 2)


def balanced(categories: Sequence[str | None]) -> list[int]:
    """An order of requests in which any stretch has all categories in proportion, each category
    in the order given: blocks of a workload that is sorted by category would differ by content."""
    sizes, seen = Counter(categories), Counter[str | None]()
    places = []
    for i, name in enumerate(categories):
        places.append(((seen[name] + 0.5) / sizes[name], i))
        seen[name] += 1
    return [i for _, i in sorted(places)]


def in_blocks(columns: Array, at_once: int | None) -> Array:
    """Sums of columns [C, R] over blocks of requests that follow each other: [C, G]."""
    num_requests = columns.shape[1]
    if at_once is None:
        length = -(-num_requests // MOST_BLOCKS)
    else:
        together = min(TURNOVERS * at_once, num_requests // MIN_BLOCKS)
        length = max(1, num_requests // NUM_BLOCKS, together)
    return np.add.reduceat(columns, np.arange(0, num_requests, length), axis=1)


def _error_of_rounds(columns: Array, powers: Array, num_rounds: int) -> float:
    """Standard error of the mean logarithm of `num_rounds` equal parts of the requests."""
    parts = np.array_split(columns, num_rounds, axis=1)
    sums = np.stack([part.sum(axis=1) for part in parts])
    if num_rounds < 2 or not (sums > 0).all():
        return 0.0
    return float(np.std(np.log(sums) @ powers, ddof=1) / sqrt(num_rounds))


@lru_cache(maxsize=32)
def _weights(num_blocks: int, part: int) -> Array:
    """Counts of each block in NUM_RESAMPLES draws with replacement: [NUM_RESAMPLES, G]."""
    rng = np.random.default_rng([SEED, part] if part else SEED)
    draws = rng.integers(0, num_blocks, (NUM_RESAMPLES, num_blocks))
    flat = draws + num_blocks * np.arange(NUM_RESAMPLES)[:, None]
    counts = np.bincount(flat.ravel(), minlength=NUM_RESAMPLES * num_blocks)
    return counts.reshape(NUM_RESAMPLES, num_blocks).astype(float)


def _studentised(
    parts: Sequence[Array], shares: Sequence[Array], powers: Array, found: float, own_error: float
) -> Array:
    """Studentised resamples: (logarithm - found) / its standard error, where that is finite."""
    sums, variances = np.zeros((NUM_RESAMPLES, len(powers))), np.full(NUM_RESAMPLES, own_error**2)
    for part, (blocks, of) in enumerate(zip(parts, shares, strict=True)):
        weights, num_blocks = _weights(len(of), part), len(of)
        sums += weights @ blocks.T
        spread = weights @ of**2 - (weights @ of) ** 2 / num_blocks
        variances += spread * num_blocks / (num_blocks - 1)
    noise = own_error * np.random.default_rng(SEED).standard_t(COST_FREEDOM, NUM_RESAMPLES)
    with np.errstate(divide="ignore", invalid="ignore"):
        t: Array = (np.log(sums) @ powers - found + noise) / np.sqrt(variances)
    return t[np.isfinite(t)]


def holm(p_values: Sequence[float | None], *, num_tests: int | None = None) -> list[float | None]:
    """Adjusted p-values: rejecting at LEVEL has a false alarm in the whole family with probability
    LEVEL at most (Holm, 1979). None stays None and is no test; `num_tests` also counts tests that
    were not made, as of pairs without the best job.
    """
    order = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    count = max(num_tests or 0, len(order))
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, i) in enumerate(order):
        largest = max(largest, min(1.0, p * (count - rank)))
        adjusted[i] = largest
    return adjusted


def sign_flip_test(differences: Array) -> float | None:
    """The one-sided p of the hypothesis that differences [R] of requests sum to 0 or more: the
    share of all sign choices that give so low a sum (Fisher, 1935); None if all differences are 0.

    All choices are counted up to 2^14; beyond, some are drawn, and if none of these is as low, p is
    that of Student's t. Of more than MOST_BLOCKS requests, neighbours are added up.
    """
    changed = in_blocks(differences[None, :], None)[0]
    changed = changed[changed != 0]
    if not len(changed):
        return None
    found, num_changed = changed.sum() + 1e-9 * np.abs(changed).sum(), len(changed)
    if num_changed <= FEW_CHANGED:
        bits = np.arange(2**num_changed)[:, None] >> np.arange(num_changed) & 1
        return float(((2 * bits - 1) @ changed <= found).mean())
    signs = np.random.default_rng(SEED).integers(0, 2, (NUM_RESAMPLES, num_changed)) * 2 - 1
    count = int((signs @ changed <= found).sum())
    p = (count + 1) / (NUM_RESAMPLES + 1)
    t = abs(changed.sum()) / sqrt((changed**2).sum())
    return p if count else min(p, max(0.5**num_changed, student_tail(t, num_changed - 1)))

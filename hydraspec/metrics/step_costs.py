"""Costs of decode steps, fitted to timed blocks of them with the machine's drift taken out.

A speedup is tokens per step, which are counted, times the ratio of two costs of a step, which a
clock measures. Only that second part is estimated here (ADR 39).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import log, sqrt

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from hydraspec.metrics.step_blocks import Block, Size, sums

LEAST_STEPS = 8  # of a size, for its mean to be used
LEAST_BLOCKS = 4  # of a side of a run
# Drift: its variance over that of a block's own noise, and how long it lasts in seconds. Levels of
# whole runs: their variance over that of drift, where there are several runs.
DRIFTS = (0.0, 0.25, 1.0, 4.0, 16.0, 64.0, 256.0)
LASTING_S = (0.5, 2.0, 8.0, 32.0)
LEVELS = (0.0, 1.0, 10.0)
NUM_ERRORS = 3.0  # standard errors that drift may move a measured ratio by
GRANTED = 0.02  # share of the ratio that is allowed beyond them
OUTLIERS = 3.0  # robust standard deviations of a name's blocks, to which others are moved
TO_DEVIATION = 1.4826  # of normal noise: standard deviation / median of distances from the median
UNEVEN = 2.0  # errors; halves of a run that differ by more give the error themselves
TINY = 1e-20  # steps that all take the same time have no error
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRatio:
    """A ratio of two costs of decode steps, as a correction of the ratio of measured times.

    Attributes:
        correction: the logarithm of this ratio less that of the measured one.
        log_error: the standard error of the ratio's logarithm.
        holds: whether drift is within what its model allows; if not, measured times are used.
    """

    correction: float
    log_error: float
    holds: bool = True


@dataclass(frozen=True, slots=True)
class Check:
    """Checks of the model of drift on one run.

    Attributes:
        plain: the standard error of the run's ratio of two costs as measured, drift included.
        halves: half the difference between the logarithms of that ratio in the first and the second
            half of the run, drift taken out: a standard error that no model is needed for.
    """

    plain: float
    halves: float


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs of steps of several names, fitted over runs in which two or more of them took turns.

    Attributes:
        places: the row of each name in `covariance`.
        covariance: the covariance of the logarithms of costs.
        drifts: by run and name, how much slower the machine was than over all runs (logarithm).
        ends: by run and name, how much more a request's step cost than in full steps (logarithm).
        checks: the checks of each run.
    """

    places: Mapping[str, int]
    covariance: Array
    drifts: Sequence[Mapping[str, float]]
    ends: Sequence[Mapping[str, float]]
    checks: Sequence[Check]

    def covariance_of(self, first: tuple[str, str], second: tuple[str, str]) -> float:
        """Covariance of the logarithms of two ratios, each of the costs of two names."""
        signs = np.zeros((2, len(self.covariance)))
        for row, names in zip(signs, (first, second), strict=True):
            for sign, name in zip((1.0, -1.0), names, strict=True):
                row[self.places[name]] += sign
        return float(signs[0] @ self.covariance @ signs[1])

    def error(self, one: str, other: str) -> float:
        """Standard error of the logarithm of the ratio of two names' costs."""
        return sqrt(max(0.0, self.covariance_of((one, other), (one, other))))

    def ratio(self, one: str, other: str, runs: Sequence[int] = (0,)) -> CostRatio:
        """The cost of `other` / the cost of `one`, to correct the times that `runs` measured."""
        drift, ends = (
            float(np.mean([found[run][one] - found[run][other] for run in runs]))
            for found in (self.drifts, self.ends)
        )
        error = self.error(one, other)
        checks = [self.checks[run] for run in runs]
        plain = sqrt(sum(each.plain**2 for each in checks)) / len(checks)
        halves = sqrt(sum(each.halves**2 for each in checks)) / len(checks)
        return CostRatio(
            correction=drift + ends,
            log_error=halves if halves > UNEVEN * error else error,
            holds=abs(drift) <= NUM_ERRORS * max(plain, error) + GRANTED,
        )


@dataclass(slots=True)
class _Timed:
    """Blocks [N] of one run: logarithms of time / the mean time of steps of these sizes, as far
    as OUTLIERS allows, places of names, middles in seconds, numbers of steps, milliseconds, and the
    mean milliseconds of as many steps of these sizes."""

    logs: Array
    names: NDArray[np.int64]
    at_s: Array
    num_steps: Array
    ms: Array
    expected_ms: Array


def fit(
    runs: Sequence[Mapping[str, Iterable[Block]]], at_once: Sequence[int | None] | None = None
) -> StepCosts | None:
    """Costs of steps by name, fitted to the blocks that runs have of each name; None where a run
    has fewer than LEAST_BLOCKS of a name. For a run with `at_once` requests, costs are those of
    full steps, which have that many: fewer are left at the end of a round, which a longer workload
    has once and a short one for a third of its steps. None, or too few such steps: of all steps.

    The logarithm of a block's time is the cost of its name, the run's level, drift that lasts
    for some seconds, and noise: generalised least squares, averaged over the sizes of drift by
    their restricted likelihood, so that uncertainty about drift is a part of the error.
    """
    whole = [{name: list(blocks) for name, blocks in run.items()} for run in runs]
    kept = [
        _full(run, width) for run, width in zip(whole, at_once or [None] * len(runs), strict=True)
    ]
    by_name: dict[str, list[Block]] = defaultdict(list)
    for run in kept:
        for name, blocks in run.items():
            by_name[name] += blocks
    typical = {
        (name, size): ms / count
        for name, blocks in by_name.items()
        for size, (count, ms) in sums(blocks).items()
        if count >= LEAST_STEPS and ms
    }
    places = {name: i for i, name in enumerate(by_name)}
    timed = [_timed(run, typical, places) for run in kept]
    for run, found in zip(kept, timed, strict=True):
        if any((found.names == places[name]).sum() < LEAST_BLOCKS for name in run):
            return None
    with threadpool_limits(limits=1, user_api="blas"):  # on such small matrices threads only wait
        fits = [
            _fitted(timed, len(places), drift, lasting, level)
            for drift in DRIFTS
            for lasting, level in product(
                LASTING_S if drift else LASTING_S[:1], LEVELS if len(runs) > 1 else LEVELS[:1]
            )
        ]
    likelihoods = np.array([each.likelihood for each in fits])
    weights = np.exp(likelihoods - likelihoods.max())
    weights /= weights.sum()
    costs = np.sum([w * each.costs for w, each in zip(weights, fits, strict=True)], axis=0)
    covariance = np.zeros((len(places), len(places)))
    for weight, each in zip(weights, fits, strict=True):
        off = each.costs - costs
        covariance += weight * (each.covariance + np.outer(off, off))
    best = fits[int(likelihoods.argmax())]
    drifts = [
        {name: _taken(found, places[name]) - float(costs[places[name]]) for name in run}
        for run, found in zip(kept, timed, strict=True)
    ]
    ends = [
        {name: _added_at_ends(run[name], full[name]) for name in run}
        for run, full in zip(whole, kept, strict=True)
    ]
    return StepCosts(places, covariance, drifts, ends, best.checks)


def _full(run: Mapping[str, list[Block]], at_once: int | None) -> Mapping[str, list[Block]]:
    """The blocks of a run without steps of fewer requests than `at_once`; as they are where a name
    has too few others."""
    full: dict[str, list[Block]] = {}
    for name, blocks in run.items():
        parts = [
            replace(
                block, sizes={size: of for size, of in block.sizes.items() if size[0] == at_once}
            )
            for block in blocks
        ]
        full[name] = [block for block in parts if block.sizes]
        if len(full[name]) < LEAST_BLOCKS:
            return run
    return full


def _added_at_ends(blocks: Sequence[Block], full: Sequence[Block]) -> float:
    """Logarithm of all decode time / what it would be if steps of fewer requests than full ones
    cost as much for each request."""
    mixed_ms = sum(block.mixed_ms for block in blocks)
    (steps, ms), (full_steps, full_ms) = (
        np.sum([(size[0] * of[0], of[1]) for size, of in sums(part).items()], axis=0)
        for part in (blocks, full)
    )
    return log((mixed_ms + ms) / (mixed_ms + steps * full_ms / full_steps)) if ms > 0 else 0.0


def _timed(
    run: Mapping[str, Sequence[Block]],
    typical: Mapping[tuple[str, Size], float],
    places: Mapping[str, int],
) -> _Timed:
    rows = []
    for name, blocks in run.items():
        for block in blocks:
            known = {size: of for size, of in block.sizes.items() if (name, size) in typical}
            expected = sum(count * typical[name, size] for size, (count, _) in known.items())
            ms = sum(ms for _, ms in known.values())
            if ms > 0:
                count = sum(count for count, _ in known.values())
                middle = (block.start_s + block.end_s) / 2
                rows.append((places[name], middle, count, ms, expected))
    names, at_s, num_steps, taken_ms, expected_ms = np.array(rows, float).reshape(-1, 5).T
    logs = np.log(taken_ms / expected_ms)
    for place in set(names.tolist()):
        of = names == place
        off = logs[of] - np.median(logs[of])
        most = OUTLIERS * TO_DEVIATION * np.median(np.abs(off))
        logs[of] += np.clip(off, -most, most) - off
    return _Timed(logs, names.astype(np.int64), at_s, num_steps, taken_ms, expected_ms)


def _taken(found: _Timed, place: int) -> float:
    """Logarithm of the time of a name's blocks / the mean time of steps of their sizes."""
    of = found.names == place
    return log(float(found.ms[of].sum() / found.expected_ms[of].sum()))


@dataclass(slots=True)
class _Fit:
    likelihood: float
    costs: Array
    covariance: Array
    checks: list[Check]


def _fitted(
    runs: Sequence[_Timed], num_names: int, drift: float, lasting_s: float, level: float
) -> _Fit:
    """Generalised least squares with one choice of DRIFTS, LASTING_S and LEVELS. Each run has as
    much noise as its own blocks show, and runs are independent."""
    noises: list[Array] = []
    roots: list[Array] = []
    for run in runs:
        apart = np.abs(run.at_s[:, None] - run.at_s[None, :])
        noise = np.diag(run.num_steps.mean() / run.num_steps)
        noise += drift * np.exp(-apart / lasting_s)
        own = _least_squares([run], [_root(noise)], num_names)
        noises.append(noise * own.variance)
        roots.append(_root(noises[-1] + drift * level * own.variance))
    found = _least_squares(runs, roots, num_names)
    return _Fit(
        likelihood=-(found.log_determinant + found.freedom * log(found.variance)) / 2,
        costs=found.costs,
        covariance=found.variance * found.inverse,
        checks=[
            _check(run, found.variance * noise) for run, noise in zip(runs, noises, strict=True)
        ],
    )


def _root(covariance: Array) -> Array:
    return np.asarray(np.linalg.cholesky(covariance), np.float64)


@dataclass(slots=True)
class _LeastSquares:
    costs: Array
    inverse: Array
    variance: float
    freedom: int
    log_determinant: float


def _least_squares(runs: Sequence[_Timed], roots: Sequence[Array], num_names: int) -> _LeastSquares:
    """Costs of the names in `runs`, whose noise has covariances with these Cholesky roots."""
    information = np.zeros((num_names, num_names))
    projected, total, log_determinant = np.zeros(num_names), 0.0, 0.0
    for run, root in zip(runs, roots, strict=True):
        names = np.eye(num_names)[run.names]
        white = np.linalg.solve(root, np.column_stack([names, run.logs]))
        design, logs = white[:, :-1], white[:, -1]
        information += design.T @ design
        projected += design.T @ logs
        total += float(logs @ logs)
        log_determinant += 2 * float(np.log(np.diag(root)).sum())
    seen = np.flatnonzero(np.diag(information))
    inverse = np.zeros_like(information)
    inverse[np.ix_(seen, seen)] = np.linalg.inv(information[np.ix_(seen, seen)])
    costs = inverse @ projected
    freedom = sum(len(run.logs) for run in runs) - len(seen)
    variance = max(total - float(projected @ costs), TINY) / freedom
    log_determinant += float(np.linalg.slogdet(information[np.ix_(seen, seen)])[1])
    return _LeastSquares(costs, inverse, variance, freedom, log_determinant)


def _check(run: _Timed, noise: Array) -> Check:
    """The check of a run; `noise` is the covariance of the logarithms of its blocks."""
    whole = np.zeros(len(run.logs))
    halves = np.zeros(len(run.logs), np.int64)
    names = list(dict.fromkeys(run.names.tolist()))
    for number, place in enumerate(names):
        of = np.flatnonzero(run.names == place)
        whole[of] = (1 - 2 * number) * run.ms[of] / run.ms[of].sum()
        for half, part in enumerate(np.array_split(of, 2)):
            halves[part] = 2 * number + half
    plain = sqrt(float(whole @ noise @ whole))
    if len(names) != 2:
        return Check(plain, 0.0)
    costs = _least_squares([replace(run, names=halves)], [_root(noise)], 4).costs
    return Check(plain, abs(float(costs @ (1, -1, -1, 1))) / 2)

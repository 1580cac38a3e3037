"""Costs of decode steps: timed in blocks while a run lasts, then fitted with the machine's drift
taken out.

A speedup is tokens per step, which are counted, times the ratio of two costs of a step, which a
clock measures. Only that second part is estimated here (ADR 29).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import log, sqrt
from typing import NotRequired, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from hydraspec.types import StepRecord

STEPS_OF_BLOCK = 4  # at first; twice as many whenever a round has more than MOST_BLOCKS
MOST_BLOCKS = 16  # of a round
LEAST_STEPS = 8  # of a size, for its mean to be used
LEAST_BLOCKS = 4  # of a side of a run
# Drift: its variance over that of a block's own noise, and how long it lasts in seconds. Levels of
# whole runs: their variance over that of drift, where there are several runs.
DRIFTS = (0.0, 0.25, 1.0, 4.0, 16.0, 64.0, 256.0)
LASTING_S = (0.5, 2.0, 8.0, 32.0)
LEVELS = (0.0, 1.0, 10.0)
NUM_ERRORS = 3.0  # standard errors that drift may move a measured ratio by
GRANTED = 0.02  # share of the ratio that is allowed beyond them
UNEVEN = 2.0  # errors; halves of a run that differ by more give the error themselves
TINY = 1e-20  # steps that all take the same time have no error
Array = NDArray[np.float64]
Size = tuple[int, int]  # of a decode step: its requests, and their rows


class BlockRecord(TypedDict):
    """A block in a file; each of `steps` has requests, rows, number of steps, milliseconds."""

    start_s: float
    end_s: float
    steps: list[list[float]]


class StepCostsFile(TypedDict):
    """step_costs.json: the blocks of each side of a run."""

    schema_version: int
    method: list[BlockRecord]
    baseline: NotRequired[list[BlockRecord]]


@dataclass(slots=True)
class Block:
    """Decode steps that follow each other: their number and milliseconds by size."""

    start_s: float
    end_s: float
    sizes: dict[Size, tuple[int, float]] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """The number of steps of all sizes."""
        return sum(count for count, _ in self.sizes.values())

    def add(self, size: Size, count: int, milliseconds: float) -> None:
        """Add `count` steps of a size and their time."""
        before, ms = self.sizes.get(size, (0, 0.0))
        self.sizes[size] = before + count, ms + milliseconds

    def joined(self, later: Block) -> Block:
        """A block that joins this one and the `later` one, which follows it."""
        made = Block(self.start_s, later.end_s, dict(self.sizes))
        for size, (count, ms) in later.sizes.items():
            made.add(size, count, ms)
        return made

    @classmethod
    def of_record(cls, found: BlockRecord) -> Block:
        """The block of a record in a file."""
        made = cls(found["start_s"], found["end_s"])
        for requests, rows, count, ms in found["steps"]:
            made.add((int(requests), int(rows)), int(count), ms)
        return made


class StepBlocks:
    """The decode steps of one side of a run, in blocks. Steps that read prompts are left out.

    Attributes:
        blocks: the blocks of all rounds, in order.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.blocks: list[Block] = []
        self._clock = clock
        self.begin_run()

    def begin_run(self) -> None:
        """Begin a round, whose steps go into new blocks."""
        self._first, self._length = len(self.blocks), STEPS_OF_BLOCK

    def add(self, record: StepRecord, total_ms: float) -> None:
        """Count a step that has just ended."""
        if not record.requests or any(part.is_prefill for part in record.requests):
            return
        now, of_round = self._clock(), self.blocks[self._first :]
        if not of_round or of_round[-1].num_steps >= self._length:
            if len(of_round) == MOST_BLOCKS:
                pairs = zip(of_round[::2], of_round[1::2], strict=True)
                self.blocks[self._first :] = [one.joined(other) for one, other in pairs]
                self._length *= 2
            self.blocks.append(Block(now - total_ms / 1000, now))
        self.blocks[-1].end_s = now
        rows = sum(part.num_rows for part in record.requests)
        self.blocks[-1].add((len(record.requests), rows), 1, total_ms)


def step_costs_file(sides: Mapping[str, StepBlocks]) -> StepCostsFile:
    """The content of step_costs.json."""
    blocks = {
        name: [
            {
                "start_s": block.start_s,
                "end_s": block.end_s,
                "steps": [[*size, *of] for size, of in block.sizes.items()],
            }
            for block in side.blocks
        ]
        for name, side in sides.items()
    }
    return cast(StepCostsFile, {"schema_version": 1, **blocks})


def _sums(blocks: Iterable[Block]) -> dict[Size, tuple[int, float]]:
    """Numbers of steps and milliseconds of all blocks, by size."""
    total = Block(0.0, 0.0)
    for block in blocks:
        for size, (count, ms) in block.sizes.items():
            total.add(size, count, ms)
    return total.sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRatio:
    """A ratio of two costs of decode steps, as a correction of the ratio of measured times.

    Attributes:
        drift: the logarithm of this ratio less that of the measured one.
        log_error: the standard error of the ratio's logarithm.
        holds: whether drift is within what its model allows; if not, measured times are used.
    """

    drift: float
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
        checks: the checks of each run.
    """

    places: Mapping[str, int]
    covariance: Array
    drifts: Sequence[Mapping[str, float]]
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
        drift = float(np.mean([self.drifts[run][one] - self.drifts[run][other] for run in runs]))
        error = self.error(one, other)
        checks = [self.checks[run] for run in runs]
        plain = sqrt(sum(each.plain**2 for each in checks)) / len(checks)
        halves = sqrt(sum(each.halves**2 for each in checks)) / len(checks)
        return CostRatio(
            drift=drift,
            log_error=halves if halves > UNEVEN * error else error,
            holds=abs(drift) <= NUM_ERRORS * max(plain, error) + GRANTED,
        )


@dataclass(slots=True)
class _Timed:
    """Blocks [N] of one run: logarithms of time / the mean time of steps of these sizes, places of
    names, middles in seconds, numbers of steps and milliseconds."""

    logs: Array
    names: NDArray[np.int64]
    at_s: Array
    num_steps: Array
    ms: Array


def fit(runs: Sequence[Mapping[str, Iterable[Block]]]) -> StepCosts | None:
    """Costs of steps by name, fitted to the blocks that runs have of each name; None where a run
    has fewer than LEAST_BLOCKS of a name.

    The logarithm of a block's time is the cost of its name, the run's level, drift that lasts
    for some seconds, and noise: generalised least squares, averaged over the sizes of drift by
    their restricted likelihood, so that uncertainty about drift is a part of the error.
    """
    kept = [{name: list(blocks) for name, blocks in run.items()} for run in runs]
    by_name: dict[str, list[Block]] = defaultdict(list)
    for run in kept:
        for name, blocks in run.items():
            by_name[name] += blocks
    typical = {
        (name, size): ms / count
        for name, blocks in by_name.items()
        for size, (count, ms) in _sums(blocks).items()
        if count >= LEAST_STEPS and ms
    }
    places = {name: i for i, name in enumerate(by_name)}
    timed = [_timed(run, typical, places) for run in kept]
    for run, found in zip(kept, timed, strict=True):
        if any((found.names == places[name]).sum() < LEAST_BLOCKS for name in run):
            return None
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
        {name: _mean(found, places[name]) - float(costs[places[name]]) for name in run}
        for run, found in zip(kept, timed, strict=True)
    ]
    return StepCosts(places, covariance, drifts, best.checks)


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
                rows.append((log(ms / expected), places[name], middle, count, ms))
    logs, names, at_s, num_steps, taken_ms = np.array(rows, float).reshape(-1, 5).T
    return _Timed(logs, names.astype(np.int64), at_s, num_steps, taken_ms)


def _mean(found: _Timed, place: int) -> float:
    """The mean of a name's logarithms over its blocks, weighted by time."""
    of = found.names == place
    return float(np.average(found.logs[of], weights=found.ms[of]))


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

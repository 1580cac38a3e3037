"""Measurement of decode step times, once, over some of a workload's requests, for engines that
choose K per step by these costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from statistics import mean

from hydraspec.engine.base import Engine
from hydraspec.engine.costs import CostTable, StepTimes
from hydraspec.engine.schedule.draft_lengths import AcceptanceCounts, DraftLengths
from hydraspec.types import Request, StepRecord

NUM_STEPS = 12  # least number of steps of each batch and length
SLOWER_HALF = 0.5  # share of times left out: other work of the machine made these slower
TOKENS_PER_RUN = 48  # output tokens of each request
MAX_RUNS = 12  # most runs of each batch
NOT_MEASURED = (
    "method.num_speculative_tokens=auto: too few steps ran in warm-up to measure what they cost; "
    "every step has method.max_speculative_tokens drafts"
)


def measure_costs(
    engine: Engine,
    requests: Sequence[Request],
    lengths: DraftLengths,
    *,
    max_num_seqs: int,
    num_micro_batches: int,
) -> CostTable | None:
    """Costs of steps of 1, 2, 4, … requests, up to as many as there are and run at once, without
    sizes of which too few steps ran; None if that leaves none.

    Draft lengths alternate from step to step and batches from run to run, so that a machine that
    gets slower does so for all. Which steps run depends on the requests alone, so that ranks run
    the same steps. The table's rates of acceptance come from these steps.
    """
    firsts = [request for request in requests if request.after is None]
    most = min(max_num_seqs, len(firsts))
    batches = sorted({1 << n for n in range(most.bit_length())} | {most} - {0})
    sizes = sorted({-(-batch // num_micro_batches) for batch in batches})
    times, counts = StepTimes(slowest=SLOWER_HALF), AcceptanceCounts(lengths.offered[-1])

    def is_known(size: int) -> bool:
        return all(len(times.step_ms[size, n]) >= NUM_STEPS for n in lengths.offered)

    lengths.follow(cycle(lengths.offered))
    try:
        for batch in batches * MAX_RUNS:
            if is_known(-(-batch // num_micro_batches)):
                continue
            for event in engine.run(_copies(firsts, batch), concurrency=None):
                if isinstance(event, StepRecord):
                    times.add(event)
                    counts.add(event.requests)
    finally:
        lengths.follow(None)
    known = [size for size in sizes if is_known(size)]
    return _never_falling(times.table(known, lengths.offered, counts.rates())) if known else None


def _copies(requests: Sequence[Request], count: int) -> list[Request]:
    """Copies of the first `count` requests, which arrive at once and have equally long outputs."""
    return [
        replace(
            request,
            index=index,
            arrival_s=None,
            sampling=replace(
                request.sampling,
                max_tokens=TOKENS_PER_RUN,
                ignore_eos=True,
                stop=(),
                stop_token_ids=(),
            ),
        )
        for index, request in enumerate(requests[:count])
    ]


def _never_falling(table: CostTable) -> CostTable:
    """The table with step times that never fall with more drafts, and drafting times below them."""
    step_ms = tuple(tuple(rising(row)) for row in table.step_ms)
    pairs = zip(table.draft_ms or (), step_ms, strict=False)
    draft_ms = tuple(tuple(map(min, drafting, steps)) for drafting, steps in pairs)
    return replace(table, step_ms=step_ms, draft_ms=draft_ms or None)


def rising(values: Sequence[float]) -> list[float]:
    """The nearest values that never fall (least squares): more drafts take no less time, so where
    a measurement says so, its neighbours are pooled."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([value])
        while len(pools) > 1 and mean(pools[-2]) > mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [mean(pool) for pool in pools for _ in pool]

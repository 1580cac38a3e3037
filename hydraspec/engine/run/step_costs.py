"""Measurement of decode step times, once, over some of a workload's requests, for engines that
choose K per step by these costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product, repeat
from statistics import mean

import numpy as np

from hydraspec.engine.base import Engine, closing_run
from hydraspec.engine.costs import (
    HALF,
    CostTable,
    StepTimes,
    filled_to,
    over_contexts,
    timed_size,
)
from hydraspec.engine.schedule.acceptance import AcceptanceCounts, outcomes
from hydraspec.engine.schedule.admission import most_of_replica
from hydraspec.engine.schedule.draft_lengths import DraftLengths
from hydraspec.types import Request, StepRecord

NUM_STEPS = 12  # least number of steps of each batch and length
SLOWER_HALF = 0.5  # share of times left out: other work of the machine made these slower
TOKENS_PER_RUN = 48  # output tokens of each request
MAX_RUNS = 24  # most runs of each batch
HELD = 3  # steps in a row of each length, of which the first is not timed
NOT_MEASURED = (
    "method.num_speculative_tokens=auto: too few steps ran in warm-up to measure what they cost; "
    "every step has method.max_speculative_tokens drafts"
)


# Contexts of further planes of a table, and the least length of a request that has any.
LADDER = (1024, 4096, 16384, 65536, 262144)
APART = 2.0  # least ratio of two contexts


def measure_costs(
    engine: Engine,
    requests: Sequence[Request],
    lengths: DraftLengths,
    concurrency: int | None,
    *,
    max_num_seqs: int,
    num_replicas: int,
    num_micro_batches: int,
) -> CostTable | None:
    """Costs of steps of 1, 2, 4, … requests, up to as many as there are and run at once on one of
    the replicas if `concurrency` are unfinished on all together (None: any number), without sizes
    of which too few steps ran; None if that leaves none.

    First at the mean context of the requests' own steps, then with filled KV at the contexts of
    `longer_contexts`, there without the batches that do not fit. Draft lengths take turns of HELD
    steps and batches alternate from run to run, so that a machine that gets slower does so for all;
    one of them is K for half of the requests and 0 for the others. Which steps run depends on the
    requests alone, so that ranks run the same steps. The table's rates of acceptance come from the
    requests' own steps.
    """
    firsts = [request for request in requests if request.after is None]
    in_slots = firsts[:max_num_seqs]
    most = most_of_replica(len(firsts), concurrency, max_num_seqs, num_replicas)
    if most > num_micro_batches:  # steps in flight are of one size then: others time no HALF
        most = min(-(-most // num_micro_batches) * num_micro_batches, len(in_slots))
    batches = sorted({1 << n for n in range(most.bit_length())} | {most} - {0})
    plane = Plane(engine, lengths, num_micro_batches)
    plane.measure(in_slots, batches)
    if (table := plane.table()) is None:
        return None
    context, rates = plane.mean_context(), plane.counts.rates()
    tables = {context: table}
    for longer in longer_contexts(firsts, context):
        room = engine.most_at_once(longer + TOKENS_PER_RUN) or 0
        plane = Plane(engine, lengths, num_micro_batches)
        plane.measure(
            [filled_to(request, longer) for request in in_slots],
            [batch for batch in batches if batch <= room],
        )
        if (table := plane.table()) is not None:
            tables[longer] = table
    return over_contexts(tables, rates)


@dataclass(slots=True)
class Plane:
    """Timed steps at one context: `counts` are of the drafts that they accepted."""

    engine: Engine
    lengths: DraftLengths
    num_micro_batches: int
    times: StepTimes = field(default_factory=lambda: StepTimes(slowest=SLOWER_HALF))
    counts: AcceptanceCounts = field(init=False)
    sizes: list[int] = field(default_factory=list)  # requests in the steps that are wanted
    contexts: list[int] = field(default_factory=list)  # tokens of each request of each step
    size: int = 1  # requests in the steps of the present run
    last: int | None = None  # drafts of each request in the step before; None: of no size

    def __post_init__(self) -> None:
        self.counts = AcceptanceCounts(self.lengths.offered[-1])

    def script(self) -> Iterator[int | tuple[int, int]]:
        """Yield the lengths of steps: HELD times that of which the fewest steps of the present size
        are timed, of several the one that was not taken for longest. In fixed turns some lengths
        might always meet the steps that read a run's prompts."""
        taken = dict.fromkeys([*self.lengths.offered, HALF], 0)
        for turn in count(1):
            fewest = min(
                self._wanted(self.size),
                key=lambda n: (len(self.times.step_ms[self.size, n]), taken[n]),
            )
            taken[fewest] = turn
            yield from repeat((0, self.lengths.offered[-1]) if fewest == HALF else fewest, HELD)

    def measure(self, requests: Sequence[Request], batches: Sequence[int]) -> None:
        """Run batches of these requests, each until a request ends, until enough steps of each size
        ran. After a run of each batch the requests that follow take their turn."""
        size_of = {batch: -(-batch // self.num_micro_batches) for batch in batches}
        self.sizes = sorted({*size_of.values()})
        self.lengths.follow(self.script())
        try:
            for number, batch in product(range(MAX_RUNS), batches):
                self.size = size_of[batch]
                if not self.is_known(self.size):
                    self._time(_copies(requests, number * batches[-1], batch))
        finally:
            self.lengths.follow(None)

    def _time(self, requests: Sequence[Request]) -> None:
        with closing_run(self.engine, requests, None) as events:
            for event in events:
                if not isinstance(event, StepRecord):
                    break
                self.add(event)

    def add(self, step: StepRecord) -> None:
        """Time the step if that before had as many drafts: where the host is busy, a part of its
        work for one length counts for the next, and a drafter that has rested makes up for it."""
        size = timed_size(step)
        before, self.last = self.last, None if size is None else size[1]
        if before is not None and before == self.last:
            self.times.add(step)
        offered = [len(part.draft_token_ids) for part in step.requests]
        found = outcomes(step.requests, self.lengths.offered[-1])
        self.counts.add(found, max(offered, default=0))
        self.contexts += [part.num_computed_tokens for part in step.requests if not part.is_prefill]

    def _wanted(self, size: int) -> list[int]:
        return [*self.lengths.offered, *[HALF] * (size > 1)]

    def is_known(self, size: int) -> bool:
        """Returns whether enough steps of every length are timed."""
        return all(len(self.times.step_ms[size, n]) >= NUM_STEPS for n in self._wanted(size))

    def table(self) -> CostTable | None:
        """Costs of the sizes of which enough steps ran; None: of none."""
        known = [size for size in self.sizes if self.is_known(size)]
        if not known:
            return None
        return with_ragged(
            _never_falling(self.times.table(known, self.lengths.offered)), self.times
        )

    def mean_context(self) -> int:
        """Mean tokens of a request of a timed step in the KV cache, 1 at least."""
        return max(1, round(mean(self.contexts)))


def longer_contexts(requests: Sequence[Request], context: int) -> list[int]:
    """Contexts that steps of these requests reach and that are APART from `context`: of LADDER, and
    that of the longest request; empty where all are about as long, or shorter than LADDER."""
    prompts = [len(request.prompt_token_ids or ()) for request in requests]
    ends = [
        count + request.sampling.max_tokens
        for count, request in zip(prompts, requests, strict=True)
    ]
    longest = max(ends) - TOKENS_PER_RUN
    found = [each for each in LADDER if min(prompts) <= each <= longest / APART]
    found += [longest] if longest >= LADDER[0] else []
    return [each for each in found if not context / APART < each < context * APART]


def _copies(requests: Sequence[Request], first: int, count: int) -> list[Request]:
    """Copies of `count` requests from place `first` on, from the start again after the last; they
    arrive at once and have equally long outputs."""
    taken = (requests[place % len(requests)] for place in range(first, first + count))
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
        for index, request in enumerate(taken)
    ]


def _never_falling(table: CostTable) -> CostTable:
    """The table with step times that never fall with more drafts, and drafting times below them."""
    step_ms = tuple(tuple(rising(row)) for row in table.step_ms)
    pairs = zip(table.draft_ms or (), step_ms, strict=False)
    draft_ms = tuple(tuple(map(min, drafting, steps)) for drafting, steps in pairs)
    return replace(table, step_ms=step_ms, draft_ms=draft_ms or None)


def with_ragged(table: CostTable, times: StepTimes) -> CostTable:
    """The table with what ragged steps take longer, from the timed steps of `half_size`.

    Where drafting is timed (eager steps on a CPU) it is a share of verification: each number of
    drafts is a segment of attention of its own. Elsewhere (graphs of ragged steps, which propose K
    drafts) it is the same milliseconds for each draft that the mean is below K.
    """
    most, rows = table.drafts[-1], list[tuple[float, ...]]()
    for batch, steps in zip(table.batches, table.step_ms, strict=True):
        mean_drafts, extra = most * (batch // 2) / batch, 0.0
        equal = table.at(batch, mean_drafts)
        if half := times.step_ms[batch, HALF]:
            extra = times.typical(half) - equal.step_ms
        if table.draft_ms is None:
            per_draft = max(0.0, extra) / (most - mean_drafts)
            rows.append(tuple(per_draft * (most - n) for n in table.drafts))
            continue
        parts = table.draft_ms[len(rows)]
        drafting = float(np.interp(mean_drafts, table.drafts, parts))
        share = max(0.0, extra - (parts[-1] - drafting)) / (equal.step_ms - drafting)
        rows.append(tuple(share * (a - b) for a, b in zip(steps, parts, strict=True)))
    return replace(table, ragged_ms=tuple(rows))


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

"""Measures what decode steps cost by requests and drafts, once, over some of a workload's requests:
where K is chosen per step, by those costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from statistics import mean

from hydraspec.engine.base import Engine
from hydraspec.engine.costs import CostTable
from hydraspec.engine.schedule.draft_lengths import AcceptanceCounts, DraftLengths
from hydraspec.types import Request, StepRecord

NUM_STEPS = 12  # of each batch and length, at least; the faster half counts
TOKENS_PER_RUN = 48  # of each request
MAX_RUNS = 12  # of each batch
NOT_MEASURED = (
    "method.num_speculative_tokens=auto: too few steps ran in warm-up to measure what they cost; "
    "every step has method.max_speculative_tokens drafts"
)


@dataclass(slots=True)
class Times:
    """Milliseconds of the steps of one size, by length."""

    step_ms: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    draft_ms: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def has_all(self, lengths: Sequence[int]) -> bool:
        """Returns whether enough steps were seen of each length."""
        return all(len(self.step_ms[length]) >= NUM_STEPS for length in lengths)


def measure_costs(
    engine: Engine,
    requests: Sequence[Request],
    lengths: DraftLengths,
    *,
    max_num_seqs: int,
    num_micro_batches: int,
) -> CostTable | None:
    """Costs of steps of 1, 2, 4, … requests, up to as many as there are and run at once; None where
    too few steps of a size ran.

    Lengths take turns from step to step and batches from run to run, so that a machine that gets
    slower does so for all. Which steps run depends on the requests alone: ranks that run the same
    steps stay together. The same steps tell how often drafts are accepted.
    """
    firsts = [request for request in requests if request.after is None]
    most = min(max_num_seqs, len(firsts))
    batches = sorted({1 << n for n in range(most.bit_length())} | {most} - {0})
    found: dict[int, Times] = defaultdict(Times)
    counts = AcceptanceCounts(lengths.offered[-1])
    lengths.follow(cycle(lengths.offered))
    try:
        for batch in batches * MAX_RUNS:
            if found[-(-batch // num_micro_batches)].has_all(lengths.offered):
                continue
            for event in engine.run(_copies(firsts, batch), concurrency=None):
                if isinstance(event, StepRecord):
                    _note(event, found)
                    counts.add(event.requests)
    finally:
        lengths.follow(None)
    measured = {-(-batch // num_micro_batches) for batch in batches}
    return _table({size: found[size] for size in sorted(measured)}, lengths.offered, counts.rates())


def _copies(requests: Sequence[Request], count: int) -> list[Request]:
    """The first `count` of them, all at once, of equally long outputs."""
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


def _note(record: StepRecord, found: dict[int, Times]) -> None:
    """Add the time of a step in which every request verified all drafts."""
    length = record.draft_length
    if length is None or any(r.is_prefill or r.num_rows != length + 1 for r in record.requests):
        return
    times = found[len(record.requests)]
    times.step_ms[length].append(record.total_ms)
    drafting = record.phase_ms.get("propose")
    if drafting is not None:
        times.draft_ms[length].append(drafting)


def _table(
    found: dict[int, Times], offered: Sequence[int], rates: Sequence[float]
) -> CostTable | None:
    whole = {size: times for size, times in found.items() if times.has_all(offered)}
    if not whole:
        return None
    has_phases = all(times.draft_ms[n] for times in whole.values() for n in offered)
    step_ms = [rising([_typical(t.step_ms[n]) for n in offered]) for t in whole.values()]
    draft_ms = [[_typical(t.draft_ms[n]) for n in offered] for t in whole.values() if has_phases]
    return CostTable(
        batches=tuple(whole),
        drafts=tuple(offered),
        step_ms=tuple(map(tuple, step_ms)),
        draft_ms=tuple(
            tuple(map(min, drafting, steps))
            for drafting, steps in zip(draft_ms, step_ms, strict=False)
        )
        or None,
        rates=tuple(rates),
    )


def _typical(times: list[float]) -> float:
    """The mean of the faster half: what else the machine did made the others slower."""
    return mean(sorted(times)[: (len(times) + 1) // 2])


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

"""A cache that is too small for the requests that run: all finish, in order, with the tokens they
would have had."""

from __future__ import annotations

import random
from collections import deque

import pytest
from caches import kv_cache, kv_group
from graph_runs import cache_gib, graph_config, make_graph_engine, run_requests, zoo_requests

from hydraspec.engine.schedule.scheduler import Scheduler
from hydraspec.engine.schedule.sequence import Scheduled, Sequence
from hydraspec.types import Request, SamplingParams

K, SLOTS, BUDGET, MAX_LEN = 3, 6, 32, 64


def make_scheduler(
    *, full: int, sliding: int, micro_batches: int = 1, lookahead: int = 0, block: int = 4
) -> Scheduler:
    """Groups with so many blocks of `block` and of 2 rows."""
    specs = [kv_group("full", (0,), block), kv_group("sliding", (1,), 2, 7)]
    max_tokens = MAX_LEN + K + lookahead + 1
    kv = kv_cache(specs, [full + 1, sliding + 1], SLOTS, max_tokens, prefix_root=b"root")
    return Scheduler(
        kv,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=BUDGET,
        max_model_len=MAX_LEN,
        num_speculative_tokens=K,
        num_lookahead_tokens=lookahead,
        num_micro_batches=micro_batches,
    )


class Steps:
    """Runs a scheduler with results that come `late` steps late and accept drafts at random."""

    def __init__(self, scheduler: Scheduler, late: int, rng: random.Random) -> None:
        self.scheduler, self._late, self._rng = scheduler, late, rng
        self._flights: deque[list[Scheduled]] = deque()
        self.num_steps = 0

    def step(self) -> list[Scheduled]:
        """The rows that were chosen."""
        chosen = self.scheduler.schedule()
        for item in chosen:
            reach = item.seq_len + self.scheduler.num_lookahead_tokens
            groups = self.scheduler.kv._groups
            assert all(group.reach(item.sequence.slot) >= reach for group in groups)
        self.num_steps += 1
        if chosen:
            if self._late:
                self.scheduler.launched(chosen)
            self._flights.append(chosen)
        if self._flights and (not chosen or len(self._flights) > self._late):
            for item in self._flights.popleft():
                self._arrive(item)
        return chosen

    def _arrive(self, item: Scheduled) -> None:
        sequence = item.sequence
        if sequence.finish_reason is not None:
            return
        accepted = self._rng.randint(0, item.num_drafts)
        if item.samples:
            emitted = [self._rng.randrange(5) for _ in range(accepted + 1)]
            sequence.token_ids.extend(emitted)
            sequence.decoding = True
        sequence.num_computed += item.num_rows - (item.num_drafts - accepted)
        self.scheduler.arrived(item)
        if sequence.num_tokens - sequence.num_prompt >= sequence.request.sampling.max_tokens:
            sequence.finish_reason = "length"
            self.scheduler.release(sequence)


def requests(rng: random.Random, count: int) -> list[Sequence]:
    """Prompts of which some begin alike, up to what the cache holds for one request alone."""
    found = []
    for index in range(count):
        prompt = [rng.randrange(2)] * rng.randint(0, 12) + [rng.randrange(5)] * rng.randint(1, 18)
        sampling = SamplingParams(max_tokens=rng.randint(1, 20))
        request = Request(index=index, id=str(index), sampling=sampling, prompt_token_ids=prompt)
        found.append(Sequence(request=request, token_ids=list(prompt), num_prompt=len(prompt)))
    return found


def steps_alone(sequence: Sequence, late: int) -> int:
    """The most steps that a request needs while it goes on in each that its results allow."""
    decodes = sequence.request.sampling.max_tokens
    chunks = sequence.num_prompt // 6 + 2  # where a step's rows or a window's blocks cut them
    return (chunks + decodes) * (late + 1) + 1


@pytest.mark.parametrize(
    ("late", "micro_batches"), [(0, 1), (1, 1), (1, 2)], ids=["waiting", "ahead", "stages"]
)
@pytest.mark.parametrize("seed", range(2))
def test_none_starves(late: int, micro_batches: int, seed: int) -> None:
    """The oldest unfinished request is never preempted, and goes on. So the wait of each has a
    bound: what those before it need alone, one after another."""
    rng = random.Random(seed)
    scheduler = make_scheduler(full=16, sliding=20, micro_batches=micro_batches)
    steps, sequences = Steps(scheduler, late, rng), requests(rng, 150)
    arriving, present = deque(sequences), []
    preempted: list[int] = []
    preempt = scheduler._preempt

    def watched(sequence: Sequence) -> None:
        oldest = next(other for other in sequences if other.finish_reason is None)
        assert sequence is not oldest, "the oldest was preempted"
        preempted.append(sequence.request.index)
        preempt(sequence)

    scheduler._preempt = watched  # type: ignore[method-assign]
    limit, idle = 0, 0
    while arriving or any(sequence.finish_reason is None for sequence in present):
        for _ in range(min(len(arriving), rng.randint(0, 3))):
            present.append(arriving.popleft())
            scheduler.add(present[-1])
            limit = max(limit, steps.num_steps) + steps_alone(present[-1], late)
        unfinished = [s for s in present if s.finish_reason is None]
        chosen = steps.step()
        if unfinished:
            goes_on = any(item.sequence is unfinished[0] for item in chosen)
            idle = 0 if goes_on or unfinished[0].finish_reason else idle + 1
            assert idle <= late + micro_batches, "the oldest waits"
        order = [s.request.index for s in (*scheduler.running, *scheduler.waiting)]
        assert order == sorted(order), "they wait and run in the order of arrival"
        assert steps.num_steps <= limit
    assert all(s.finish_reason == "length" for s in sequences)
    assert len(preempted) > 20
    assert max(map(preempted.count, preempted)) > 1, "some lose their blocks again"
    assert scheduler.kv.usage == 0.0


@pytest.mark.parametrize("block", [1, 4])
def test_what_a_drafter_writes_after_the_rows_has_blocks(block: int) -> None:
    """K - 1 positions, wherever in a block the rows end, and until the cache is full."""
    for lookahead in range(K):
        for length in range(1, 2 * block + 1):
            for num_tokens in range(length + 3, length + 3 + 2 * block):
                blocks = -(-(num_tokens + lookahead) // block)
                scheduler = make_scheduler(
                    full=blocks, sliding=40, lookahead=lookahead, block=block
                )
                request = Request(index=0, id="0", sampling=SamplingParams(max_tokens=40))
                prompt = list(range(length))
                sequence = Sequence(request=request, token_ids=prompt, num_prompt=length)
                scheduler.add(sequence)
                steps = Steps(scheduler, 0, random.Random(length))
                while sequence.finish_reason is None:
                    steps.step()
                held = blocks * block
                assert sequence.finish_reason == "error"
                assert sequence.num_computed == held - lookahead, "rows up to the last block's end"
                assert scheduler.kv.usage == 0.0


@pytest.mark.parametrize(
    "method", ["eagle3 on gemma4", pytest.param("gemma4_mtp", marks=pytest.mark.slow)]
)
def test_tokens_and_drafts_are_those_of_an_ample_cache(method: str) -> None:
    """Draft KV at the borders of blocks of 4, with preemptions that come back through hits."""
    fields = {"k": 4, "max_num_seqs": 4, "max_model_len": 112}
    ample = graph_config(method, "none", block_size=64, **fields)
    wanted = run_requests(make_graph_engine(ample, None), zoo_requests(4, longest=8))
    config = graph_config(method, "none", block_size=4, **fields)
    config.engine.kv_cache.memory_gib = 0.38 * cache_gib(config)
    found = run_requests(make_graph_engine(config, None), zoo_requests(4, longest=8))
    assert found.num_preempted > 0
    assert found.outputs == wanted.outputs

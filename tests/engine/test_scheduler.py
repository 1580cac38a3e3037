"""Who runs in the next step, and with how many rows."""

from __future__ import annotations

from collections import deque

from caches import kv_cache, kv_group

from hydraspec.engine.costs import CostTable
from hydraspec.engine.schedule.draft_lengths import DraftLengths
from hydraspec.engine.schedule.scheduler import Scheduler
from hydraspec.engine.schedule.sequence import Scheduled, Sequence
from hydraspec.types import Request, SamplingParams


def make_scheduler(
    *, num_blocks: int = 65, max_num_seqs: int = 4, budget: int = 16, max_len: int = 64, k: int = 3
) -> Scheduler:
    return Scheduler(
        kv_cache([kv_group("full", (0,), 4)], [num_blocks], max_num_seqs, max_len + k + 1),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_len,
        num_speculative_tokens=k,
    )


def add(scheduler: Scheduler, length: int, index: int = 0) -> Sequence:
    request = Request(index=index, id=str(index), sampling=SamplingParams())
    sequence = Sequence(request=request, token_ids=list(range(length)), num_prompt=length)
    scheduler.add(sequence)
    return sequence


def run_step(scheduler: Scheduler, num_accepted: int = 0) -> list[tuple[int, int, int]]:
    """Schedule, then pretend the step ran; returns (index, rows, drafts)."""
    chosen = scheduler.schedule()
    for item in chosen:
        sequence = item.sequence
        accepted = min(num_accepted, item.num_drafts)
        if item.samples:
            sequence.token_ids.extend([0] * (accepted + 1))
            sequence.decoding = True
        sequence.num_computed += item.num_rows - (item.num_drafts - accepted)
    return [(i.sequence.request.index, i.num_rows, i.num_drafts) for i in chosen]


def test_a_long_prompt_is_read_in_chunks_beside_decodes() -> None:
    scheduler = make_scheduler()
    add(scheduler, 5, index=0)
    assert run_step(scheduler) == [(0, 5, 0)]
    add(scheduler, 30, index=1)
    assert run_step(scheduler) == [(0, 4, 3), (1, 12, 0)]
    assert run_step(scheduler) == [(0, 4, 3), (1, 12, 0)]
    assert run_step(scheduler) == [(0, 4, 3), (1, 6, 0)]
    assert run_step(scheduler) == [(0, 4, 3), (1, 4, 3)]


def test_only_the_last_chunk_samples() -> None:
    scheduler = make_scheduler(budget=8)
    sequence = add(scheduler, 20)
    samples = []
    for _ in range(4):
        chosen = scheduler.schedule()
        samples.append(chosen[0].samples)
        sequence.num_computed += chosen[0].num_rows
        if samples[-1]:
            break
    assert samples == [False, False, True]


def test_drafts_stop_short_of_max_model_len() -> None:
    """With n tokens known, d drafts and one more token must not pass the limit."""
    scheduler = make_scheduler(max_len=10)
    add(scheduler, 5)
    steps = [run_step(scheduler)[0] for _ in range(4)]
    # 5 prompt, then 6, 7, 8, 9 tokens known: 3, 2, 1, 0 drafts fit.
    assert [drafts for _, _, drafts in steps] == [0, 3, 2, 1]


def test_prompts_that_cannot_be_served_fail_alone() -> None:
    scheduler = make_scheduler(max_len=10, num_blocks=3)
    too_long = add(scheduler, 10, index=0)
    too_big = add(scheduler, 8, index=1)
    fine = add(scheduler, 6, index=2)
    assert [s.request.index for s in scheduler.failed] == [0, 1]
    assert "max_model_len" in (too_long.error or "")
    assert "memory_gib" in (too_big.error or "")
    assert run_step(scheduler) == [(2, 6, 0)]
    assert fine.error is None


def test_lookahead_counts_when_a_window_has_to_fit() -> None:
    """Otherwise a request would wait for ever for a cache that can never take its first row."""
    for num_blocks, fits in ((3, False), (5, True)):
        scheduler = Scheduler(
            kv_cache([kv_group("sliding", (0,), 4, 4)], [num_blocks], 1, 80),
            max_num_seqs=1,
            max_num_batched_tokens=32,
            max_model_len=64,
            num_speculative_tokens=9,
            num_lookahead_tokens=8,
        )
        sequence = add(scheduler, 20)
        assert (sequence.finish_reason is None) == fits
        assert bool(scheduler.schedule()) == fits


def test_the_youngest_is_preempted_and_recomputed() -> None:
    scheduler = make_scheduler(num_blocks=6, budget=64)  # 20 tokens
    old, young = add(scheduler, 8, index=0), add(scheduler, 7, index=1)
    assert run_step(scheduler) == [(0, 8, 0), (1, 7, 0)]
    # 8 + 4 and 7 + 4 rows need 3 + 3 blocks of the 5.
    assert run_step(scheduler) == [(0, 4, 3)]
    assert scheduler.num_preempted == 1
    assert young.num_computed == 0
    assert young.slot == -1
    assert list(scheduler.waiting) == [young]
    assert scheduler.running == [old]
    scheduler.release(old)
    # Everything it had, the sampled token included, is read again; then it samples.
    assert run_step(scheduler) == [(1, 8, 0)]


def test_a_lone_request_uses_the_last_rows_of_the_cache_then_fails() -> None:
    scheduler = make_scheduler(num_blocks=3)  # 8 tokens
    sequence = add(scheduler, 5)
    run_step(scheduler)
    assert run_step(scheduler) == [(0, 3, 2)]
    assert run_step(scheduler, num_accepted=3) == [(0, 2, 1)]
    assert sequence.num_tokens == 9
    assert run_step(scheduler) == []
    assert sequence.finish_reason == "error"
    assert "full at 9 tokens" in (sequence.error or "")
    assert scheduler.kv.usage == 0.0
    assert not scheduler.running
    assert not scheduler.waiting


def test_segments_group_equal_decodes_and_keep_prefills_apart() -> None:
    scheduler = make_scheduler(budget=64)
    for index in range(3):
        add(scheduler, 4 + index, index=index)
    run_step(scheduler)
    add(scheduler, 9, index=3)
    plan = scheduler.plan(scheduler.schedule())
    assert [(s.num_requests, s.rows_per_request) for s in plan.segments] == [(3, 4), (1, 9)]
    assert [s.first_row for s in plan.segments] == [0, 12]
    assert plan.segments[0].max_seq_len == 6 + 4
    assert plan.samples.all()


def test_requests_wait_for_a_slot() -> None:
    scheduler = make_scheduler(max_num_seqs=2, budget=64)
    sequences = [add(scheduler, 4, index=index) for index in range(3)]
    assert [index for index, _, _ in run_step(scheduler)] == [0, 1]
    scheduler.release(sequences[0])
    assert [index for index, _, _ in run_step(scheduler)] == [1, 2]


def launch(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    """Schedule with the results of the last step still out; (index, computed, drafts) at most."""
    chosen = scheduler.schedule()
    scheduler.launched(chosen)
    return [(i.sequence.request.index, i.num_computed, i.num_drafts) for i in chosen]


def arrive(scheduler: Scheduler, item: Scheduled, num_accepted: int) -> None:
    """The result of `item` comes in."""
    sequence = item.sequence
    if item.samples:
        sequence.token_ids.extend([0] * (num_accepted + 1))
        sequence.decoding = True
    sequence.num_computed += item.num_rows - (item.num_drafts - num_accepted)
    scheduler.arrived(item)


def test_a_step_ahead_is_scheduled_on_the_upper_bound() -> None:
    """A prompt is known exactly; then each step may be K drafts further than the last result."""
    scheduler = make_scheduler(budget=8)
    sequence = add(scheduler, 10)
    assert launch(scheduler) == [(0, 0, 0)]
    chunk = sequence.in_flight
    assert launch(scheduler) == [(0, 8, 0)]
    assert sequence.in_flight is not None
    assert sequence.in_flight.samples
    last_chunk = sequence.in_flight
    assert chunk is not None
    arrive(scheduler, chunk, 0)
    assert launch(scheduler) == [(0, 10, 3)]  # the newest token is on the device
    first = sequence.in_flight
    arrive(scheduler, last_chunk, 0)
    assert launch(scheduler) == [(0, 14, 3)]
    assert first is not None
    arrive(scheduler, first, 1)
    assert (sequence.num_tokens, sequence.num_computed) == (13, 12)
    assert launch(scheduler) == [(0, 16, 3)]


def test_next_to_max_model_len_a_request_waits_for_its_result() -> None:
    """How many drafts fit depends on it, and the engine that waits knows."""
    scheduler = make_scheduler(max_len=14)
    sequence = add(scheduler, 5)
    launch(scheduler)
    prompt = sequence.in_flight
    assert launch(scheduler) == [(0, 5, 3)]
    assert prompt is not None
    arrive(scheduler, prompt, 0)
    decode = sequence.in_flight
    assert launch(scheduler) == [(0, 9, 3)]  # 10 tokens at most: 3 drafts and one more just fit
    assert decode is not None
    arrive(scheduler, decode, 3)
    decode = sequence.in_flight
    assert launch(scheduler) == []  # 11 to 14 tokens
    assert decode is not None
    arrive(scheduler, decode, 0)
    assert launch(scheduler) == [(0, 10, 2)]


def test_a_certain_end_is_waited_for() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, 5)
    sequence.request.sampling.max_tokens = 2
    assert launch(scheduler) == [(0, 0, 0)]
    prompt = sequence.in_flight
    assert launch(scheduler) == [(0, 5, 3)]
    assert prompt is not None
    arrive(scheduler, prompt, 0)
    assert launch(scheduler) == []


def test_no_request_is_preempted_for_a_guess() -> None:
    """In a full cache the older request first waits for its result, and newcomers wait too."""
    scheduler = make_scheduler(num_blocks=8, budget=64)  # 28 tokens
    old, young = add(scheduler, 8, index=0), add(scheduler, 8, index=1)
    launch(scheduler)
    prompts = [old.in_flight, young.in_flight]
    assert launch(scheduler) == [(0, 8, 3), (1, 8, 3)]  # 3 + 3 blocks of the 7
    flights = [old.in_flight, young.in_flight]
    for item in prompts:
        assert item is not None
        arrive(scheduler, item, 0)
    add(scheduler, 1, index=2)
    # Up to 12 + 4 rows each: the old one takes the last block, the young one would need another.
    assert launch(scheduler) == [(0, 12, 3)]
    assert scheduler.num_preempted == 0
    for item in flights:
        assert item is not None
        arrive(scheduler, item, 0)
    # The young one's numbers are in: 9 + 4 rows take a fourth block too, and there is none.
    assert launch(scheduler) == []
    assert scheduler.waiting[0] is young
    assert scheduler.take_num_preempted() == 1
    assert scheduler.take_num_preempted() == 0


def test_drafts_are_chosen_for_every_request_of_a_step() -> None:
    """With two stages and a full cache more than half of the running requests may be free at once:
    no request keeps the number of an earlier step."""
    k, slots = 4, 16
    costs = CostTable(
        batches=(1,), drafts=tuple(range(k + 1)), step_ms=((6.0, 6.1, 6.2, 6.3, 6.4),)
    )
    lengths = DraftLengths(range(k + 1), costs, slots, 2)
    scheduler = Scheduler(
        kv_cache([kv_group("full", (0,), 4)], [81], slots, 64 + k + 1),
        max_num_seqs=slots,
        max_num_batched_tokens=256,
        max_model_len=64,
        num_speculative_tokens=k,
        num_micro_batches=2,
        draft_lengths=lengths,
    )
    for index in range(40):
        add(scheduler, 16, index)
    lengths.follow([*[k] * 8, *[0] * 8])
    in_flight, sizes = deque[list[Scheduled]](), list[int]()
    for step in range(16):
        chosen = scheduler.schedule()
        if step > 8:
            assert not any(item.num_drafts for item in chosen)
        if chosen:
            scheduler.plan(chosen)
            scheduler.launched(chosen)
            in_flight.append(chosen)
            sizes.append(len(chosen))
        if len(in_flight) > bool(chosen):
            for item in in_flight.popleft():
                sequence = item.sequence
                sequence.token_ids.extend([7] * (item.num_drafts + 1))
                sequence.decoding = True
                sequence.num_computed += item.num_rows
                scheduler.arrived(item)
    assert max(sizes) > 4

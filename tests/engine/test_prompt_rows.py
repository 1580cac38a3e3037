"""How many prompt rows a step gets: decodes are not stalled, prompts end, stages are all busy."""

from __future__ import annotations

import random
from collections import deque

import pytest
import torch
from caches import kv_cache, kv_group

from hydraspec.engine.schedule.prompt_rows import LEAST_CHUNK, LEAST_PROMPT_ROWS, PromptRows
from hydraspec.engine.schedule.scheduler import Scheduler
from hydraspec.engine.schedule.sequence import Scheduled, Sequence
from hydraspec.graphs import mixed_row_sizes
from hydraspec.types import Request, SamplingParams

GRAPHS = tuple(mixed_row_sizes([1, 32], 1, 32, 8192, max_large_rows=2048))


def policy(**fields: object) -> PromptRows:
    return PromptRows(**{"max_rows": 8192, "graph_rows": GRAPHS, **fields})  # type: ignore[arg-type]


def test_the_sizes_are_those_of_graphs() -> None:
    assert GRAPHS[:3] == (32, 64, 96)
    assert GRAPHS[-1] == 2048


def test_nothing_is_held_back_where_nothing_decodes() -> None:
    assert policy().most(0, [400] * 100) == 8192


def test_nothing_is_held_back_without_large_graphs() -> None:
    """On a CPU, and where mixed steps are in pieces alone."""
    assert policy(graph_rows=()).most(31, [400] * 100) == 8192 - 31
    assert policy(graph_rows=(32, 256)).most(31, [400] * 100) == 8192 - 31


@pytest.mark.parametrize(
    ("num_decode_rows", "unread", "num_rows"),
    [
        pytest.param(31, [100], 131, id="a few rows: padding costs nothing"),
        pytest.param(31, [341], 384, id="padded to the next graph"),
        pytest.param(31, [365], 384, id="cut by 12 rows, where padding would take 52"),
        pytest.param(124, [2048], 640, id="a quarter of a long prompt, and a graph's size"),
        pytest.param(124, [1200], 512, id="few rows in all"),
        pytest.param(31, [300] * 30, 2048, id="many prompts: the largest graph"),
        pytest.param(1024, [3000], 1792, id="many decodes"),
        pytest.param(2000, [300], 2000 + LEAST_PROMPT_ROWS, id="no room left in any graph"),
        pytest.param(2100, [300], 2100 + LEAST_PROMPT_ROWS, id="more decodes than any graph has"),
    ],
)
def test_rows_of_a_step_that_decodes(
    num_decode_rows: int, unread: list[int], num_rows: int
) -> None:
    most = policy().most(num_decode_rows, unread)
    found = num_decode_rows + most
    if found in GRAPHS:
        assert found == num_rows
    else:
        assert num_decode_rows + min(most, sum(unread)) == num_rows


def test_a_chunk_is_cut_only_where_as_much_of_it_stays() -> None:
    """Decodes of 500 rows: at 512 a prompt of 60 would get on by 12 rows a step."""
    assert policy().most(500, [60]) == 640 - 500
    assert policy().most(490, [40]) == 512 - 490


def test_every_prompt_is_read_and_no_step_is_larger_than_a_graph() -> None:
    """Random loads: each step reads something, in at most the largest graph, and padding is below
    a quarter of a step; without decodes the whole budget is used."""
    rng = random.Random(5)
    for _ in range(300):
        decodes = rng.choice([1, 31, 124, 400, 1000])
        unread = [rng.randint(1, 3000) for _ in range(rng.randint(1, 20))]
        total, steps = sum(unread), 0
        while total:
            rows = min(policy().most(decodes, [total]), total)
            assert rows >= min(total, 10)
            step = decodes + rows
            assert step <= GRAPHS[-1]
            padding = min(size for size in GRAPHS if size >= step) - step
            assert padding <= 0.25 * step or step <= 256
            total, steps = total - rows, steps + 1
        assert steps <= 2 + sum(unread) / LEAST_PROMPT_ROWS


# --------------------------------------------------------------------------------- max_mixing_cost


def test_long_readings_take_as_many_rows_as_pay_for_the_decodes() -> None:
    """Decodes of 3 rows cost 170 + 3 + 915 / 3 rows, and with 30,000 tokens of one 305 more."""
    bounded = policy(launch_bound_rows=915, max_mixing_cost=0.1)
    assert bounded.most(3, [20000]) == 4780
    assert bounded.most(3, [20000], longest=30000) == 7830
    assert bounded.most(3, [4779]) == policy().most(3, [4779]), "too few are left"
    assert policy().most(3, [20000]) == 2045, "no bound"


def test_the_bound_never_passes_the_budget() -> None:
    bounded = policy(launch_bound_rows=915, max_mixing_cost=0.05)
    assert bounded.most(3, [8192], longest=30000) == 8192 - 3
    assert bounded.most(3, [8191], longest=30000) == 2045


def test_few_rows_that_pay_still_fill_a_graph() -> None:
    bounded = policy(launch_bound_rows=915, max_mixing_cost=1.0)
    assert bounded.most(31, [100]) == policy().most(31, [100])
    assert bounded.most(31, [1000]) == 512 - 31, "506 rows would pay"
    assert bounded.most(31, [1000], longest=30000) == 896 - 31, "811 rows would"


# ------------------------------------------------------------------------------------------- stages


def scheduler_of(num_micro_batches: int, max_num_batched_tokens: int) -> Scheduler:
    return Scheduler(
        kv_cache([kv_group("full", (0,), 64)], [1 + 64 * 260], 64, 16640, dtype=torch.float16),
        max_num_seqs=64,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=16600,
        num_speculative_tokens=0,
        num_micro_batches=num_micro_batches,
    )


def offer(scheduler: Scheduler, count: int, length: int) -> None:
    for index in range(count):
        request = Request(index=index, id=str(index), sampling=SamplingParams(max_tokens=4))
        scheduler.add(Sequence(request=request, token_ids=[0] * length, num_prompt=length))


def prompt_chunks(scheduler: Scheduler) -> list[int]:
    """Prompt rows of each step until all prompts are read, with as many steps in flight as there
    are micro batches."""
    flights: deque[list[Scheduled]] = deque()
    found = []
    for _ in range(200):
        scheduled = scheduler.schedule()
        if scheduled:
            scheduler.launched(scheduled)
            flights.append(scheduled)
            found.append(sum(item.num_rows for item in scheduled if item.is_prefill))
        if len(flights) >= scheduler.micro_batches.count or not scheduled:
            for item in flights.popleft():
                item.sequence.num_computed += item.num_rows
                if item.samples:
                    item.sequence.token_ids.append(0)
                    item.sequence.decoding = True
                scheduler.arrived(item)
        if all(s.decoding for s in scheduler.running) and not scheduler.waiting:
            return [rows for rows in found if rows]
    raise AssertionError("prompts are not read")


def busy_share(chunks: list[int], stages: int) -> float:
    """The part of the stages' time in which they work, where a chunk takes as long as its rows in
    each of the stages."""
    ends = [0.0] * stages
    for rows in chunks:
        at = 0.0
        for stage in range(stages):
            at = ends[stage] = max(at, ends[stage]) + rows
    return sum(chunks) / ends[-1]


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_get_chunks_enough_to_be_busy(stages: int) -> None:
    """64 prompts of 512 tokens, 16,384 rows a step allowed: two chunks keep two stages busy for two
    thirds of the time, which is 1.33 times one device's speed."""
    scheduler = scheduler_of(stages, 16384)
    offer(scheduler, 64, 512)
    chunks = prompt_chunks(scheduler)
    assert sum(chunks) == 64 * 512
    assert len(chunks) >= 4 * stages
    assert min(chunks[:-2]) >= LEAST_CHUNK, "only what is left of cut prompts is less"
    assert busy_share(chunks, stages) >= 0.84
    assert busy_share([16384, 16384], 2) == pytest.approx(2 / 3)


def test_one_device_and_one_prompt_are_not_cut() -> None:
    """A prompt's chunks do not overlap in the stages: more of them would only cost."""
    alone = scheduler_of(1, 16384)
    offer(alone, 64, 512)
    assert prompt_chunks(alone)[:2] == [16384, 16384 - 32], "decodes of the first chunk's prompts"
    staged = scheduler_of(2, 16384)
    offer(staged, 1, 16384)
    assert prompt_chunks(staged) == [16384]


def test_steps_that_are_small_already_stay_as_they_are() -> None:
    assert policy(max_rows=1024, num_micro_batches=2).most(0, [512] * 8) == 1024

"""One budget over groups: what requests need, then the prefix cache; messages say how much is
needed."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from caches import kv_cache, kv_group
from graph_runs import assert_same, cache_gib, graph_config, run_requests, zoo_requests
from many_ranks import over_ranks
from records import request

from hydraspec import factory
from hydraspec.config.schema import RunConfig
from hydraspec.engine.cache import sizing
from hydraspec.engine.cache.kv_budget import (
    SMALLEST,
    CacheSize,
    bytes_of,
    bytes_wanted,
    longest_request,
    plan_num_blocks,
)
from hydraspec.engine.native import NativeEngine
from hydraspec.errors import ConfigurationError
from hydraspec.parallel.layout import Layout
from hydraspec.parallel.ranks import current
from hydraspec.types import Completion

F32 = torch.float32
FULL = kv_group("full", (1,), 4, head_dim=8)
SLIDING = kv_group("sliding", (0, 2), 2, 13, heads=2, head_dim=4)
SPECS = [FULL, SLIDING]
SIZE = CacheSize(
    max_num_seqs=16, max_model_len=64, max_num_batched_tokens=8, num_speculative_tokens=3
)


def test_a_budget_is_never_exceeded_and_more_of_it_is_never_less_cache() -> None:
    unbounded = plan_num_blocks(SPECS, SIZE, F32, 1 << 40)
    assert unbounded[0] == 16 * 17 + 1  # ceil((64 + 4) / 4) blocks a request
    size, before = replace(SIZE, num_cached_seqs=math.inf), [0, 0]
    smallest = bytes_of(SPECS, [SMALLEST] * 2, F32)
    for budget in range(smallest, 4 * bytes_wanted(SPECS, SIZE, F32, 16), 997):
        blocks = plan_num_blocks(SPECS, size, F32, budget)
        assert bytes_of(SPECS, blocks, F32) <= budget
        assert min(blocks) >= SMALLEST
        assert longest_request(SPECS, blocks, SIZE) >= longest_request(SPECS, before, SIZE)
        before = blocks
        plain = plan_num_blocks(SPECS, SIZE, F32, budget)
        assert all(count <= most for count, most in zip(plain, unbounded, strict=True))
    assert plan_num_blocks(SPECS, SIZE, F32, smallest - 1) == [0, 0]


def test_below_one_request_the_length_shrinks_and_not_the_window() -> None:
    """A share of each group would leave less than a window, and no request longer than that."""
    one = bytes_wanted(SPECS, SIZE, F32, 1)
    blocks = plan_num_blocks(SPECS, SIZE, F32, int(0.9 * one))
    longest = longest_request(SPECS, blocks, SIZE)
    assert 48 <= longest < SIZE.max_model_len
    assert kv_cache(SPECS, blocks, 1, SIZE.max_tokens).can_ever_hold(longest)
    assert blocks[1] == SIZE.blocks_wanted(SLIDING, 1)


def test_what_is_left_keeps_requests_and_a_window_of_each_is_enough() -> None:
    wanted = plan_num_blocks(SPECS, SIZE, F32, 1 << 40)
    twice = plan_num_blocks(SPECS, replace(SIZE, num_cached_seqs=16), F32, 1 << 40)
    more = [count - least for count, least in zip(twice, wanted, strict=True)]
    assert more == [16 * 16, 16 * 7]  # ceil(64 / 4) and ceil((13 - 1 + 2) / 2)
    budget = bytes_of(SPECS, wanted, F32) + bytes_of(SPECS, more, F32) * 5 // 2
    size = replace(SIZE, num_cached_seqs=math.inf)
    assert plan_num_blocks(SPECS, size, F32, budget) == [
        count + part * 5 // 2 for count, part in zip(wanted, more, strict=True)
    ]


def test_sliding_pool_does_not_grow_with_the_length() -> None:
    short, long = (replace(SIZE, max_model_len=length) for length in (1_000, 100_000))
    assert short.blocks_wanted(SLIDING, 4) == long.blocks_wanted(SLIDING, 4)
    assert short.blocks_cached(SLIDING) == long.blocks_cached(SLIDING)


# ---------------------------------------------------------------- block sizes of groups


@pytest.mark.parametrize(
    "method", [pytest.param("gemma4_mtp", marks=pytest.mark.slow), "eagle3 on gemma4"]
)
def test_groups_with_other_block_sizes_give_the_same_tokens_and_drafts(method: str) -> None:
    """32 rows beside 4: a group that read with another one's size would read other tokens."""
    config = graph_config(method, "none")
    wanted = run_requests(factory.build_engine(config), zoo_requests(2, longest=8))
    config = copy.deepcopy(config)
    config.engine.kv_cache.block_sizes = {"sliding": 4, "full": 32}
    if method != "gemma4_mtp":
        config.engine.kv_cache.block_sizes["draft_full"] = 8
    engine = factory.build_engine(config)
    assert isinstance(engine, NativeEngine)
    found = {spec.name: spec.block_size for spec in engine.parts.runner.kv.specs}
    assert found == config.engine.kv_cache.block_sizes
    assert_same(run_requests(engine, zoo_requests(2, longest=8)), wanted)
    without = engine.baseline()
    assert [spec.block_size for spec in without.parts.runner.kv.specs] == [4, 32]
    assert run_requests(without, zoo_requests(2, longest=8)).tokens == wanted.tokens


def test_a_group_that_there_is_not_is_refused_with_those_there_are() -> None:
    config = graph_config("eagle3 on gemma4", "none")
    config.engine.kv_cache.block_sizes = {"draft": 8}
    with pytest.raises(
        ConfigurationError, match=r"block_sizes\.draft=8 .*\n.* sliding, full, draft"
    ):
        factory.build_engine(config)


# ---------------------------------------------------------------- too small


def test_a_budget_without_a_block_of_each_group_is_refused_with_what_is_needed() -> None:
    config = graph_config("gemma4_mtp", "none")
    config.engine.kv_cache.memory_gib = 1e-5
    with pytest.raises(ConfigurationError) as refused:
        factory.build_engine(config)
    first, allowed, _ = str(refused.value).splitlines()
    assert first.startswith("engine.kv_cache.memory_gib=1e-05 ")
    assert "(sliding of 16 tokens, full of 16 tokens)" in first
    least, whole = (float(part) for part in allowed.split() if part[0].isdigit() and "." in part)
    assert "one request of max_model_len=128" in allowed
    config.engine.kv_cache.memory_gib = least
    factory.build_engine(config)
    config.engine.kv_cache.memory_gib = whole
    engine = factory.build_engine(config)
    assert not engine.info.warnings


def test_a_cache_below_one_full_request_warns_and_longer_requests_fail_alone() -> None:
    config = graph_config("gemma4_mtp", "none")
    config.engine.kv_cache.memory_gib = 0.6 * cache_gib(config) / 5
    engine = factory.build_engine(config)
    (warning,) = engine.info.warnings
    longest = int(warning.split("one request of ")[1].split()[0])
    assert 16 < longest < 128
    assert "max_model_len=128 takes 0." in warning
    # Request: tokens of its prompt, the most of its answer, the turn before.
    sizes = {
        0: (longest - 4, 4, None),  # read in chunks, as are the next two
        1: (127, 4, None),
        2: (longest - 4, 60, None),  # its answer does not fit
        3: (8, 4, None),
        4: (longest, 4, 3),  # what came before makes it too long
        5: (4, 4, 4),
    }
    requests = [
        request(
            index,
            prompt_token_ids=[5 + (i + index) % 40 for i in range(length)],
            after=after,
            max_tokens=most,
            ignore_eos=True,
        )
        for index, (length, most, after) in sizes.items()
    ]
    ended = {
        event.index: event
        for event in engine.run(requests, concurrency=None)
        if isinstance(event, Completion)
    }
    errors = {index: event.error for index, event in ended.items() if event.error}
    assert set(errors) == {1, 2, 4, 5}
    assert {ended[index].finish_reason for index in (0, 3)} == {"length"}
    start = "the prompt has 127 tokens, more than the KV cache can hold ("
    assert errors[1].startswith(start)
    assert longest <= int(errors[1].removeprefix(start).split(")")[0]) < 127
    assert "the KV cache is full at" in errors[2]
    assert ended[2].output_token_ids
    assert f"the prompt has {8 + 4 + longest} tokens" in errors[4]
    assert "not sent" in errors[5]
    wanted = run_requests(
        factory.build_engine(graph_config("gemma4_mtp", "none")), [requests[0], requests[3]]
    )
    assert wanted.tokens == [ended[index].output_token_ids for index in (0, 3)]


def test_memory_fraction_is_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    config = graph_config("none", "none")
    monkeypatch.setattr(sizing, "_available_bytes", lambda: 40 << 20)
    for share, expected in ((None, 20 << 20), (0.25, 10 << 20)):
        config.engine.kv_cache.memory_fraction = share
        cpu = torch.device("cpu")
        assert sizing._cache_budget_bytes(config, cpu, 0) == expected
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 << 20, 200 << 20))
    for share, expected in ((None, 85 << 20), (0.25, 25 << 20)):
        config.engine.kv_cache.memory_fraction = share
        found = sizing._cache_budget_bytes(config, torch.device("cuda"), 3 << 20)
        assert found == expected - (3 << 20)


def test_every_rank_refuses_where_one_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would wait for it with a cache, and the message is the same on all."""
    budget = sizing._cache_budget_bytes
    config: RunConfig = graph_config("none", "none")

    def of_rank(*args: object) -> int:
        return 1000 if current().rank == 1 else budget(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(sizing, "_cache_budget_bytes", of_rank)
    with pytest.raises(ConfigurationError, match=r"gives the KV cache 9\.31e-07 GiB"):
        over_ranks(Layout(data=2), config, lambda engine: None)

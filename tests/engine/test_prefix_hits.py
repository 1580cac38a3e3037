"""Requests that begin with cached blocks: tokens, drafts and accepted counts are those of a run
without a prefix cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fuzz_engines import build
from fuzz_prefixes import (
    Hits,
    cut_at_every_block,
    plain_case,
    run_prefix_case,
    run_prefix_cases,
    text_of,
)
from fuzz_stages import PAIRS, Pair
from side_by_side import run_alone
from step_ahead import Watch

from hydraspec.engine.cache.kv_group import KVGroup
from hydraspec.speculators.base import BaseSpeculator

NUM_SHARDS, SHARD = 5, 72  # 360 cases
QUICK = (
    Pair("random sliding", "gemma4_mtp", "assistant"),
    Pair("random eagle3 on qwen3", "eagle3", "drafter"),
    Pair("random peagle on gemma4", "peagle", "drafter"),
    Pair("random deepseek", "mtp"),
    Pair("random dflash on qwen3", "dflash", "drafter"),
)
BLOCK = 4
ROOM = 64  # sizes the cache: nothing is evicted


def name(pair: Pair) -> str:
    return f"{pair.stage}-{pair.method}".replace(" ", "_")


def test_a_few_runs_with_hits() -> None:
    hits = run_prefix_cases(range(3), QUICK[3:], ("plain",))
    assert hits.num_hits >= 3
    assert hits.num_accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_runs_with_hits(shard: int) -> None:
    hits = run_prefix_cases(range(100 + shard * SHARD, 100 + (shard + 1) * SHARD), PAIRS)
    assert hits.num_with_hits >= 60  # 300 in all shards
    assert hits.num_hits > 0.3 * hits.num_requests
    assert hits.num_at_the_end > 50
    assert hits.num_chunked > 20
    assert hits.num_sampled > 20
    assert hits.num_preempted > 3
    assert hits.num_resumed > 0
    assert hits.num_late > 5
    assert len(hits.near_ties) < 0.02 * hits.num_requests


# ------------------------------------------------------------------ where a hit ends


def hit_at_every_block(pair: Pair, num_shared: int, length: int) -> tuple[list[int], Watch]:
    """Where the prompts' hits end, and what the run saw; everything else is as in a cold run."""
    requests = cut_at_every_block(text_of(pair, length), BLOCK, num_shared)
    case = plain_case(pair, requests, block_size=BLOCK, max_num_seqs=ROOM)
    hits = Hits()
    run_prefix_case(case, hits)
    seen = run_alone(build(case), requests, 1)
    return [seen.completions[i].num_cached_tokens for i in range(1, len(requests))], seen


@pytest.mark.parametrize("pair", [QUICK[1], QUICK[3]], ids=name)
def test_a_hit_may_end_at_any_block(pair: Pair) -> None:
    """What an EAGLE-type drafter needs of position n-1 after a hit of n tokens is in its cached row
    n-1, whose key has token n: no state of the target is computed again."""
    ends, seen = hit_at_every_block(pair, num_shared=1, length=40)
    assert ends == [BLOCK * (i + 1) for i in range(len(ends))]
    assert len(ends) == 9
    assert all(starts_after_hit(seen, i + 1) == end for i, end in enumerate(ends))


def starts_after_hit(seen: Watch, index: int) -> int:
    """The first row that a request computed."""
    parts = [part for record in seen.records for part in record.requests if part.index == index]
    return parts[0].num_computed_tokens


@pytest.mark.slow
@pytest.mark.parametrize("num_shared", range(BLOCK))
@pytest.mark.parametrize("pair", PAIRS, ids=name)
def test_every_drafter_after_hits_that_end_at_any_block(pair: Pair, num_shared: int) -> None:
    """Prompts that part at the end of a block lose one block of draft KV, and no more, if a row of
    it reads the next token; block drafters keep features of a row's own position."""
    ends, _ = hit_at_every_block(pair, num_shared, length=100)
    reads_next = pair.method in ("eagle", "eagle3", "mtp", "peagle")
    lost = BLOCK if reads_next and not num_shared else 0
    assert ends == [BLOCK * (i + 1) - lost for i in range(len(ends))]


# ------------------------------------------------------------------ planted bugs


def without_the_next_token(patch: pytest.MonkeyPatch) -> None:
    """The key of a block of draft KV lacks the token after it: stale KV is found."""
    patch.setattr(BaseSpeculator, "num_following_tokens", 0)


def a_window_one_short(patch: pytest.MonkeyPatch) -> None:
    """Hits in a sliding group lack the oldest block of the window."""
    whole = KVGroup.num_window_blocks.fget  # type: ignore[attr-defined]
    assert whole is not None

    def short(self: KVGroup) -> int | None:
        found = whole(self)
        return None if found is None else max(1, found - 1)

    patch.setattr(KVGroup, "num_window_blocks", property(short))


@pytest.mark.parametrize(
    ("plant", "pair", "num_shared"),
    [
        (without_the_next_token, QUICK[1], 0),
        (without_the_next_token, QUICK[3], 0),
        (a_window_one_short, QUICK[0], 1),
    ],
)
def test_planted_bugs_show(
    plant: Callable[[pytest.MonkeyPatch], None],
    pair: Pair,
    num_shared: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In KV, in tokens or in what is accepted: the comparison above would be blind otherwise."""
    requests = cut_at_every_block(text_of(pair, 40), BLOCK, num_shared)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run_prefix_case(plain_case(pair, requests, block_size=BLOCK, max_num_seqs=ROOM), Hits())

"""Paged attention on the CPU against its reference, where an off-by-one would show."""

from dataclasses import dataclass

import pytest
import torch
from hydraspec_kernels.attention import (
    GroupShape,
    RowSegment,
    paged_attention,
    plan,
    plan_attention,
)
from hydraspec_kernels.attention.reference import paged_attention_reference
from torch import Tensor

# float64 on both sides: only the order of summation differs.
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Case:
    """Rows and sequence lengths per request, grouped by equal rows."""

    rows: tuple[int, ...]
    lens: tuple[int, ...]
    window: int | None = None
    block_size: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    slack: int = 0  # max_seq_len above the actual one
    scale: float = 1.0


CASES = {
    "decode, one request": Case((1,), (9,)),
    "decode, first token of a request": Case((1, 1), (1, 17)),
    "decode on a block border": Case((1, 1, 1), (4, 8, 5)),
    "verify rows": Case((4, 4), (12, 7)),
    "prefill of everything": Case((7,), (7,)),
    "prefill beside decode": Case((1, 1, 5), (3, 14, 9)),
    "three row counts": Case((1, 3, 6), (11, 3, 20)),
    "window larger than the sequence": Case((1, 1), (3, 5), window=16),
    "window as long as the sequence": Case((2,), (8,), window=8),
    "window shorter, decode": Case((1, 1), (30, 9), window=5),
    "window shorter, verify rows over the border": Case((4, 4), (30, 6), window=5),
    "window shorter than the rows": Case((9,), (12,), window=3),
    "window of one": Case((3,), (10,), window=1),
    "upper bound beyond the block table": Case((1, 1), (9, 5), slack=40),
    "upper bound beyond the block table, window": Case((2, 2), (9, 5), window=4, slack=40),
    "one KV head": Case((1, 1, 3), (6, 11, 9), kv_heads=1),
    "a KV head per query head": Case((3, 3), (6, 11), kv_heads=4),
    "blocks of one": Case((2, 2), (6, 11), block_size=1),
    "wide heads": Case((2, 2), (6, 11), head_dim=512, heads=2, kv_heads=1),
    "scaled scores": Case((1, 3), (6, 11), scale=3.0),
}


def build(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, tuple[RowSegment, ...]]:
    """A NaN-poisoned cache in which only the entries of the requests hold numbers."""
    draw = torch.Generator().manual_seed(7)
    per_request = -(-max(case.lens) // case.block_size)
    blocks = len(case.rows) * per_request
    table = torch.randperm(blocks, generator=draw).view(len(case.rows), per_request) + 1
    shape = ((blocks + 1) * case.block_size, 2, case.kv_heads, case.head_dim)
    cache = torch.full(shape, torch.nan, dtype=torch.float64)
    cache[: case.block_size] = 0
    for request, length in enumerate(case.lens):
        first = 0
        if case.window is not None:  # what no row can see was freed
            first = max(0, length - case.rows[request] - case.window + 1)
        j = torch.arange(first, length)
        slots = table[request, j // case.block_size] * case.block_size + j % case.block_size
        cache[slots] = torch.randn(len(j), *shape[1:], dtype=torch.float64, generator=draw)
        table[request, : first // case.block_size] = 0
    rows = sum(case.rows)
    query = (
        torch.randn(rows, case.heads, case.head_dim, dtype=torch.float64, generator=draw)
        * case.head_dim**-0.5
    )
    positions = torch.cat(
        [torch.arange(n - r, n) for r, n in zip(case.rows, case.lens, strict=True)]
    )
    segments, row, request = [], 0, 0
    for count in sorted(set(case.rows)):
        num = case.rows.count(count)
        longest = max(case.lens[request : request + num]) + case.slack
        segments.append(RowSegment(row, request, num, count, longest))
        row, request = row + num * count, request + num
    return query, cache, table, torch.tensor(case.lens), positions, tuple(segments)


def check(case: Case) -> None:
    query, cache, table, lens, positions, segments = build(case)
    shape = GroupShape(
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        block_size=case.block_size,
        window=case.window,
        scale=case.scale,
    )
    made = plan_attention(shape, segments, table, lens, positions, query.dtype)
    out = paged_attention(query, cache, made)
    request_of_row = torch.repeat_interleave(torch.arange(len(case.rows)), torch.tensor(case.rows))
    expected = paged_attention_reference(
        query, cache, table, positions, request_of_row, case.block_size, case.window, case.scale
    )
    assert (out - expected.flatten(1)).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_matches_the_definition(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize("window", [None, 5])
def test_long_prefills_are_cut_into_tiles(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MAX_TILE_SCORES", 600)
    case = Case((1, 23, 23), (9, 23, 40), window=window)
    query, _, table, lens, positions, segments = build(case)
    shape = GroupShape(num_heads=4, num_kv_heads=2, head_dim=32, block_size=4, window=window)
    made = plan_attention(shape, segments, table, lens, positions, query.dtype)
    assert len(made.tiles) > 4
    assert max(tile.mask.numel() for tile in made.tiles) <= 1200  # rows are not cut below one
    check(case)


def test_a_window_is_all_that_is_gathered() -> None:
    case = Case((4, 4), (200, 100), window=8)
    query, _, table, lens, positions, segments = build(case)
    shape = GroupShape(num_heads=4, num_kv_heads=2, head_dim=32, block_size=4, window=8)
    (tile,) = plan_attention(shape, segments, table, lens, positions, query.dtype).tiles
    assert tile.num_keys == 8 + 4 - 1

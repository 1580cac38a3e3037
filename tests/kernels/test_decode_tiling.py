"""Which plans the fused decode kernel takes, and its division of the work, from host numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hydraspec_kernels.attention import GroupShape, counters, tiling
from hydraspec_kernels.attention.plan import DevicePlan
from hydraspec_kernels.quantised import Rounding


@pytest.mark.parametrize(
    ("rows", "head_dim", "group", "supported"),
    [(1, 512, 8, True), (4, 512, 8, True), (16, 512, 8, False), (17, 16, 1, False)],
)
def test_what_is_supported(rows: int, head_dim: int, group: int, supported: bool) -> None:
    shape = GroupShape(
        num_heads=group, num_kv_heads=1, head_dim=head_dim, block_size=16, window=None
    )
    assert tiling.supports_decode(shape, rows) is supported
    assert tiling.supports_decode(replace(shape, mask="block"), rows) is supported


@pytest.mark.parametrize(
    ("requests", "rows", "head_dim", "taken"),
    [
        (1, 1, 256, True),
        (133, 4, 256, True),
        (8, 17, 256, False),
        (133, 8, 256, True),  # two share a multiprocessor
        (132, 16, 256, True),
        (133, 16, 256, False),
        (133, 16, 128, True),
        (132, 4, 512, True),
        (133, 4, 512, False),
    ],
)
def test_which_plans_are_taken(requests: int, rows: int, head_dim: int, taken: bool) -> None:
    shape = GroupShape(num_heads=8, num_kv_heads=2, head_dim=head_dim, block_size=16, window=512)
    lens = torch.ones(requests, dtype=torch.int64)
    plan = DevicePlan(shape, lens, lens, lens[:, None], requests * rows, requests, rows)
    assert tiling.fits_decode(plan) is taken


@pytest.mark.parametrize("requests", [1, 2, 7, 33, 66, 67, 200, 600])
def test_splits_fill_the_device_once_and_counters_suffice(requests: int) -> None:
    shape = GroupShape(num_heads=8, num_kv_heads=2, head_dim=256, block_size=16, window=512)
    cut = tiling.decode_tiling(shape, 4, requests, torch.bfloat16, max_keys=1 << 20)
    splits = cut.splits
    assert splits == 1 or 2 * requests * splits <= tiling.FULL_DEVICE
    assert splits == tiling.MAX_SPLITS or 4 * requests * splits > tiling.FULL_DEVICE
    assert splits == 1 or 2 * requests <= counters.COUNTERS


@pytest.mark.parametrize(
    ("max_keys", "window", "splits"),
    [(4096, None, 16), (8191, None, 16), (8192, None, 32), (32_768, None, 64), (32_768, 512, 16)],
)
def test_long_sequences_have_more_splits(max_keys: int, window: int | None, splits: int) -> None:
    shape = GroupShape(num_heads=8, num_kv_heads=2, head_dim=512, block_size=16, window=window)
    cut = tiling.decode_tiling(shape, 1, 1, torch.bfloat16, max_keys=max_keys)
    assert cut.splits == splits


@pytest.mark.parametrize(
    ("requests", "rows", "head_dim", "at_once"),
    [
        (8, 4, 256, 1),
        (16, 4, 256, 1),
        (24, 4, 256, 3),
        (32, 4, 256, 4),
        (48, 4, 256, 3),
        (32, 8, 256, 1),
        (48, 8, 256, 3),
        (8, 16, 256, 1),
        (16, 16, 256, 2),
        (24, 16, 256, 1),
        (32, 16, 256, 2),
        (32, 4, 512, 1),
    ],
)
def test_programs_share_a_multiprocessor_where_few_places_stay_empty(
    requests: int, rows: int, head_dim: int, at_once: int
) -> None:
    shape = GroupShape(num_heads=32, num_kv_heads=16, head_dim=head_dim, block_size=16, window=1024)
    cut = tiling.decode_tiling(shape, rows, requests, torch.bfloat16, max_keys=4096)
    assert cut.splits == 1
    assert cut.transposed is (at_once == 4)
    # Small ones that do not leave room for three: in turn, with few warps each.
    is_many = rows <= 8 and requests * 16 > 2 * tiling.FULL_DEVICE
    assert (cut.num_warps == 4) is (at_once > 1 or head_dim == 512 or is_many)
    if at_once == 2:
        assert (cut.block_m, cut.block_n, cut.num_stages) == (32, 64, 2)


@pytest.mark.parametrize(
    ("requests", "rows", "max_keys", "tile", "splits"),
    [
        (1, 8, 4096, (16, 128), 8),
        (8, 16, 4096 + 32, (32, 128), 1),  # a table has room for drafts beyond the last token
        (8, 8, 4096, (16, 128), 1),
        (1, 16, 4096, (16, 128), 4),
        (8, 16, 4096, (32, 128), 1),
        (16, 16, 4096, (64, 64), 1),
        (32, 8, 4096, (32, 64), 1),
        # Keys that do not stay in the L2 are read by fewer programs, with more splits.
        (1, 8, 32_768, (16, 128), 8),
        (8, 8, 32_768, (32, 128), 2),
        (1, 16, 32_768, (32, 128), 8),
        (4, 16, 32_768, (64, 64), 8),
        (8, 16, 32_768, (64, 64), 4),
    ],
)
def test_tiles_of_narrow_heads_fill_the_device(
    requests: int, rows: int, max_keys: int, tile: tuple[int, int], splits: int
) -> None:
    shape = GroupShape(num_heads=32, num_kv_heads=8, head_dim=128, block_size=16, window=None)
    cut = tiling.decode_tiling(shape, rows, requests, torch.bfloat16, max_keys=max_keys)
    assert ((cut.block_m, cut.block_n), cut.splits) == (tile, splits)
    stage = 2 * 2 * cut.block_n * shape.head_dim  # keys and values in half precision
    queries = 2 * 2 * cut.block_m * shape.head_dim  # and scores
    assert (cut.num_stages - 1) * stage + queries <= tiling.NARROW_HEADS_BYTES
    in_window = tiling.decode_tiling(
        replace(shape, window=1024), rows, requests, torch.bfloat16, max_keys=max_keys
    )
    short = tiling.decode_tiling(shape, rows, requests, torch.bfloat16, max_keys=4096)
    assert in_window == short


@pytest.mark.parametrize(("rows", "tile"), [(8, (32, 64)), (16, (64, 32))])
def test_tiles_of_narrow_heads_fit_a_smaller_shared_memory(
    rows: int, tile: tuple[int, int]
) -> None:
    shape = GroupShape(num_heads=32, num_kv_heads=8, head_dim=128, block_size=16, window=None)
    cut = tiling.decode_tiling(shape, rows, 8, torch.bfloat16, max_keys=4096, room=99 << 10)
    assert (cut.block_m, cut.block_n) == tile


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "head_dim", "max_keys", "in_one"),
    [
        (16, 32, 8, 128, 32_768, True),
        (16, 32, 16, 256, 4096, True),
        (4, 8, 2, 256, 4096, True),
        (1, 32, 4, 512, 4096, True),
        (4, 8, 2, 512, 4096, False),  # a warp would have 2048 results
        (1, 8, 2, 512, 32_768, False),  # of 64 splits
    ],
)
def test_one_program_adds_up_what_its_warps_hold(
    rows: int, heads: int, kv_heads: int, head_dim: int, max_keys: int, in_one: bool
) -> None:
    shape = GroupShape(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, block_size=16, window=None
    )
    cut = tiling.decode_tiling(shape, rows, 1, torch.bfloat16, max_keys=max_keys)
    assert cut.splits > 1
    assert cut.adds_apart is not in_one


def test_what_does_not_fit_is_rounded_by_the_product() -> None:
    shape = GroupShape(num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, window=None)
    blocks = Rounding("group", 128)
    for head_dim, rows, rounding, fits in (
        (256, 8, blocks, True),
        (512, 128, blocks, True),
        (128, 8, blocks, False),  # a group has numbers of both halves
        (384, 8, blocks, False),
        (256, 129, blocks, False),
        (256, 8, Rounding("token"), False),
    ):
        found = tiling.fits_rounding(replace(shape, head_dim=head_dim), rows, rounding)
        assert found is fits, (head_dim, rows, rounding)

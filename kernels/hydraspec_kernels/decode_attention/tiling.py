"""How the fused kernel's work is cut. Knows nothing of Triton."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hydraspec_kernels.paged_attention.plan import DevicePlan, GroupShape
from hydraspec_kernels.paged_attention.tiling import Tiling, next_power_of_2

MOST_ROWS = 16  # of a request
# Numbers of a tile of queries at most: its norm and rotation are held in registers at once.
MOST_QUERY_NUMBERS = 32 * 512
MAX_SPLITS = 16
LEAST_SHARE = 128 * 256  # numbers of keys that are worth a split
# Results of a tile that one program adds up at once; more are worth a kernel of their own.
MOST_ADDED = 2048
# Programs that fill the device; a constant, so that sums have the same order on all devices.
FULL_DEVICE = 132
# Columns of queries, and width of a head, of which four programs fit on a multiprocessor.
TURNED_QUERIES, TURNED_WIDTH = 8, 256


@dataclass(frozen=True, slots=True)
class DecodeTiling(Tiling):
    """How a launch of the fused kernel is cut."""

    turned: bool = False  # queries are columns, not rows
    adds_apart: bool = False  # splits, if any, are added up by a kernel of their own
    # Bytes in half precision that a program brings into the L2 while the kernel in front runs;
    # those of all programs fit there several times.
    prefetched: int = 64 << 10


def fits(plan: DevicePlan) -> bool:
    """Whether the fused kernel is the faster one for a plan.

    Of few programs each would have many splits. Many programs must be small: several on a
    multiprocessor, so that some read keys while others do their norms.
    """
    shape = plan.shape
    if not supports(shape, plan.max_rows):
        return False
    programs = _programs(shape, plan.max_rows, plan.num_requests)
    if programs > 2 * FULL_DEVICE:
        return _turns(shape, plan.max_rows, programs)
    return programs * MAX_SPLITS >= FULL_DEVICE


def supports(shape: GroupShape, max_rows: int) -> bool:
    """Whether there is a fused kernel: few rows a request, keys and values apart."""
    if shape.latent_dim is not None or max_rows > MOST_ROWS or shape.head_dim % 2:
        return False
    numbers = block_queries(shape, max_rows) * next_power_of_2(shape.head_dim)
    return numbers <= MOST_QUERY_NUMBERS


def queries_of(shape: GroupShape, max_rows: int) -> int:
    """Queries of a request and KV head."""
    return max_rows * shape.num_heads // shape.num_kv_heads


def block_queries(shape: GroupShape, max_rows: int) -> int:
    """Queries of a program whose queries are rows."""
    return max(16, min(64, next_power_of_2(queries_of(shape, max_rows))))


def program_queries(shape: GroupShape, max_rows: int, block_m: int) -> int:
    """Queries that are normed and rotated: fewer than block_m where they are few, and repeated
    then. Of wide heads the repeated ones would take too many registers.
    """
    if shape.head_dim > 256:
        return block_m
    return min(block_m, next_power_of_2(queries_of(shape, max_rows)))


def least_share(shape: GroupShape, cut: Tiling) -> int:
    """Keys of a split at least: with few, adding up takes longer than it saves."""
    return max(cut.block_n, LEAST_SHARE // next_power_of_2(shape.head_dim))


def _programs(shape: GroupShape, max_rows: int, num_requests: int) -> int:
    """Programs without splits."""
    tiles = -(-queries_of(shape, max_rows) // block_queries(shape, max_rows))
    return num_requests * shape.num_kv_heads * tiles


def _turns(shape: GroupShape, max_rows: int, programs: int) -> bool:
    """Whether programs are so many, and so small, that several share a multiprocessor."""
    small = shape.head_dim <= TURNED_WIDTH and queries_of(shape, max_rows) <= TURNED_QUERIES
    return small and programs > FULL_DEVICE


def decode_tiling(
    shape: GroupShape, max_rows: int, num_requests: int, dtype: torch.dtype
) -> DecodeTiling:
    """A function of what the host knows; sequence lengths are not among it."""
    width, exact = next_power_of_2(shape.head_dim), dtype is torch.float32
    programs = _programs(shape, max_rows, num_requests)
    if _turns(shape, max_rows, programs):
        if exact:
            return DecodeTiling(TURNED_QUERIES, 16, 4, 1, turned=True, adds_apart=True)
        keys = max(16, min(64, 4096 // width))
        return DecodeTiling(
            TURNED_QUERIES, keys, 4, 4, turned=True, adds_apart=True, prefetched=32 << 10
        )
    block_m, queries = block_queries(shape, max_rows), queries_of(shape, max_rows)
    if exact:  # without tensor cores operands are in registers, too
        block_m = 16
        programs = num_requests * shape.num_kv_heads * -(-queries // block_m)
        cut = DecodeTiling(16, 16, 8 if width > 256 else 4, 1)
    elif block_m > 32:
        cut = DecodeTiling(block_m, 32, 8, 3)
    else:
        cut = DecodeTiling(block_m, 32 if width > 256 else 64, 4 if width > 256 else 8, 3)
    wanted = max(1, min(FULL_DEVICE // programs, MAX_SPLITS))
    adds_apart = min(queries, block_m) * shape.head_dim > MOST_ADDED
    return replace(cut, splits=1 << (wanted.bit_length() - 1), adds_apart=adds_apart)

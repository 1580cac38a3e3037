"""How the fused kernel's work is cut. Knows nothing of Triton."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hydraspec_kernels.attention.paged.plan import DevicePlan, GroupShape
from hydraspec_kernels.attention.paged.tiling import Tiling, next_power_of_2

MOST_ROWS = 16  # of a request
# Numbers of a tile of queries at most: its norm and rotation are held in registers at once.
MOST_QUERY_NUMBERS = 32 * 512
MAX_SPLITS = 16
LEAST_SHARE = 128 * 256  # numbers of keys that are worth a split
# Results of a tile, and splits, that one program adds up; more are worth a kernel of their own.
MOST_ADDED, MOST_ADDED_SPLITS = 2048, 8
# Programs that fill the device; a constant, so that sums have the same order on all devices.
FULL_DEVICE = 132
# Programs that share a multiprocessor, and what part of the memory's bandwidth they reach.
REACHED = {1: 0.8, 3: 0.93, 4: 0.93}
SMALL_QUERIES, SMALL_WIDTH = 16, 256  # of which three can
TURNED_QUERIES = 8  # columns of queries, of which four can


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

    Many programs that fill a multiprocessor each would all do their norms while no key is read.
    """
    shape = plan.shape
    if not supports(shape, plan.max_rows):
        return False
    programs = _programs(shape, plan.max_rows, plan.num_requests)
    return programs <= 2 * FULL_DEVICE or _small(shape, plan.max_rows)


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


def _small(shape: GroupShape, max_rows: int) -> bool:
    """Whether several programs can share a multiprocessor."""
    return shape.head_dim <= SMALL_WIDTH and queries_of(shape, max_rows) <= SMALL_QUERIES


def _at_once(shape: GroupShape, max_rows: int, programs: int) -> int:
    """How many programs share a multiprocessor: what leaves few of their places empty in the last
    of the rounds that it takes.
    """
    if programs <= FULL_DEVICE or not _small(shape, max_rows):
        return 1

    def reached(at_once: int) -> float:
        places = at_once * FULL_DEVICE
        return REACHED[at_once] * programs / (-(-programs // places) * places)

    most = 4 if queries_of(shape, max_rows) <= TURNED_QUERIES else 3
    return max((n for n in REACHED if n <= most), key=reached)


def decode_tiling(
    shape: GroupShape, max_rows: int, num_requests: int, dtype: torch.dtype
) -> DecodeTiling:
    """A function of what the host knows; sequence lengths are not among it."""
    width, exact = next_power_of_2(shape.head_dim), dtype is torch.float32
    block_m, queries = block_queries(shape, max_rows), queries_of(shape, max_rows)
    programs = _programs(shape, max_rows, num_requests)
    at_once = _at_once(shape, max_rows, programs)
    if at_once == 4:
        keys = 16 if exact else max(16, min(64, 4096 // width))
        cut = DecodeTiling(TURNED_QUERIES, keys, 4, 1 if exact else 4, turned=True)
        return replace(cut, adds_apart=True, prefetched=32 << 10)
    if exact:  # without tensor cores operands are in registers, too
        block_m = 16
        programs = num_requests * shape.num_kv_heads * -(-queries // block_m)
        cut = DecodeTiling(16, 16, 8 if width > 256 else 4, 1)
    elif at_once == 3:
        cut = DecodeTiling(block_m, max(32, min(64, 8192 // width)), 4, 3)
    elif block_m > 32:
        cut = DecodeTiling(block_m, 32, 8, 3)
    else:
        cut = DecodeTiling(block_m, 32 if width > 256 else 64, 4 if width > 256 else 8, 3)
    wanted = max(1, min(FULL_DEVICE // programs, MAX_SPLITS))
    splits = 1 << (wanted.bit_length() - 1)
    much = min(queries, block_m) * shape.head_dim > MOST_ADDED or splits > MOST_ADDED_SPLITS
    return replace(cut, splits=splits, adds_apart=much)

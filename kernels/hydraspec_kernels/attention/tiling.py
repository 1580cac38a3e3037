"""Choice of the kernel for an attention plan, and division of its work, without importing Triton.

Every result depends on host numbers only, never on sequence lengths: a CUDA graph has one tiling,
and sums have one order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hydraspec_kernels.attention.plan import DevicePlan, GroupShape
from hydraspec_kernels.quantised.records import MOST_ROWS as MOST_ROUNDED_ROWS
from hydraspec_kernels.quantised.records import Rounding
from hydraspec_kernels.runtime.launch import HOPPER_SHARED_BYTES, NUM_SMS

# Programs that fill the device: with two per multiprocessor, adding up the splits costs more than
# they save.
FULL_DEVICE = NUM_SMS
MAX_SPLITS = 16  # reading more partial sums back takes longer than it saves
# Of the fused and the prefill kernel, where sequences are long: each split then has SHARES_OF_LONG
# times the least number of keys.
MAX_LONG_SPLITS, SHARES_OF_LONG = 64, 4
MOST_SHARED_SPLITS = 8  # up to this many, programs of the paged kernel may share a multiprocessor
MOST_SPLIT_ROWS = 16  # of a request; with more rows there are enough programs without splits

# Requests with few rows beside requests with many, which a second launch attends with splits.
FEW_ROWS = 16
FEW_TILE_ROWS = 4  # that a tile holds: a request that decodes has one, with drafts few more
# Least number of keys that the block table has room for, and of splits, for which that is worth a
# second launch and adding up.
LONG_KEYS, LEAST_FEW_SPLITS = 8192, 4
MOST_FEW_SUMS = 24 << 20  # float32 numbers of all splits
MOST_FEW_REQUESTS = 63  # with more, kernels would look requests up in another way

# Fused decode.
# Rows of a request. A pass with more writes all its keys before it reads any, so that requests may
# read each other's keys; the engine's scheduler relies on this.
MOST_FUSED_ROWS = MOST_SPLIT_ROWS
# Most numbers in a tile of queries: its norm and rotation are held in registers at once.
MOST_QUERY_NUMBERS = 32 * 512
LEAST_SHARE = 128 * 256  # numbers of keys that are worth a split
# Shared memory with which the largest tiles of heads of up to 128 numbers, of 144 KiB, are chosen,
# and keys up to which small ones are, 4096 tokens with what lies beyond them: with more, reading
# keys again costs more than it saves.
NARROW_HEADS_BYTES, SHORT_KEYS = 144 << 10, 4352
NARROW_PREFETCHED = 16 << 10  # `prefetched` of such heads and more than 16 queries
# Results of a warp, and splits, that one program adds up; more are worth a second kernel.
MOST_ADDED, MOST_ADDED_SPLITS = 1024, 16
# Programs that share a multiprocessor → the part of the memory bandwidth they reach.
REACHED = {1: 0.8, 2: 0.85, 3: 0.93, 4: 0.93}
SMALL_QUERIES, SMALL_WIDTH = 16, 256  # up to these sizes three programs can share one
MOST_HALF_NUMBERS = 32 * 256  # of a tile of queries, up to which two programs can
TRANSPOSED_QUERIES = 8  # up to this many queries, as columns, four programs can share one


def next_power_of_2(n: int) -> int:
    """The lowest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def splits_that_fill(programs: int, most: int) -> int:
    """Number of splits of a program's keys that fill the device: a power of two, up to `most`."""
    wanted = max(1, min(FULL_DEVICE // programs, most))
    return 1 << (wanted.bit_length() - 1)


# ------------------------------------------------------------------------------------------- paged


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of a launch of the paged kernel."""

    block_m: int  # queries of a program
    block_n: int  # keys of a step
    num_warps: int
    num_stages: int
    splits: int = 1  # programs that share a tile's keys; 1 where programs look requests up


def paged_tiling(shape: GroupShape, max_rows: int, num_requests: int, dtype: torch.dtype) -> Tiling:
    """The paged kernel's tiling: the largest sizes that leave registers for the sums
    [block_m, width] in float32, and shared memory for two tiles of keys and values in flight.
    """
    width = next_power_of_2(shape.latent_dim or shape.head_dim)
    queries, heads = queries_of(shape, max_rows), num_requests * shape.num_kv_heads
    # Without tensor cores operands are in registers, too.
    exact = Tiling(16, 16, 8 if width > 256 else 4, 1)
    if max_rows > MOST_SPLIT_ROWS:
        if dtype is torch.float32:
            return exact
        return Tiling(64, 32, 8, 3) if width > 256 else Tiling(128, 64, 8, 3)
    block_m = max(16, min(64, next_power_of_2(queries)))
    can_share = False  # a multiprocessor, with another program
    if dtype is torch.float32:
        cut = exact
    elif width <= 128:
        fit = (m for m in (16, 32) if heads * queries <= m * FULL_DEVICE)  # one program each
        block_m = min(block_m, next(fit, block_m))
        cut = Tiling(block_m, 128, 4, 2) if block_m < 64 else Tiling(block_m, 64, 4, 3)
        can_share = block_m == 16
    else:
        cut = Tiling(block_m, 32, 8, 5 if block_m < 64 or shape.latent_dim else 3)
    programs = heads * -(-queries // cut.block_m)
    splits = splits_that_fill(programs, MAX_SPLITS)
    if can_share and programs <= FULL_DEVICE:
        splits = max(splits, min(2 * splits, MOST_SHARED_SPLITS))
    return replace(cut, splits=splits)


def few_rows_tiling(plan: DevicePlan, dtype: torch.dtype) -> Tiling:
    """The paged kernel's tiling for the requests of a plan that have at most FEW_ROWS rows.

    A captured step has room for many requests of which few decode, so that their number says
    nothing of the work: the keys of each are divided as if it were alone, while the sums fit.
    """
    shape = plan.shape
    sums = plan.num_requests * FEW_ROWS * shape.num_heads * (shape.head_dim + 2)
    splits = max(1, min(MAX_SPLITS, MOST_FEW_SUMS // sums))
    cut = paged_tiling(shape, FEW_TILE_ROWS, 1, dtype)
    return replace(cut, splits=1 << (splits.bit_length() - 1))


def splits_of_few(plan: DevicePlan, dtype: torch.dtype) -> int:
    """Number of splits of the keys of requests with at most FEW_ROWS rows, which are then attended
    apart from those with more; 1: all are attended alike."""
    shape = plan.shape
    if not plan.min_rows <= FEW_ROWS < plan.max_rows or plan.num_requests > MOST_FEW_REQUESTS:
        return 1
    if shape.window is not None or shape.latent_dim is not None or shape.mask != "causal":
        return 1
    if plan.block_table.shape[1] * shape.block_size < LONG_KEYS:
        return 1
    splits = few_rows_tiling(plan, dtype).splits
    return splits if splits >= LEAST_FEW_SPLITS else 1


def queries_of(shape: GroupShape, max_rows: int) -> int:
    """Number of queries of a request and KV head."""
    return max_rows * shape.num_heads // shape.num_kv_heads


# ------------------------------------------------------------------------------------ fused decode


@dataclass(frozen=True, slots=True)
class DecodeTiling(Tiling):
    """Sizes of a launch of the fused decode kernel."""

    transposed: bool = False  # queries are columns, not rows
    adds_apart: bool = False  # a second kernel adds up splits, if there are any
    # Bytes in half precision that a program brings into the L2 while the previous kernel runs;
    # the L2 holds those of all programs several times.
    prefetched: int = 64 << 10


def fits_decode(plan: DevicePlan) -> bool:
    """Returns whether the fused kernel supports a plan and is the faster choice for it.

    Many programs that each fill a multiprocessor would all compute norms while no key is read.
    """
    shape = plan.shape
    if plan.sees_until is not None or not supports_decode(shape, plan.max_rows):
        return False
    programs = _decode_programs(shape, plan.max_rows, plan.num_requests)
    return programs <= 2 * FULL_DEVICE or _is_half(shape, plan.max_rows)


def fits_rounding(shape: GroupShape, num_rows: int, rounding: Rounding) -> bool:
    """Returns whether the fused kernel can round its results for the product after it: each half
    of a head is made of whole groups."""
    return (
        rounding.kind == "group"
        and num_rows <= MOST_ROUNDED_ROWS
        and shape.head_dim % (2 * rounding.group) == 0
        and shape.head_dim == next_power_of_2(shape.head_dim)
    )


def supports_decode(shape: GroupShape, max_rows: int) -> bool:
    """Returns whether the fused kernel runs: few rows per request, separate keys and values."""
    if shape.latent_dim is not None or max_rows > MOST_FUSED_ROWS or shape.head_dim % 2:
        return False
    return holds_queries(shape, max_rows)


def holds_queries(shape: GroupShape, max_rows: int) -> bool:
    """Returns whether a tile of queries fits the registers of the fused kernel."""
    numbers = block_queries(shape, max_rows) * next_power_of_2(shape.head_dim)
    return numbers <= MOST_QUERY_NUMBERS


def block_queries(shape: GroupShape, max_rows: int) -> int:
    """Number of queries of a program in which queries are rows, not columns."""
    return max(16, min(64, next_power_of_2(queries_of(shape, max_rows))))


def program_queries(shape: GroupShape, max_rows: int, block_m: int) -> int:
    """Number of queries that are normed and rotated: fewer than block_m are repeated afterwards.
    With wide heads the repetition would take too many registers.
    """
    if shape.head_dim > 256:
        return block_m
    return min(block_m, next_power_of_2(queries_of(shape, max_rows)))


def least_share(shape: GroupShape, cut: Tiling) -> int:
    """Least number of keys of a split: with fewer, adding up takes longer than splitting saves."""
    return max(cut.block_n, LEAST_SHARE // next_power_of_2(shape.head_dim))


def most_splits(shape: GroupShape, cut: Tiling, max_rows: int, max_keys: int) -> int:
    """Largest number of splits of the fused kernel, for sequences of up to max_keys keys; above
    MAX_SPLITS only if each then has four times the least share (`split_keys`)."""
    return splits_of_keys(_most_keys(shape, max_rows, max_keys), least_share(shape, cut))


def splits_of_keys(max_keys: int, share: int) -> int:
    """Splits of max_keys keys at most: above MAX_SPLITS, each has SHARES_OF_LONG shares of keys."""
    return max(MAX_SPLITS, min(MAX_LONG_SPLITS, max_keys // (SHARES_OF_LONG * share)))


def _most_keys(shape: GroupShape, max_rows: int, max_keys: int) -> int:
    """Keys that the rows of a request see, of sequences of up to max_keys."""
    return min(max_keys, (shape.window or max_keys) + max_rows)


def _decode_programs(shape: GroupShape, max_rows: int, num_requests: int) -> int:
    """Number of programs of the fused kernel without splits."""
    tiles = -(-queries_of(shape, max_rows) // block_queries(shape, max_rows))
    return num_requests * shape.num_kv_heads * tiles


def _is_half(shape: GroupShape, max_rows: int) -> bool:
    """Returns whether two programs can share a multiprocessor."""
    width = next_power_of_2(shape.head_dim)
    return width <= SMALL_WIDTH and block_queries(shape, max_rows) * width <= MOST_HALF_NUMBERS


def _programs_per_sm(shape: GroupShape, max_rows: int, programs: int) -> int:
    """The number of programs per multiprocessor that leaves the fewest idle in the last wave."""
    queries = queries_of(shape, max_rows)
    if programs <= FULL_DEVICE or not _is_half(shape, max_rows):
        return 1
    if queries > SMALL_QUERIES:  # narrow heads have tilings that share one anyway
        can_share = (1, 2) if shape.head_dim > 128 else (1,)
    else:
        can_share = (1, 3, 4) if queries <= TRANSPOSED_QUERIES else (1, 3)

    def reached(per_sm: int) -> float:
        places = per_sm * FULL_DEVICE
        return REACHED[per_sm] * programs / (-(-programs // places) * places)

    return max(can_share, key=reached)


def decode_tiling(
    shape: GroupShape,
    max_rows: int,
    num_requests: int,
    dtype: torch.dtype,
    *,
    max_keys: int,
    room: int = HOPPER_SHARED_BYTES,
) -> DecodeTiling:
    """The tiles and splits of decode attention for one KV group, a batch size, a dtype, a bound of
    the sequence lengths and the bytes of shared memory that a program may have.
    """
    width, exact = next_power_of_2(shape.head_dim), dtype is torch.float32
    block_m, queries = block_queries(shape, max_rows), queries_of(shape, max_rows)
    programs = _decode_programs(shape, max_rows, num_requests)
    per_sm = _programs_per_sm(shape, max_rows, programs)
    is_narrow, has_room = width <= 128, room >= NARROW_HEADS_BYTES
    if per_sm == 4:
        keys = 16 if exact else max(16, min(64, 4096 // width))
        cut = DecodeTiling(TRANSPOSED_QUERIES, keys, 4, 1 if exact else 4, transposed=True)
        return replace(cut, adds_apart=True, prefetched=32 << 10)
    if exact:  # without tensor cores operands are in registers, too
        block_m = 16
        programs = num_requests * shape.num_kv_heads * -(-queries // block_m)
        cut = DecodeTiling(16, 16, 8 if width > 256 else 4, 1)
    elif per_sm == 3:
        cut = DecodeTiling(block_m, max(32, min(64, 8192 // width)), 4, 3)
    elif is_narrow and has_room and block_m > 16 and 2 * programs <= FULL_DEVICE:
        is_short = _most_keys(shape, max_rows, max_keys) <= SHORT_KEYS
        while block_m > 16 and programs * (2 if is_short else 512 // block_m) <= FULL_DEVICE:
            block_m //= 2  # more programs, which read the same keys from the L2
            programs = num_requests * shape.num_kv_heads * -(-queries // block_m)
        cut = DecodeTiling(block_m, 128, 4, 3, prefetched=NARROW_PREFETCHED)
        if block_m == 64:  # two share a multiprocessor
            cut, programs = replace(cut, block_n=64), -(-programs // 2)
    elif is_narrow and (block_m == 32 or (has_room and block_m > 32)):
        cut = DecodeTiling(block_m, 64, 4, 3, prefetched=NARROW_PREFETCHED)
    elif block_m > 32:
        cut = DecodeTiling(block_m, 32, 8, 3)
    elif per_sm == 2 or (width == 256 and block_m == 16 and programs > 2 * FULL_DEVICE):
        cut = DecodeTiling(block_m, 64, 4, 2)
    else:
        cut = DecodeTiling(block_m, 32 if width > 256 else 64, 4 if width > 256 else 8, 3)
    splits = splits_that_fill(programs, most_splits(shape, cut, max_rows, max_keys))
    results = min(queries, cut.block_m) * shape.head_dim
    is_much = results > MOST_ADDED * cut.num_warps or splits > MOST_ADDED_SPLITS
    return replace(cut, splits=splits, adds_apart=is_much)

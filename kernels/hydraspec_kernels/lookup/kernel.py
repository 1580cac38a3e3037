"""Lookups in one launch each; a program is a request."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.lookup.records import Lookup
from hydraspec_kernels.runtime.launch import check_contiguous
from hydraspec_kernels.runtime.launch_kernel import dependent_launch, start_next, wait_for_inputs

BLOCK = 1024  # columns of a text that are looked at together


@triton.jit
def _longest_match(row_ptr, last, width, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """The last column of the latest of the longest matches, and its tokens: `_longest_match` of the
    reference, for the text [width] that ends at column `last`; column 0 without any."""
    best = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, tl.minimum(last, width), BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_before = column < last
        matches = is_before
        length = tl.zeros((BLOCK,), tl.int64)
        for back in tl.static_range(MOST):
            token = tl.load(row_ptr + last - back, mask=last >= back, other=-1)
            here = tl.load(row_ptr + column - back, mask=is_before & (column >= back), other=-2)
            matches = matches & (here == token)
            length += matches.to(tl.int64)
        best = tl.maximum(best, tl.where(length > 0, length * width + column, 0))
    found = tl.max(best, 0)
    return found % width, found // width


@triton.jit
def _copied(row_ptr, last, place, j, is_wanted):
    """The token j places after column `place` of a text that repeats itself from column `last` on;
    -1 where none is wanted."""
    period = tl.maximum(last - place, 1)
    return tl.load(row_ptr + place + 1 + j % period, mask=is_wanted, other=-1)


@triton.jit(do_not_specialize=["columns", "least"])
def _continued(
    drafts_ptr,  # [B, K]
    token_ids_ptr,  # [S, L+1]
    slots_ptr,  # [B]
    last_ptr,  # [B]
    columns,
    least,
    K: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two, at least K
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    request = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, WIDTH)
    wait_for_inputs(PDL)
    row_ptr = token_ids_ptr + tl.load(slots_ptr + request) * columns
    last = tl.load(last_ptr + request)
    place, length = _longest_match(row_ptr, last, columns, MOST, BLOCK)
    drafts = _copied(row_ptr, last, place, j, (j < K) & (length >= least))
    tl.store(drafts_ptr + request * K + j, drafts, mask=j < K)


def continued_kernel(
    token_ids: Tensor, slots: Tensor, last: Tensor, *, num_drafts: int, least: int, most: int
) -> Tensor:
    """See `lookup.continued`."""
    check_contiguous(token_ids, slots, last)
    drafts = slots.new_empty(slots.shape[0], num_drafts)
    if drafts.numel():
        _continued[(slots.shape[0],)](
            drafts, token_ids, slots, last, token_ids.shape[1], least,
            K=num_drafts, WIDTH=triton.next_power_of_2(num_drafts), MOST=most, BLOCK=BLOCK,
            **dependent_launch(token_ids),
        )  # fmt: skip
    return drafts


@triton.jit(do_not_specialize=["columns", "width", "fewest"])
def _write_drafts(
    token_ids_ptr,  # [S, L+1]
    num_computed_ptr,  # [S]
    numbers_ptr,  # [N, 2K+3]
    columns,
    width,
    factor,
    fewest,
    LONGEST: tl.constexpr,  # tokens of a match at most; 0: no lookup
    IS_AHEAD: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two, at least K + 1
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    numbers_ptr += tl.program_id(0).to(tl.int64) * (2 * K + 3)
    said_ptr, j = numbers_ptr + 2, tl.arange(0, WIDTH)
    wait_for_inputs(PDL)
    slot, first = tl.load(numbers_ptr), tl.load(numbers_ptr + 1)
    row_ptr = token_ids_ptr + slot * columns
    if IS_AHEAD:
        last = tl.load(num_computed_ptr + slot)
        num_sampled = last + 1 - first
        is_sampled = (j < num_sampled) & (j <= K)
        sampled = tl.load(row_ptr + first + j, mask=is_sampled, other=0)
        said = tl.load(said_ptr + j, mask=is_sampled, other=0)
        said_ptr += num_sampled
        is_right = tl.sum((sampled != said).to(tl.int32), 0) == 0
        drafts = tl.load(said_ptr + j, mask=(j < K) & is_right, other=-1)
        if LONGEST > 0:
            is_right = tl.max(tl.where(j == 0, drafts, -1), 0) >= 0
            place, length = _longest_match(row_ptr, last, width, LONGEST, BLOCK)
            most = tl.maximum((length * factor).to(tl.int64), tl.minimum(length, 1) * fewest)
            others = _copied(row_ptr, last, place, j, (j < K) & (j < most))
            drafts = tl.where(is_right, drafts, others)
        first = last + 1
    else:
        drafts = tl.load(said_ptr + j, mask=j < K, other=-1)
    tl.store(row_ptr + first + j, drafts, mask=j < K)


def write_drafts_kernel(
    token_ids: Tensor,
    num_computed: Tensor,
    numbers: Tensor,
    *,
    width: int,
    is_ahead: bool,
    lookup: Lookup | None,
) -> None:
    """See `lookup.write_drafts`."""
    columns, k = token_ids.shape[1], (numbers.shape[1] - 3) // 2
    longest, factor, fewest = (
        (0, 0.0, 0) if lookup is None else (lookup.longest, lookup.factor, lookup.fewest)
    )
    _write_drafts[(numbers.shape[0],)](
        token_ids, num_computed, numbers, columns, min(width, columns), factor, fewest,
        LONGEST=longest, IS_AHEAD=is_ahead, K=k, WIDTH=triton.next_power_of_2(k + 1), BLOCK=BLOCK,
        **dependent_launch(token_ids),
    )  # fmt: skip

"""Sums and gathers over ranks: a program sends its part to every rank, receives everyone's, and
computes the same from them as the programs of the other ranks.

The kernels are in Gluon, because 16 bytes of a message are one access of one thread, which takes a
known layout. Gluon has no interpreter: only tests on devices run this.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hydraspec_kernels.collectives.messages_kernel import receive, send
from hydraspec_kernels.collectives.records import BOX_BYTES, MAX_BOXES, Mailboxes
from hydraspec_kernels.norms import AddNorm
from hydraspec_kernels.runtime.gluon_kernel import start_next, wait_for_inputs
from hydraspec_kernels.runtime.launch_kernel import dependent_launch

BOX = gl.constexpr(BOX_BYTES)
STRIDE = gl.constexpr(MAX_BOXES * BOX_BYTES)  # from the boxes of one rank to those of the next
LEAST_CHUNK = 1024
MOST_WARPS = 32
WARP = 32


@gluon.jit
def _exchange(
    peers, counts, control, words, inside, at, rank, box, SIZE: gl.constexpr, PACK: gl.constexpr
):
    """Sends a tile of words that begins at byte `at` of a box; returns every rank's tile."""
    count = gl.load(counts + box)
    parity = (count & 1).to(gl.int64)
    sent = ((parity * SIZE + rank) * STRIDE) + box * BOX + at
    send(peers, words, inside, sent, SIZE, PACK)
    code = (count.to(gl.int64) << 32) | (box << 16) | 1
    kept = parity * SIZE * STRIDE + box * BOX + at
    own = peers[SIZE - 1]
    found = receive(own, control, code, inside, kept, words.dtype, SIZE, PACK, STRIDE)
    gl.thread_barrier()  # every thread has read the count
    gl.store(counts + box, count + 1)
    return found


@gluon.jit
def _sum_over_ranks(
    peers, counts, control, x, inside, at, rank, box, SIZE: gl.constexpr, PACK: gl.constexpr
):
    """The float32 sum in the order of ranks of x, which has the dtype that travels."""
    dtype: gl.constexpr = x.dtype
    word: gl.constexpr = gl.int16 if PACK == 8 else gl.int32
    words = x.to(word, bitcast=True)
    found = _exchange(peers, counts, control, words, inside, at, rank, box, SIZE, PACK)
    total = found[0].to(dtype, bitcast=True).to(gl.float32)
    for i in gl.static_range(1, SIZE):
        total += found[i].to(dtype, bitcast=True).to(gl.float32)
    return total


@gluon.jit
def _inverse_rms(x, width, eps):
    """Factor 1 / sqrt(mean(x^2) + eps) of a row x [WIDTH] float32, which is zero after `width`."""
    return gl.rsqrt(gl.sum(x * x, 0) / width + eps)


@gluon.jit(do_not_specialize=["rank"])
def _add_norm_kernel(
    # [T, width] in rows of h_stride, read and written
    h_ptr,
    # [T, width]
    y_ptr,
    # [PARTS, T, width]
    x_ptr,
    # [width]
    post_weight_ptr,
    # [width]
    next_weight_ptr,
    # see Mailboxes
    peers,
    counts_ptr,
    control_ptr,
    rank,
    width,
    h_stride,
    x_part_stride,
    x_row_stride,
    eps,
    scale,
    SIZE: gl.constexpr,
    PACK: gl.constexpr,
    PARTS: gl.constexpr,
    HAS_POST_NORM: gl.constexpr,
    HAS_POST_WEIGHT: gl.constexpr,
    HAS_NEXT_NORM: gl.constexpr,
    WIDTH: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """The norms' `add_norm_kernel`, with the sum over ranks between sum of parts and norm."""
    start_next(PDL)
    layout: gl.constexpr = gl.BlockedLayout([PACK], [32], [WARPS], [0])
    dtype: gl.constexpr = h_ptr.dtype.element_ty
    box = gl.program_id(0)
    row = box.to(gl.int64)
    column = gl.arange(0, WIDTH, layout)
    inside = column < width
    if HAS_POST_WEIGHT:
        post_weight = gl.load(post_weight_ptr + column, mask=inside, other=0.0)
    if HAS_NEXT_NORM:
        next_weight = gl.load(next_weight_ptr + column, mask=inside, other=0.0)
    wait_for_inputs(PDL)
    h_at = h_ptr + row * h_stride + column
    h = gl.load(h_at, mask=inside, other=0.0)
    x_at = x_ptr + row * x_row_stride + column
    x = gl.load(x_at, mask=inside, other=0.0).to(gl.float32)
    for _ in gl.static_range(1, PARTS):
        x_at += x_part_stride
        x += gl.load(x_at, mask=inside, other=0.0).to(gl.float32)
    at = (column * (16 // PACK)).to(gl.int64)
    x = _sum_over_ranks(
        peers, counts_ptr, control_ptr, x.to(dtype), inside, at, rank, box, SIZE, PACK
    )
    x = x.to(dtype).to(gl.float32)
    if HAS_POST_NORM:
        x *= _inverse_rms(x, width, eps)
        if HAS_POST_WEIGHT:
            x *= post_weight.to(gl.float32)
        x = x.to(dtype).to(gl.float32)
    h = (h.to(gl.float32) + x).to(dtype)
    h = (h.to(gl.float32) * scale).to(dtype)  # by 1 it is exact
    gl.store(h_at, h, mask=inside)
    if HAS_NEXT_NORM:
        wide = h.to(gl.float32)
        y = wide * _inverse_rms(wide, width, eps) * next_weight.to(gl.float32)
        gl.store(y_ptr + row * width + column, y.to(dtype), mask=inside)


@gluon.jit(do_not_specialize=["rank", "n"])
def _all_reduce_kernel(
    # [n]
    out_ptr,
    # [n]
    x_ptr,
    # see Mailboxes
    peers,
    counts_ptr,
    control_ptr,
    rank,
    n,
    SIZE: gl.constexpr,
    PACK: gl.constexpr,
    CHUNK: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Sums over ranks, CHUNK of them a program."""
    start_next(PDL)
    layout: gl.constexpr = gl.BlockedLayout([PACK], [32], [WARPS], [0])
    box = gl.program_id(0)
    column = gl.arange(0, CHUNK, layout)
    i = box * CHUNK + column
    inside = i < n
    wait_for_inputs(PDL)
    x = gl.load(x_ptr + i, mask=inside, other=0.0)
    at = (column * (16 // PACK)).to(gl.int64)
    total = _sum_over_ranks(peers, counts_ptr, control_ptr, x, inside, at, rank, box, SIZE, PACK)
    gl.store(out_ptr + i, total.to(x.dtype), mask=inside)


@gluon.jit(do_not_specialize=["rank", "n"])
def _all_gather_kernel(
    # [SIZE, n] int16
    out_ptr,
    # [n] int16
    x_ptr,
    # see Mailboxes
    peers,
    counts_ptr,
    control_ptr,
    rank,
    n,
    SIZE: gl.constexpr,
    CHUNK: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Gathers x of all ranks, CHUNK numbers a program. 16 bits travel in 32, so that no word is all
    ones, whatever the data.
    """
    start_next(PDL)
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    box = gl.program_id(0)
    column = gl.arange(0, CHUNK, layout)
    i = box * CHUNK + column
    inside = i < n
    wait_for_inputs(PDL)
    words = gl.load(x_ptr + i, mask=inside, other=0).to(gl.int32) & 0xFFFF
    at = (column * 4).to(gl.int64)
    found = _exchange(peers, counts_ptr, control_ptr, words, inside, at, rank, box, SIZE, 4)
    for r in gl.static_range(SIZE):
        gl.store(out_ptr + r * n + i, found[r].to(gl.int16), mask=inside)


def add_norm_cuda(
    boxes: Mailboxes,
    h: Tensor,
    x: Tensor,
    *,
    post_weight: Tensor | None,
    next_weight: Tensor | None,
    eps: float,
    scale: float | None = None,
    has_post_norm: bool = True,
) -> AddNorm:
    """See `hydraspec_kernels.collectives.add_norm_over_ranks`."""
    rows, width = h.shape
    assert 0 < rows <= MAX_BOXES
    assert x.shape[-2:] == h.shape, f"{tuple(x.shape)} added to {tuple(h.shape)}"
    assert h.stride(1) == 1
    if x.stride(-1) != 1:
        x = x.contiguous()
    y = None
    if next_weight is not None:
        assert next_weight.is_contiguous()
        y = torch.empty(rows, width, dtype=h.dtype, device=h.device)
    has_post_weight = has_post_norm and post_weight is not None
    if has_post_weight:
        assert post_weight is not None
        assert post_weight.is_contiguous()
    pack, padded, warps = tile_of(width, h.element_size())
    assert padded * h.element_size() <= BOX_BYTES
    _add_norm_kernel[(rows,)](
        h,
        y,
        x,
        post_weight if has_post_weight else None,
        next_weight,
        boxes.peers,
        boxes.counts,
        boxes.control,
        boxes.rank,
        width,
        h.stride(0),
        x.stride(0) if x.dim() == 3 else 0,
        x.stride(-2),
        eps,
        1.0 if scale is None else scale,
        SIZE=boxes.size,
        PACK=pack,
        PARTS=x.shape[0] if x.dim() == 3 else 1,
        HAS_POST_NORM=has_post_norm,
        HAS_POST_WEIGHT=has_post_weight,
        HAS_NEXT_NORM=next_weight is not None,
        WIDTH=padded,
        WARPS=warps,
        num_warps=warps,
        **dependent_launch(h),
    )
    return AddNorm(h, y)


def all_reduce_cuda(boxes: Mailboxes, x: Tensor) -> Tensor:
    """See `hydraspec_kernels.collectives.all_reduce`."""
    assert x.is_contiguous()
    out = torch.empty_like(x)
    pack, chunk, warps = tile_of(chunk_of(x.numel()), x.element_size())
    assert chunk * x.element_size() <= BOX_BYTES
    _all_reduce_kernel[(triton.cdiv(x.numel(), chunk),)](
        out,
        x,
        boxes.peers,
        boxes.counts,
        boxes.control,
        boxes.rank,
        x.numel(),
        SIZE=boxes.size,
        PACK=pack,
        CHUNK=chunk,
        WARPS=warps,
        num_warps=warps,
        **dependent_launch(x),
    )
    return out


def all_gather_cuda(boxes: Mailboxes, x: Tensor) -> Tensor:
    """See `hydraspec_kernels.collectives.all_gather`."""
    assert x.is_contiguous()
    out = x.new_empty((boxes.size, *x.shape))
    sent = x.view(-1).view(torch.int16)
    _, chunk, warps = tile_of(chunk_of(sent.numel()), 4)
    assert chunk * 4 <= BOX_BYTES
    _all_gather_kernel[(triton.cdiv(sent.numel(), chunk),)](
        out.view(-1).view(torch.int16),
        sent,
        boxes.peers,
        boxes.counts,
        boxes.control,
        boxes.rank,
        sent.numel(),
        SIZE=boxes.size,
        CHUNK=chunk,
        WARPS=warps,
        num_warps=warps,
        **dependent_launch(x),
    )
    return out


def chunk_of(n: int) -> int:
    """Count of numbers that a program takes, so that MAX_BOXES programs suffice for n."""
    return max(LEAST_CHUNK, triton.next_power_of_2(triton.cdiv(n, MAX_BOXES)))


def tile_of(width: int, size: int) -> tuple[int, int, int]:
    """Numbers in 16 bytes, padded width, and warps of a tile of numbers of `size` bytes. Threads
    have different numbers: two that received the same message would wait for each other.
    """
    pack = 16 // size
    padded = max(triton.next_power_of_2(width), WARP * pack)
    return pack, padded, min(MOST_WARPS, padded // (WARP * pack))

"""Experts whose narrow numbers are read as they are stored, of those experts alone that rows chose.

Grouped as in `kernel`, with rows of the matrix as the left operand. FP8 numbers of both sides are
multiplied as FP8; tensor cores sum those with some 14 bits, so that every step is a sum of its own,
which is scaled and added in float32. Integers are multiplied by their scale first, rounded to the
type of x once, as the reference does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.activation.kernel import gelu_tanh, silu
from hydraspec_kernels.moe.kernel import Grouping, combine, group_pairs
from hydraspec_kernels.moe.plan import Experts, ExpertTiles, Maxima, expert_tiles, inner_maxima
from hydraspec_kernels.quantised import E4M3, QuantisedMatrix
from hydraspec_kernels.quantised.kernel import unpacked_step
from hydraspec_kernels.quantised.plan import shared_columns
from hydraspec_kernels.quantised.round_kernel import round_rows
from hydraspec_kernels.runtime.launch_kernel import dependent_launch, start_next, wait_for_inputs


@triton.jit(do_not_specialize=["num_pairs"])
def quantised_experts_kernel(
    # [num_pairs, columns]
    out_ptr,
    # [num_pairs // pairs_per_row, depth] in rows of x_stride: e4m3, or not rounded if PLAIN
    x_ptr,
    # [num_pairs // pairs_per_row, G] float32, unless PLAIN
    x_scales_ptr,
    # [blocks, BLOCK_M]; unused without GROUPED: then block b is pair b alone
    pairs_ptr,
    # [blocks]
    block_experts_ptr,
    # [experts, columns, depth] e4m3, or [experts, columns, depth / 8] int32; gates if GATED
    data_ptr,
    # [experts, R, C] float32
    scales_ptr,
    # ups as gates, if GATED
    up_data_ptr,
    up_scales_ptr,
    num_pairs,
    pairs_per_row,
    depth,
    columns,
    x_stride,
    data_expert_stride,
    data_stride,
    scales_expert_stride,
    scales_stride,
    GATED: tl.constexpr,
    USES_SILU: tl.constexpr,
    GROUPED: tl.constexpr,
    ROWS: tl.constexpr,  # rows of a matrix that share a scale
    COLUMNS: tl.constexpr,  # its columns that do; 0: all
    GROUP: tl.constexpr,  # numbers of x that do; 0: all of a row
    PLAIN: tl.constexpr,  # x is not rounded
    PACKED: tl.constexpr,
    EVEN: tl.constexpr,  # BLOCK_K divides depth
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # rows of the matrix; the first half is gates if GATED
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of pairs times one block of rows of their expert's matrix, gated where GATED."""
    start_next(PDL)
    wait_for_inputs(PDL)
    block = tl.program_id(1)
    expert = tl.load(block_experts_ptr + block).to(tl.int64)
    if expert < 0:
        return
    m, k, r = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_N)
    if GROUPED:
        pair = tl.load(pairs_ptr + block * BLOCK_M + m)
    else:
        pair = tl.where(m == 0, block, num_pairs)
    has_pair = pair < num_pairs
    row = (pair // pairs_per_row).to(tl.int64)
    x_at = x_ptr + row[:, None] * x_stride + k[None, :]
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    first = tl.program_id(0) * WIDTH
    n = tl.minimum(first + r % WIDTH, columns - 1)
    data_at = expert * data_expert_stride + n.to(tl.int64) * data_stride
    scale_at = expert * scales_expert_stride + n // ROWS * scales_stride
    if GATED:
        is_gate = r < WIDTH
        data_at = tl.where(is_gate, data_ptr + data_at, up_data_ptr + data_at)
        scale_at = tl.where(is_gate, scales_ptr + scale_at, up_scales_ptr + scale_at)
    else:
        data_at, scale_at = data_ptr + data_at, scales_ptr + scale_at
    y = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
        x_mask = has_pair[:, None]
        if not EVEN:
            x_mask = x_mask & (start + k < depth)[None, :]
        x = tl.load(x_at + start, mask=x_mask, other=0.0)
        if PACKED:
            at = data_at[:, None]
            w = unpacked_step(at, scale_at, start, depth, COLUMNS, BLOCK_N, BLOCK_K, EVEN, x.dtype)
            y = tl.dot(w, tl.trans(x), y)
        else:
            at = data_at[:, None] + (start + k)[None, :]
            inside = None if EVEN else (start + k < depth)[None, :]
            w = tl.load(at, mask=inside, other=None if EVEN else 0.0)
            if PLAIN:
                w = w.to(tl.float16).to(x.dtype)
            part = tl.dot(w, tl.trans(x))
            if COLUMNS:
                part = part * tl.load(scale_at + start // COLUMNS)[:, None]
            if GROUP:
                s_at = x_scales_ptr + row * tl.cdiv(depth, GROUP) + start // GROUP
                part = part * tl.load(s_at, mask=has_pair, other=0.0)[None, :]
            y += part
    if not PACKED and COLUMNS == 0:
        y = y * tl.load(scale_at)[:, None]
    if not PLAIN and GROUP == 0:
        y = y * tl.load(x_scales_ptr + row, mask=has_pair, other=0.0)[None, :]
    dtype = out_ptr.dtype.element_ty
    if GATED:  # rounded where the separate operators round
        halves = tl.permute(tl.reshape(y, (2, WIDTH, BLOCK_M)), (1, 2, 0))
        gate, up = tl.split(halves.to(dtype).to(tl.float32))
        activated = silu(gate) if USES_SILU else gelu_tanh(gate)
        y = activated.to(dtype).to(tl.float32) * up
    column = first + tl.arange(0, WIDTH)
    out_at = out_ptr + pair.to(tl.int64)[None, :] * columns + column[:, None]
    tl.store(out_at, y.to(dtype), mask=has_pair[None, :] & (column < columns)[:, None])


@dataclass(slots=True, frozen=True)
class PairRows:
    """Rows as they enter the products of their pairs."""

    numbers: Tensor  # [T, K] or [T * k, K]: e4m3, or not rounded
    scales: Tensor | None  # [T, G] or [T * k, G] float32; None: not rounded
    dtype: torch.dtype  # of the rows before, and of products

    @classmethod
    def of(cls, x: Tensor, matrix: QuantisedMatrix, maxima: Tensor | None = None) -> PairRows:
        """Rows x [T, K], rounded as the matrix says, each once."""
        if matrix.rounding.kind == "float":
            return cls(x if x.stride(1) == 1 else x.contiguous(), None, x.dtype)
        return cls(*round_rows(x, matrix.rounding, maxima, E4M3), x.dtype)


def run_quantised_experts(
    x: PairRows,
    matrix: QuantisedMatrix,
    up: QuantisedMatrix | None,
    grouping: Grouping,
    tiles: ExpertTiles,
    activation: str,
) -> Tensor:
    """Products [T * k, N] of x and each pair's matrix [E, N, K]; with up: act(gate) * up, of which
    `matrix` is the gate."""
    rounding, columns = matrix.rounding, matrix.data.shape[1]
    gated = up is not None
    up = matrix if up is None else up
    num_pairs = grouping.num_pairs
    width = tiles.rows // 2 if gated else tiles.rows
    out = torch.empty(num_pairs, columns, dtype=x.dtype, device=x.numbers.device)
    assert matrix.data.stride(2) == matrix.scales.stride(2) == 1
    assert up.data.stride() == matrix.data.stride()
    assert up.scales.stride() == matrix.scales.stride()
    quantised_experts_kernel[(triton.cdiv(columns, width), grouping.blocks)](
        out,
        x.numbers,
        x.scales,
        grouping.pairs,
        grouping.block_experts,
        matrix.data,
        matrix.scales,
        up.data,
        up.scales,
        num_pairs,
        num_pairs // x.numbers.shape[0],
        matrix.width,
        columns,
        x.numbers.stride(0),
        *matrix.data.stride()[:2],
        *matrix.scales.stride()[:2],
        GATED=gated,
        USES_SILU=activation == "silu",
        GROUPED=grouping.pairs is not None,
        ROWS=matrix.rows,
        COLUMNS=shared_columns(matrix),
        GROUP=rounding.group if rounding.kind == "group" else 0,
        PLAIN=rounding.kind == "float",
        PACKED=matrix.data.dtype is torch.int32,
        EVEN=matrix.width % tiles.step == 0,
        BLOCK_M=tiles.pairs,
        BLOCK_N=tiles.rows,
        BLOCK_K=tiles.step,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        **dependent_launch(out),
    )
    return out


def quantised_moe_cuda(
    x: Tensor,
    w: Tensor,
    e: Tensor,
    experts: Experts,
    activation: str,
    maxima: Maxima | None = None,
) -> Tensor:
    """See `moe.quantised_moe`; for experts that `plan.have_kernel`."""
    gate, up, down = experts
    if not x.shape[0]:
        return torch.empty_like(x)
    e, w = e.contiguous(), w.contiguous()
    tiles, tiles_down = expert_tiles(e.numel(), gate), expert_tiles(e.numel(), down)
    assert tiles is not None
    assert tiles_down is not None
    assert tiles.pairs == tiles_down.pairs
    grouping = group_pairs(e, gate.data.shape[0], tiles.pairs)
    inner = run_quantised_experts(PairRows.of(x, gate), gate, up, grouping, tiles, activation)
    rows = PairRows.of(inner, down, inner_maxima(inner, down, maxima))
    parts = run_quantised_experts(rows, down, None, grouping, tiles_down, "none")
    return combine(parts, w)

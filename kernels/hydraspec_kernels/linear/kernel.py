"""Few rows times a matrix at memory speed: every weight is read once, as early as possible.

`_tile_kernel` multiplies on the tensor cores with the weights as the left operand, [BR, K] @
[K, BM]; `_row_kernel` multiplies on the CUDA cores, for one row and small weights, which are in
registers before the input is complete. A program owns BR rows of the weight's [N, K] storage
(program_id 0), one of the ranges of K (1) and BM rows of x (2). A gated weight's rows alternate, so
that a program holds the gate and the up branch of its columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.activation.softcap_kernel import soft_capped
from hydraspec_kernels.linear.plan import GATED, SpecializedTiling, Tiling
from hydraspec_kernels.runtime.launch_kernel import (
    dependent_launch,
    prefetch_l2,
    start_next,
    wait_for_inputs,
)


@triton.jit
def _weight_rows(first, N, BR: tl.constexpr, GATES: tl.constexpr):
    """Rows of the weight [BR], int64, for the columns of the output from `first` on."""
    r = tl.arange(0, BR)
    rows = tl.minimum(first + (r // 2 if GATES else r), N - 1)
    if GATES:  # gate, up, gate, up, ...
        rows += r % 2 * N
    return rows.to(tl.int64)


@triton.jit
def _k_range(K, STEP: tl.constexpr):
    """This program's range of K: full steps, divided evenly."""
    steps = tl.cdiv(K, STEP)
    split, splits = tl.program_id(1), tl.num_programs(1)
    return split * steps // splits * STEP, (split + 1) * steps // splits * STEP


@triton.jit
def _prefetch(weight, rows, stride, low, K, SPAN: tl.constexpr, PDL: tl.constexpr):
    """Brings the first SPAN columns of `rows` from `low` on into the L2."""
    if PDL:
        LINE: tl.constexpr = 128 // (weight.dtype.element_ty.primitive_bitwidth // 8)
        k = tl.minimum(low + tl.arange(0, SPAN // LINE) * LINE, K - 1)
        prefetch_l2(weight + rows[:, None] * stride + k[None, :])


@triton.jit
def _logistic(v):
    return 1 / (1 + tl.exp(tl.minimum(-v, 80.0)))  # e^80 is finite, and large enough


@triton.jit
def _gelu_tanh(v):
    """GELU in its tanh form: 0.5 (1 + tanh(u)) is the logistic function of 2u."""
    return v * _logistic(1.5957691216057308 * (v + 0.044715 * v * v * v))


@triton.jit
def _finish(
    out, bias, factor, y, first, m, M, N, stride_fm, softcap,
    BR: tl.constexpr, BM: tl.constexpr, END: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Applies bias, activation or soft cap to y [BR, BM], and stores it to rows m."""
    if END == "gelu_tanh" or END == "silu":
        COLUMNS: tl.constexpr = BR // 2
        n = first + tl.arange(0, COLUMNS)
        gate, up = tl.split(tl.permute(tl.reshape(y, (COLUMNS, 2, BM)), (0, 2, 1)))
        if HAS_BIAS:
            gate += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
            up += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        v = (_gelu_tanh(gate) if END == "gelu_tanh" else gate * _logistic(gate)) * up
    else:
        n = first + tl.arange(0, BR)
        v = y
        if HAS_BIAS:
            v += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    inside = (n < N)[:, None] & (m < M)[None, :]
    if END == "scaled_gelu":
        at = factor + m.to(tl.int64)[None, :] * stride_fm + n[:, None]
        v = _gelu_tanh(v) * tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if END == "softcap":
        v = soft_capped(v, softcap)
    to = (tl.program_id(1).to(tl.int64) * M + m)[None, :] * N + n[:, None]
    tl.store(out + to, v.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "stride_fm"])
def _row_kernel(
    # [splits, M, N]
    out,
    # [M, K]
    x,
    # [N, K], or gated [2N, K]
    weight,
    # [N], or gated [2N]
    bias,
    # [M, N]
    factor,
    M, N, K, stride_xm, stride_wn, stride_fm, softcap,
    BR: tl.constexpr, BK: tl.constexpr, END: tl.constexpr, HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    GATES: tl.constexpr = END == "gelu_tanh" or END == "silu"
    first = tl.program_id(0) * (BR // 2 if GATES else BR)
    rows = _weight_rows(first, N, BR, GATES)
    low, high = _k_range(K, BK)
    k = tl.arange(0, BK)[None, :]
    at = weight + rows[:, None] * stride_wn + k
    ahead = tl.load(at + low, mask=low + k < K, other=0.0)  # loaded one step before its product
    wait_for_inputs(PDL)
    m = tl.program_id(2) + tl.arange(0, 1)
    # x has the layout of the weights, row for row, so that no data crosses threads.
    x_at = x + tl.program_id(2).to(tl.int64) * stride_xm + (tl.zeros((BR, 1), tl.int32) + k)
    total = tl.zeros((BR, BK), tl.float32)
    for start in range(low, high, BK):
        w = ahead
        after = start + BK + k
        ahead = tl.load(at + start + BK, mask=(after < K) & (after < high), other=0.0)
        v = tl.load(x_at + start, mask=start + k < K, other=0.0)
        total += w.to(tl.float32) * v.to(tl.float32)
    y = tl.sum(total, 1)[:, None]
    _finish(out, bias, factor, y, first, m, M, N, stride_fm, softcap, BR, 1, END, HAS_BIAS)


@triton.jit
def _tile(base, rows, stride, BK: tl.constexpr, SLICES: tl.constexpr):
    """Addresses of a tile of these rows: [R, BK], or [SLICES, R, BK] if the warps share K."""
    k = tl.arange(0, BK)
    if SLICES == 1:
        return base + rows[:, None] * stride + k[None, :]
    else:
        c = tl.arange(0, SLICES)[:, None, None] * BK + k[None, None, :]
        return base + rows[None, :, None] * stride + c


@triton.jit
def _columns(start, BK: tl.constexpr, SLICES: tl.constexpr):
    """Column indices of a tile, from `start` on: [1, BK] or [SLICES, 1, BK]."""
    k = start + tl.arange(0, BK)
    if SLICES == 1:
        return k[None, :]
    else:
        return k[None, None, :] + tl.arange(0, SLICES)[:, None, None] * BK


@triton.jit(do_not_specialize=["M", "stride_fm"])
def _tile_kernel(
    # [splits, M, N]
    out,
    # [M, K]
    x,
    # [N, K], or gated [2N, K]
    weight,
    # [N], or gated [2N]
    bias,
    # [M, N]
    factor,
    M, N, K, stride_xm, stride_wn, stride_fm, softcap,
    BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, SLICES: tl.constexpr,
    EVEN: tl.constexpr, END: tl.constexpr, HAS_BIAS: tl.constexpr,
    STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    GATES: tl.constexpr = END == "gelu_tanh" or END == "silu"
    STEP: tl.constexpr = BK * SLICES
    first = tl.program_id(0) * (BR // 2 if GATES else BR)
    rows = _weight_rows(first, N, BR, GATES)
    low, high = _k_range(K, STEP)
    if PREFETCH:
        _prefetch(weight, rows, stride_wn, low, K, STEP * PREFETCH, PDL)
    wait_for_inputs(PDL)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    at = _tile(weight, rows, stride_wn, BK, SLICES)
    x_at = _tile(x, m.to(tl.int64), stride_xm, BK, SLICES)
    if SLICES == 1:
        real = (m < M)[:, None]
        y = tl.zeros((BR, BM), tl.float32)
    else:
        real = (m < M)[None, :, None]
        part = tl.zeros((SLICES, BM, BR), tl.float32)
    for start in tl.range(low, high, STEP, num_stages=STAGES):
        if EVEN:
            w = tl.load(at + start)
            v = tl.load(x_at + start, mask=real, other=0.0)
        else:
            inside = _columns(start, BK, SLICES) < K
            w = tl.load(at + start, mask=inside, other=0.0)
            v = tl.load(x_at + start, mask=real & inside, other=0.0)
        if SLICES == 1:
            y = tl.dot(w, tl.trans(v), y, input_precision="ieee")
        else:  # the weights as the right operand: they may have too few rows for a left one
            part = tl.dot(v, tl.permute(w, (0, 2, 1)), part, input_precision="ieee")
    if SLICES > 1:
        y = tl.trans(tl.sum(part, 0))
    _finish(out, bias, factor, y, first, m, M, N, stride_fm, softcap, BR, BM, END, HAS_BIAS)


def launch(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    tiling: Tiling | SpecializedTiling,
    *,
    end: str = "",
    bias: Tensor | None = None,
    factor: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Fills out [T, N], or partial sums [splits, T, N], from x [T, K] and weight [K, N] or gated
    [K, 2N], and returns it. `end` is "", "softcap", "scaled_gelu", "gelu_tanh" or "silu".
    """
    (rows, k), n = x.shape, out.shape[-1]
    assert x.stride(1) == 1
    assert weight.stride(0) == 1
    assert out.is_contiguous()
    assert bias is None or bias.stride(0) == 1
    assert factor is None or factor.stride(1) == 1
    assert out.numel() == tiling.splits * rows * n
    assert 1 <= tiling.splits <= triton.cdiv(k, tiling.step)
    if isinstance(tiling, SpecializedTiling):
        from hydraspec_kernels.linear.specialized_kernel import launch_specialized  # Gluon

        assert factor is None
        return launch_specialized(out, x, weight, tiling, end=end, bias=bias, softcap=softcap)
    grid = triton.cdiv(n, tiling.columns(end in GATED)), tiling.splits, triton.cdiv(rows, tiling.m)
    arguments = (
        *(out, x, weight, bias, factor, rows, n, k, x.stride(0), weight.stride(1)),
        *(0 if factor is None else factor.stride(0), 1.0 if softcap is None else softcap),
    )
    options = {
        **{"BR": tiling.rows, "BK": tiling.k, "END": end, "HAS_BIAS": bias is not None},
        **{"num_warps": tiling.warps, **dependent_launch(x)},
    }
    if tiling.dots:
        _tile_kernel[grid](
            *arguments,
            BM=tiling.m,
            SLICES=tiling.slices,
            EVEN=k % tiling.step == 0,
            STAGES=tiling.stages,
            PREFETCH=tiling.prefetch,
            **options,
        )
    else:
        _row_kernel[grid](*arguments, **options)
    return out

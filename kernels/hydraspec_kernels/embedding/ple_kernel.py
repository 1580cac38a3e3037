"""Per-layer inputs, a few layers of one token in a program: its table row, its normed projection,
and their sum over sqrt(2)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.norms.rms_norm_kernel import inverse_rms
from hydraspec_kernels.runtime.launch_kernel import dependent_launch, start_next, wait_for_inputs

TILE = 1024  # elements of a program


@triton.jit
def ple_inputs_kernel(
    # [T, num_layers, width]
    out_ptr,
    # [T]
    token_ids_ptr,
    # [vocab, num_layers * width]
    table_ptr,
    # [T, num_layers * width] in rows of projected_stride
    projected_ptr,
    # [width]
    norm_weight_ptr,
    vocab,
    num_layers,
    width,
    projected_stride,
    table_scale,
    projection_scale,
    eps,
    LAYERS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scaled table row plus normed projection, over the root of 2; some layers a program."""
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1) * LAYERS + tl.arange(0, LAYERS)[:, None]
    # The index is a full tile, so that the weight is loaded without a broadcast between threads.
    i = tl.zeros((LAYERS, WIDTH), tl.int32) + tl.arange(0, WIDTH)[None, :]
    inside = (layer < num_layers) & (i < width)
    weight = tl.load(norm_weight_ptr + i, mask=i < width, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    token = tl.load(token_ids_ptr + row).to(tl.int64)
    token = tl.where((token >= 0) & (token < vocab), token, 0)
    at = layer * width + i
    table_at = table_ptr + token * num_layers * width + at
    looked_up = tl.load(table_at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(projected_ptr + row * projected_stride + at, mask=inside, other=0.0)
    dtype = out_ptr.dtype.element_ty
    looked_up = (looked_up * table_scale).to(dtype).to(tl.float32)
    x = (x.to(tl.float32) * projection_scale).to(dtype).to(tl.float32)
    x = (x * inverse_rms(x, width, eps) * weight).to(dtype).to(tl.float32)
    both = (x + looked_up).to(dtype).to(tl.float32)
    out = both * 0.7071067811865476
    tl.store(out_ptr + row * num_layers * width + at, out.to(dtype), mask=inside)


def ple_inputs_cuda(
    token_ids: Tensor,
    table: Tensor,
    projected: Tensor,
    norm_weight: Tensor,
    *,
    table_scale: float,
    projection_scale: float,
    eps: float,
) -> Tensor:
    """See `embedding.ple_inputs`."""
    rows, width = token_ids.shape[0], norm_weight.shape[0]
    layers = table.shape[1] // width
    assert table.is_contiguous()
    assert norm_weight.is_contiguous()
    token_ids = token_ids.contiguous()
    assert projected.shape == (rows, layers * width)
    assert projected.stride(1) == 1
    out = torch.empty(rows, layers, width, dtype=table.dtype, device=table.device)
    if not rows:
        return out
    padded = triton.next_power_of_2(width)
    tile = max(1, TILE // padded)
    ple_inputs_kernel[(rows, triton.cdiv(layers, tile))](
        out,
        token_ids,
        table,
        projected,
        norm_weight,
        table.shape[0],
        layers,
        width,
        projected.stride(0),
        table_scale,
        projection_scale,
        eps,
        LAYERS=tile,
        WIDTH=padded,
        num_warps=4,
        **dependent_launch(table),
    )
    return out

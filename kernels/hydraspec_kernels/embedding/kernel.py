"""Gathers table rows and scales them on the way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.launch.kernel import dependent_launch, start_next, wait_for_inputs

BLOCK = 1024  # columns of a program


@triton.jit
def embed_kernel(
    # [T, width]
    out_ptr,
    # [T]
    token_ids_ptr,
    # [vocab, width]
    table_ptr,
    vocab,
    width,
    scale,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    token = tl.load(token_ids_ptr + row).to(tl.int64)
    token = tl.where((token >= 0) & (token < vocab), token, 0)
    x = tl.load(table_ptr + token * width + column, mask=column < width, other=0.0)
    out = (x.to(tl.float32) * scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + column, out, mask=column < width)


def embed_cuda(token_ids: Tensor, table: Tensor, scale: float | None) -> Tensor:
    """See `hydraspec_kernels.embedding.embed`."""
    vocab, width = table.shape
    assert table.is_contiguous()
    token_ids = token_ids.contiguous()
    out = torch.empty(*token_ids.shape, width, dtype=table.dtype, device=table.device)
    if not out.numel():
        return out
    embed_kernel[(token_ids.numel(), triton.cdiv(width, BLOCK))](
        out,
        token_ids,
        table,
        vocab,
        width,
        1.0 if scale is None else scale,
        BLOCK=BLOCK,
        num_warps=4,
        **dependent_launch(table),
    )
    return out

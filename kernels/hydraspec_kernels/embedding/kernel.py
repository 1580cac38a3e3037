"""Token embeddings in one launch: gathers table rows, scales them, and may append hidden states."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.runtime.launch_kernel import dependent_launch, start_next, wait_for_inputs

BLOCK = 1024  # columns of a program


@triton.jit
def embed_kernel(
    # [T, width + hidden_width]
    out_ptr,
    # [T]
    token_ids_ptr,
    # [vocab, width]
    table_ptr,
    # [T, hidden_width], or rows of it at rows_ptr; None: hidden_width is 0
    hidden_ptr,
    # [T] or None
    rows_ptr,
    vocab,
    width,
    hidden_width,
    hidden_stride,
    scale,
    # the token of the table's row 0
    first,
    # other tokens give zeros; else row 0
    IS_PART: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows of the table times `scale`, each followed by its hidden state where one is given."""
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    token = tl.load(token_ids_ptr + row).to(tl.int64)
    if IS_PART:
        token -= first
    is_here = (token >= 0) & (token < vocab)
    token = tl.where(is_here, token, 0)
    is_read = column < width
    if IS_PART:
        is_read = is_read & is_here
    x = tl.load(table_ptr + token * width + column, mask=is_read, other=0.0)
    out = (x.to(tl.float32) * scale).to(out_ptr.dtype.element_ty)
    if hidden_ptr is not None:
        source = row if rows_ptr is None else tl.load(rows_ptr + row).to(tl.int64)
        place = column - width
        is_hidden = (place >= 0) & (place < hidden_width)
        y = tl.load(hidden_ptr + source * hidden_stride + place, mask=is_hidden, other=0.0)
        out = tl.where(is_hidden, y, out)
    row_width = width + hidden_width
    tl.store(out_ptr + row * row_width + column, out, mask=column < row_width)


def embed_cuda(token_ids: Tensor, table: Tensor, scale: float | None) -> Tensor:
    """See `embedding.embed`."""
    out = table.new_empty(*token_ids.shape, table.shape[1])
    return _launch(out, token_ids.contiguous(), table, scale, None, None)


def embed_part_cuda(
    token_ids: Tensor, table: Tensor, first: int, num_tokens: int, scale: float | None
) -> Tensor:
    """See `embedding.embed_part`."""
    out = table.new_empty(*token_ids.shape, table.shape[1])
    return _launch(out, token_ids.contiguous(), table[:num_tokens], scale, None, None, first)


def embed_beside_cuda(
    token_ids: Tensor, table: Tensor, scale: float | None, hidden: Tensor, rows: Tensor | None
) -> Tensor:
    """See `embedding.embed_beside`."""
    assert hidden.stride(1) == 1, hidden.stride()
    assert hidden.dtype is table.dtype
    assert rows is not None or len(hidden) == len(token_ids)
    out = table.new_empty(len(token_ids), table.shape[1] + hidden.shape[1])
    return _launch(out, token_ids.contiguous(), table, scale, hidden, rows)


def _launch(
    out: Tensor,
    token_ids: Tensor,
    table: Tensor,
    scale: float | None,
    hidden: Tensor | None,
    rows: Tensor | None,
    first: int | None = None,
) -> Tensor:
    assert table.is_contiguous()
    if not out.numel():
        return out
    embed_kernel[(token_ids.numel(), triton.cdiv(out.shape[-1], BLOCK))](
        out,
        token_ids,
        table,
        hidden,
        rows,
        *table.shape,
        out.shape[-1] - table.shape[1],
        0 if hidden is None else hidden.stride(0),
        1.0 if scale is None else scale,
        first or 0,
        IS_PART=first is not None,
        BLOCK=BLOCK,
        num_warps=4,
        **dependent_launch(table),
    )
    return out

"""What the fused kernel relies on."""

from __future__ import annotations

from torch import Tensor

from hydraspec_kernels.attention.paged.plan import DevicePlan
from hydraspec_kernels.attention.qkv_write.reference import QkvShape


def check_arguments(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, cache: Tensor, plan: DevicePlan,
    shape: QkvShape, writes: bool,
) -> None:  # fmt: skip
    """Shapes, strides and types; see `attend_projection`."""
    group = plan.shape
    rows, size = qkv.shape[0], group.head_dim
    assert (shape.num_heads, shape.head_dim) == (group.num_heads, size)
    kinds = 0 if not writes else 1 if shape.k_eq_v else 2
    assert qkv.shape[1] == (group.num_heads + kinds * group.num_kv_heads) * size, qkv.shape
    assert qkv.stride(1) == 1
    assert cos.shape == sin.shape == (rows, 1, size)
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert cache.shape[1:] == (2, group.num_kv_heads, size), cache.shape
    assert cache.is_contiguous(), "tokens of the cache are contiguous"
    assert qkv.dtype is cache.dtype is cos.dtype is sin.dtype
    assert plan.block_table.stride(1) == 1, "rows of the block table are contiguous"
    if writes:
        assert shape.num_kv_heads == group.num_kv_heads
        assert slots.shape == (rows,)
        assert slots.stride(0) == 1
    for weight in (shape.q_weight, shape.k_weight):
        assert weight is None or (weight.shape == (size,) and weight.is_contiguous())
    if plan.query_start_loc is None:
        assert rows == plan.num_requests, "without query_start_loc a row is a request"

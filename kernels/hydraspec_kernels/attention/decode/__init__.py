"""A layer's attention from its projection on: one kernel where requests have few rows."""

from __future__ import annotations

from torch import Tensor

from hydraspec_kernels.attention.decode.tiling import fits
from hydraspec_kernels.attention.paged import AttentionPlan, DevicePlan, paged_attention
from hydraspec_kernels.attention.qkv_write import QkvShape, write_qkv
from hydraspec_kernels.runtime import breaks

__all__ = ["attend_projection"]


def attend_projection(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    cache: Tensor,
    plan: AttentionPlan,
    shape: QkvShape,
    *,
    writes: bool,
) -> Tensor:
    """qkv [T, heads * H] -> [T, Hq * H]: `write_qkv`, then `paged_attention` over cache.

    cache is [rows, 2, Hkv, H]. writes false: a layer that shares KV, whose qkv holds query heads
    only, and whose cache is only read. A slot is -1 or the place of its row's position in the
    plan's block table. A capture in pieces is cut here.
    """
    if isinstance(plan, DevicePlan) and qkv.element_size() < 8 and fits(plan):
        return breaks.run(_fused, qkv, cos, sin, slots, cache, plan, shape, writes)
    q = write_qkv(qkv, cos, sin, slots, cache if writes else None, shape)
    return paged_attention(q, cache, plan)


def _fused(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    cache: Tensor,
    plan: DevicePlan,
    shape: QkvShape,
    writes: bool,
) -> Tensor:
    from hydraspec_kernels.attention.decode.kernel import attend_projection_kernel  # Triton

    return attend_projection_kernel(qkv, cos, sin, slots, cache, plan, shape, writes=writes)

"""Attention of a layer's projection: heads, cache write, then attention over the cache."""

from __future__ import annotations

from torch import Tensor

from hydraspec_kernels.attention.paged.plan import DevicePlan
from hydraspec_kernels.attention.paged.reference import planned_attention_reference
from hydraspec_kernels.attention.qkv_write.reference import QkvShape, write_qkv_reference


def attend_projection_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    cache: Tensor,
    plan: DevicePlan,
    shape: QkvShape,
    *,
    writes: bool,
) -> Tensor:
    """See `hydraspec_kernels.attention.decode.attend_projection`."""
    q = write_qkv_reference(qkv, cos, sin, slots, cache if writes else None, shape)
    return planned_attention_reference(q, cache, plan)

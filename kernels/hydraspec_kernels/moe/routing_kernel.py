"""Both routers, a warp for each token: scores in registers, and k times the best one is taken.

Equal scores go to the lowest expert. A row of NaN chooses experts in range.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.runtime.launch_kernel import dependent_launch, start_next, wait_for_inputs


@triton.jit
def lowest_best(scores, ids, limit):
    """The largest of `scores`, and the lowest of `ids` with this score, always below `limit`."""
    best = tl.max(scores)
    return best, tl.minimum(tl.min(tl.where(scores == best, ids, limit)), limit - 1)


@triton.jit
def route_kernel(
    # [T, top_k] float32
    weights_ptr,
    # [T, top_k]
    chosen_ptr,
    # [T, experts] in rows of logits_stride
    logits_ptr,
    # [experts]
    scale_ptr,
    experts,
    top_k,
    logits_stride,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Softmax routing: the top_k experts of a row, weights normalised and scaled per expert."""
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, EXPERTS), tl.arange(0, TOP_K)
    wait_for_inputs(PDL)
    logits = tl.load(
        logits_ptr + row * logits_stride + expert, mask=expert < experts, other=-float("inf")
    ).to(tl.float32)
    shares = tl.exp(logits - tl.max(logits))
    shares /= tl.sum(shares)
    weights = tl.zeros((TOP_K,), tl.float32)
    chosen = tl.zeros((TOP_K,), tl.int32)
    for j in range(top_k):
        best, index = lowest_best(shares, expert, experts)
        weights = tl.where(place == j, best, weights)
        chosen = tl.where(place == j, index, chosen)
        shares = tl.where(expert == index, -1.0, shares)
    inside = place < top_k
    weights /= tl.sum(weights)
    weights *= tl.load(scale_ptr + chosen, mask=inside, other=0.0).to(tl.float32)
    tl.store(weights_ptr + row * top_k + place, weights, mask=inside)
    tl.store(chosen_ptr + row * top_k + place, chosen.to(tl.int64), mask=inside)


@triton.jit
def route_grouped_kernel(
    # [T, top_k] float32
    weights_ptr,
    # [T, top_k]
    chosen_ptr,
    # [T, groups * size] in rows of logits_stride
    logits_ptr,
    # [groups * size]
    bias_ptr,
    groups,
    size,
    kept,
    top_k,
    logits_stride,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sigmoid routing within the best groups: the top_k experts of a row and their weights."""
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    group, place = tl.arange(0, GROUPS), tl.arange(0, TOP_K)
    within = tl.arange(0, SIZE)[None, :]
    inside = (group[:, None] < groups) & (within < size)
    expert = group[:, None] * size + within
    bias = tl.load(bias_ptr + expert, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    logits = tl.load(logits_ptr + row * logits_stride + expert, mask=inside, other=0.0)
    scores = 1.0 / (1.0 + tl.exp(-logits.to(tl.float32)))
    biased = tl.where(inside, scores + bias, -float("inf"))
    if kept < groups:
        first = tl.max(biased, axis=1)
        at = tl.min(tl.where(biased == first[:, None], expert, groups * size), axis=1)
        second = tl.max(tl.where(expert == at[:, None], -float("inf"), biased), axis=1)
        sums = tl.where(group < groups, first + second, -float("inf"))
        open_groups = tl.zeros((GROUPS,), tl.int32)
        for _ in range(kept):
            _best, index = lowest_best(sums, group, groups)
            open_groups = tl.where(group == index, 1, open_groups)
            sums = tl.where(group == index, -float("inf"), sums)
        biased = tl.where(open_groups[:, None] > 0, biased, -float("inf"))
    weights = tl.zeros((TOP_K,), tl.float32)
    chosen = tl.zeros((TOP_K,), tl.int32)
    for j in range(top_k):
        _best, index = lowest_best(biased, expert, groups * size)
        score = tl.sum(tl.where(inside & (expert == index), scores, 0.0))
        weights = tl.where(place == j, score, weights)
        chosen = tl.where(place == j, index, chosen)
        biased = tl.where(expert == index, -float("inf"), biased)
    tl.store(weights_ptr + row * top_k + place, weights, mask=place < top_k)
    tl.store(chosen_ptr + row * top_k + place, chosen.to(tl.int64), mask=place < top_k)


def _outputs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], k)
    return (
        torch.empty(shape, dtype=torch.float32, device=logits.device),
        torch.empty(shape, dtype=torch.int64, device=logits.device),
    )


def route_cuda(logits: Tensor, k: int, scale: Tensor) -> tuple[Tensor, Tensor]:
    """See `moe.route`."""
    rows, experts = logits.shape
    assert k <= experts
    assert logits.stride(1) == 1
    assert scale.shape == (experts,)
    assert scale.is_contiguous()
    weights, chosen = _outputs(logits, k)
    if rows:
        route_kernel[(rows,)](
            weights,
            chosen,
            logits,
            scale,
            experts,
            k,
            logits.stride(0),
            EXPERTS=triton.next_power_of_2(experts),
            TOP_K=triton.next_power_of_2(k),
            num_warps=1,
            **dependent_launch(logits),
        )
    return weights, chosen


def route_grouped_cuda(
    logits: Tensor, bias: Tensor, k: int, num_groups: int, kept_groups: int
) -> tuple[Tensor, Tensor]:
    """See `moe.route_grouped`."""
    rows, experts = logits.shape
    size = experts // num_groups
    assert experts == num_groups * size
    assert k <= size * kept_groups
    assert logits.stride(1) == 1
    assert bias.shape == (experts,)
    assert bias.is_contiguous()
    weights, chosen = _outputs(logits, k)
    if rows:
        route_grouped_kernel[(rows,)](
            weights,
            chosen,
            logits,
            bias,
            num_groups,
            size,
            kept_groups,
            k,
            logits.stride(0),
            GROUPS=triton.next_power_of_2(num_groups),
            SIZE=triton.next_power_of_2(size),
            TOP_K=triton.next_power_of_2(k),
            num_warps=1,
            **dependent_launch(logits),
        )
    return weights, chosen

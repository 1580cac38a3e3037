"""What DeepSeek-V3 adds to the kernels: attention over a latent cache, and routing in groups."""

import pytest
import torch
from hydraspec_kernels.activation import gated_activation
from hydraspec_kernels.attention import (
    GroupShape,
    RowSegment,
    paged_attention,
    plan,
    plan_attention,
)
from hydraspec_kernels.attention.reference import paged_attention_reference
from hydraspec_kernels.moe import moe, route_grouped
from hydraspec_kernels.moe.cpu import moe_dense, moe_gather
from hydraspec_kernels.moe.reference import moe_reference

TOLERANCE = 1e-12  # float64 sums in another order
LATENT, ROTARY, HEADS, SCALE = 6, 4, 3, 0.7


CASES = {  # rows of each request, lengths, block size
    "one row each": ([1, 1, 1], [5, 1, 9], 4),
    "a verify step": ([3, 3], [8, 3], 4),
    "decode and prefill": ([1, 1, 7], [4, 8, 9], 2),
    "blocks of one": ([2, 2], [5, 6], 1),
}


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "tiles"])
@pytest.mark.parametrize("name", CASES)
def test_latent_attention_reads_values_from_its_keys(
    name: str, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The definition sees the cache as K = row, V = the row's latent part; the rest is NaN."""
    if cut:
        monkeypatch.setattr(plan, "MAX_TILE_SCORES", 60)
    rows, lens, block = CASES[name]
    draw = torch.Generator().manual_seed(1)
    width, per_request = LATENT + ROTARY, -(-max(lens) // block)
    blocks = len(rows) * per_request
    table = torch.randperm(blocks, generator=draw).view(len(rows), per_request) + 1
    cache = torch.full(((blocks + 1) * block, 1, width), torch.nan, dtype=torch.float64)
    cache[:block] = 0
    for request, length in enumerate(lens):
        j = torch.arange(length)
        slots = table[request, j // block] * block + j % block
        cache[slots] = torch.randn(length, 1, width, dtype=torch.float64, generator=draw)
    query = torch.randn(sum(rows), HEADS, width, dtype=torch.float64, generator=draw)
    positions = torch.cat([torch.arange(n - r, n) for r, n in zip(rows, lens, strict=True)])
    segments, row, request = [], 0, 0
    for count in sorted(set(rows)):
        num = rows.count(count)
        segments.append(
            RowSegment(row, request, num, count, max(lens[request : request + num]) + 3)
        )
        row, request = row + num * count, request + num
    shape = GroupShape(
        num_heads=HEADS,
        num_kv_heads=1,
        head_dim=width,
        block_size=block,
        window=None,
        scale=SCALE,
        latent_dim=LATENT,
    )
    made = plan_attention(shape, segments, table, torch.tensor(lens), positions, torch.float64)
    request_of_row = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))
    both = cache[:, None].expand(-1, 2, 1, width)
    expected = paged_attention_reference(
        query, both, table, positions, request_of_row, block, None, SCALE
    )[..., :LATENT]
    out = paged_attention(query, cache, made)
    assert (out - expected.flatten(1)).abs().max() < TOLERANCE


def test_the_bias_chooses_and_does_not_weigh() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0]])
    bias = torch.tensor([0.0, 0.0, 5.0, 0.0])
    weights, experts = route_grouped(logits, bias, 2, 1, 1)
    assert set(experts[0].tolist()) == {2, 3}
    assert torch.allclose(weights, logits.sigmoid().gather(1, experts))


def test_the_best_expert_of_a_dropped_group_is_not_chosen() -> None:
    # Group 0 holds the best expert and a bad one; group 1 has the larger sum of two.
    logits = torch.tensor([[4.0, -9.0, 1.0, 1.5]])
    _, experts = route_grouped(logits, torch.zeros(4), 2, 2, 1)
    assert set(experts[0].tolist()) == {2, 3}


@pytest.mark.parametrize("path", [moe, moe_gather, moe_dense])
def test_experts_with_silu_gates(path: object) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4, 8, generator=draw, dtype=torch.float64)
    gate_up = torch.randn(7, 8, 12, generator=draw, dtype=torch.float64)
    down = torch.randn(7, 6, 8, generator=draw, dtype=torch.float64)
    weights = torch.rand(4, 3, generator=draw, dtype=torch.float64)
    experts = torch.tensor([[0, 1, 2], [6, 5, 4], [3, 0, 6], [2, 4, 1]])
    rows = []
    for t in range(4):
        parts = [
            gated_activation(x[t] @ gate_up[e], "silu") @ down[e] * w
            for e, w in zip(experts[t], weights[t], strict=True)
        ]
        rows.append(torch.stack(parts).sum(0))
    out = path(x, weights, experts, gate_up, down, "silu")  # type: ignore[operator]
    assert torch.allclose(out, torch.stack(rows))
    assert not torch.allclose(out, moe_reference(x, weights, experts, gate_up, down))

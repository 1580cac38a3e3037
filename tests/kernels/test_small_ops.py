"""Norms, rotary positions, activation, experts and the centroid head, each against its
definition.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from hydraspec_kernels.activation import gated_activation
from hydraspec_kernels.convolution import block_convolution
from hydraspec_kernels.embedding import centroid_greedy, centroid_head
from hydraspec_kernels.moe import moe, route, route_grouped
from hydraspec_kernels.moe.cpu import moe_dense, moe_gather
from hydraspec_kernels.moe.reference import moe_reference
from hydraspec_kernels.norms import NormGain, add_norm, add_norm_cpu, rms_norm, rms_norm_cpu
from hydraspec_kernels.rope import apply_rope, mirrored, rope_frequencies, rope_table


def test_the_norms_weight_is_w_and_not_one_plus_w() -> None:
    x = torch.tensor([[3.0, 4.0]])
    out = rms_norm(x, torch.tensor([1.0, 2.0]), 0.0)
    assert torch.allclose(out, torch.tensor([[3.0, 8.0]]) / math.sqrt(12.5))
    assert torch.allclose(rms_norm(x, None, 0.0), x / math.sqrt(12.5))


@pytest.mark.parametrize("eps", [1e-6, 1.0])
def test_the_cpu_norm_is_the_norm(eps: float) -> None:
    x, w = torch.randn(5, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    x[0] = 0  # eps alone keeps a zero row finite
    assert torch.allclose(rms_norm_cpu(x, NormGain.of(w, eps)), rms_norm(x, w, eps), atol=1e-12)


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("has_next", [True, False])
@pytest.mark.parametrize("has_post", [True, False])
@pytest.mark.parametrize("parts", [0, 1, 3])
def test_the_cpu_sum_with_norms_is_the_reference(
    parts: int, has_post: bool, has_next: bool, scale: float | None
) -> None:
    eps = 1e-6
    h = torch.randn(5, 7, dtype=torch.float64)
    x = torch.randn(parts, 5, 7, dtype=torch.float64) if parts else torch.randn(5, 7).double()
    post, following = torch.randn(2, 7, dtype=torch.float64)
    expected = add_norm(
        h.clone(),
        x,
        post_weight=post if has_post else None,
        next_weight=following if has_next else None,
        eps=eps,
        scale=scale,
        has_post_norm=has_post,
    )
    found = add_norm_cpu(
        h.clone(),
        x,
        post=NormGain.of(post, eps) if has_post else None,
        next_norm=NormGain.of(following, eps) if has_next else None,
        scale=scale,
    )
    assert torch.allclose(found.h, expected.h, atol=1e-12)
    assert (found.y is None) == (expected.y is None)
    if found.y is not None and expected.y is not None:
        assert torch.allclose(found.y, expected.y, atol=1e-12)


def test_a_narrow_norm_rounds_once() -> None:
    x, w = torch.randn(3, 64).bfloat16(), torch.rand(64).bfloat16()
    wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6) * w.float()
    assert torch.equal(rms_norm(x, w, 1e-6), wide.bfloat16())


def test_proportional_rope_turns_the_first_quarter_of_the_pairs() -> None:
    theta = rope_frequencies(512, 1e6, share=0.25)
    assert torch.allclose(theta[:64], 1e6 ** (-2 * torch.arange(64) / 512))  # denominator 512
    assert (theta[64:] == 0).all()
    x = torch.randn(1, 1, 512)
    out = apply_rope(x.clone(), *rope_table(torch.tensor([5]), mirrored(theta), x.dtype))
    untouched = [*range(64, 256), *range(320, 512)]
    assert torch.equal(out[..., untouched], x[..., untouched])
    a, b = x[0, 0, 0], x[0, 0, 256]  # the pair (0, 256) turns by 5 radians
    turned = torch.stack((a * math.cos(5) - b * math.sin(5), b * math.cos(5) + a * math.sin(5)))
    assert torch.allclose(out[0, 0, [0, 256]], turned, atol=1e-6)


def test_rope_scores_depend_on_distance_only() -> None:
    frequencies = mirrored(rope_frequencies(16, 1e4))
    q, k = torch.randn(16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    frequencies = type(frequencies)(*(f.double() for f in frequencies))

    def score(p: int, j: int) -> torch.Tensor:
        table = rope_table(torch.tensor([p, j]), frequencies, torch.float64)
        a, b = apply_rope(torch.stack((q, k))[:, None].clone(), *table)[:, 0]
        return a @ b

    assert torch.allclose(score(9, 4), score(105, 100))


def test_the_gate_is_the_first_half() -> None:
    gate, up = torch.randn(3, 4), torch.randn(3, 4)
    both = torch.cat((gate, up), -1)
    assert torch.allclose(gated_activation(both), F.gelu(gate, approximate="tanh") * up)
    assert torch.allclose(gated_activation(both, "silu"), F.silu(gate) * up)


def test_routing_renormalises_and_then_scales() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    weights, experts = route(logits, 2, torch.tensor([1.0, 0.5, 1.0, 4.0]))
    assert experts.tolist() == [[1, 3]]
    share = torch.softmax(torch.tensor([3.0, 2.0]), 0)
    assert torch.allclose(weights, (share * torch.tensor([0.5, 4.0]))[None])
    assert not torch.allclose(weights.sum(), torch.tensor(1.0))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("path", [moe, moe_gather, moe_dense])
def test_expert_paths_agree(path: object, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hydraspec_kernels.moe.cpu.MAX_CHUNK_NUMBERS", 100)  # several chunks
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 8, generator=draw, dtype=torch.float64)
    gate_up = torch.randn(7, 8, 12, generator=draw, dtype=torch.float64)
    down = torch.randn(7, 6, 8, generator=draw, dtype=torch.float64)
    logits = torch.randn(rows, 7, generator=draw, dtype=torch.float64)
    weights, experts = route(logits, 3, torch.ones(7, dtype=torch.float64))
    expected = moe_reference(x, weights, experts, gate_up, down)
    assert torch.allclose(path(x, weights, experts, gate_up, down), expected)  # type: ignore[operator]


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


@pytest.fixture
def head() -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(3)
    d, table = torch.randn(6, 8, generator=draw), torch.randn(40, 8, generator=draw)
    centroids = torch.randn(8, 10, generator=draw)
    clusters = torch.randperm(40, generator=draw).view(10, 4)
    return d, table, centroids, clusters


def test_the_centroid_head_is_the_dense_head_on_its_candidates(head: tuple) -> None:
    d, table, centroids, clusters = head
    logits = centroid_head(d, table, centroids, clusters, 3)
    dense = d @ table.t()
    for row in range(6):
        ids = clusters[(d[row] @ centroids).topk(3).indices].flatten()
        assert torch.allclose(logits[row, ids], dense[row, ids], atol=1e-6)
        others = torch.ones(40, dtype=torch.bool)
        others[ids] = False
        assert (logits[row, others] == torch.finfo(torch.float32).min).all()
    assert torch.equal(centroid_greedy(d, table, centroids, clusters, 3, None), logits.argmax(-1))
    every = centroid_head(d, table, centroids, clusters, 10)
    assert torch.allclose(every, dense, atol=1e-6)


def test_ties_go_to_the_lowest_id_and_banned_tokens_never_win(head: tuple) -> None:
    d, _, centroids, clusters = head
    same = torch.ones(40, 8)
    candidates = clusters[(d @ centroids).topk(3, dim=-1).indices].flatten(1)
    lowest = candidates.amin(-1)
    assert torch.equal(centroid_greedy(d, same, centroids, clusters, 3, None), lowest)
    banned = torch.zeros(40, dtype=torch.bool)
    banned[lowest] = True
    chosen = centroid_greedy(d, same, centroids, clusters, 3, banned)
    assert not banned[chosen].any()


def test_a_convolution_begins_anew_in_each_block() -> None:
    x = torch.tensor([[1.0], [2.0], [4.0], [8.0]]).double()
    delta = torch.tensor([[1.0, 0.0]] * 3 + [[0.0, 2.0]]).double().unsqueeze(2)
    base = torch.tensor([[10.0], [100.0]]).double()
    found = block_convolution(x, delta, base, 2)
    assert found[:, 0].tolist() == [11 * 1, 11 * 2 + 100 * 1, 11 * 4, 10 * 8 + 102 * 4]

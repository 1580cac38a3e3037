"""Routers and experts against their references, in Triton's interpreter and on a GPU."""

import pytest
import torch
from hydraspec_kernels.activation import gated_activation
from hydraspec_kernels.moe.cpu import moe_dense
from hydraspec_kernels.moe.kernel import group_pairs, moe_cuda
from hydraspec_kernels.moe.reference import route_grouped_reference, route_reference
from hydraspec_kernels.moe.routing_kernel import route_cuda, route_grouped_cuda
from kernel_places import DEVICES, poison
from torch import Tensor

# Float32 products summed in another order, over some thousand terms; narrow ones are compared with
# float64, and differ by the roundings of the inner row, of each expert and of their sum.
CLOSE = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2**-6},
    torch.float16: {"rtol": 2**-9, "atol": 2**-9},
}


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


def experts_of(
    experts: int, size: int, inner: int, dtype: torch.dtype, device: str, *, transposed: bool
) -> tuple[Tensor, Tensor]:
    """gate_up [E, D, 2I] and down [E, I, D]; transposed: as views of checkpoints' storage."""
    draw = torch.Generator().manual_seed(experts)
    gate_up = torch.randn(experts, size, 2 * inner, generator=draw) * size**-0.5
    down = torch.randn(experts, inner, size, generator=draw) * inner**-0.5
    both = gate_up.to(device, dtype), down.to(device, dtype)
    if not transposed:
        return both
    first, second = (part.transpose(1, 2).contiguous().transpose(1, 2) for part in both)
    return first, second


def routed(rows: int, experts: int, k: int, device: str) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, experts, generator=draw)
    logits[:, experts // 2] += 2  # a crowded expert
    weights, chosen = route_reference(logits, k, torch.ones(experts))
    return weights.to(device), chosen.to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(
    ("rows", "experts", "k", "size", "inner"),
    [(1, 7, 3, 24, 20), (5, 7, 2, 40, 6), (21, 3, 2, 33, 16), (60, 2, 1, 16, 17)],
    ids=["a row is not sorted", "most experts idle", "blocks of several rows", "several blocks"],
)
def test_experts_in_float32(rows, experts, k, size, inner, transposed, device):
    gate_up, down = experts_of(experts, size, inner, torch.float32, device, transposed=transposed)
    weights, chosen = routed(rows, experts, k, device)
    (x,) = (torch.randn(rows, size, generator=torch.Generator().manual_seed(8)).to(device),)
    for activation in ("gelu_tanh", "silu"):
        expected = moe_dense(x, weights, chosen, gate_up, down, activation)
        found = moe_cuda(x, weights, chosen, gate_up, down, activation)
        torch.testing.assert_close(found, expected, **CLOSE[torch.float32])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [2, 37, 300])
def test_blocks_hold_every_pair_once_with_its_expert(rows, device):
    experts, block = 5, 16
    _, chosen = routed(rows, experts, 4, device)
    grouping = group_pairs(chosen, experts, block)
    flat, pairs = chosen.flatten().tolist(), grouping.pairs.tolist()
    owners = grouping.block_experts.tolist()
    assert len(owners) == grouping.blocks
    found = []
    for owner, members in zip(owners, pairs, strict=True):
        if owner >= 0:
            real = [p for p in members if p != len(flat)]
            assert real
            assert {flat[p] for p in real} == {owner}
            assert members == real + [len(flat)] * (block - len(real))
            found += real
    assert sorted(found) == list(range(len(flat)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 32, 128, 700, 2048])
@pytest.mark.parametrize("shape", [(128, 8, 2816, 704), (16, 2, 520, 200)])
def test_experts_at_model_sizes_are_near_float64(shape, rows, dtype):
    experts, k, size, inner = shape
    gate_up, down = experts_of(experts, size, inner, dtype, "cuda", transposed=True)
    weights, chosen = routed(rows, experts, k, "cuda")
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(8)).to("cuda", dtype)
    found = moe_cuda(x, weights, chosen, gate_up, down, "gelu_tanh")
    exact = torch.zeros(rows, size, dtype=torch.float64, device="cuda")
    for e in range(experts):
        share = (weights * (chosen == e)).sum(-1, keepdim=True).double()
        inner_rows = gated_activation(x.double() @ gate_up[e].double())
        exact += share * (inner_rows @ down[e].double())
    torch.testing.assert_close(found.double(), exact, **CLOSE[dtype])
    again = moe_cuda(x, weights, chosen, gate_up, down, "gelu_tanh")
    assert torch.equal(found, again)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "experts", "k"), [(1, 4, 2), (5, 7, 3), (3, 128, 8), (2, 200, 5)])
def test_routing_is_its_reference(rows, experts, k, device):
    draw = torch.Generator().manual_seed(experts)
    logits = torch.randn(rows, experts, generator=draw).to(device) * 3
    scale = torch.rand(experts, generator=draw).to(device)
    expected = route_reference(logits, k, scale)
    weights, chosen = route_cuda(logits, k, scale)
    assert torch.equal(chosen, expected[1])
    torch.testing.assert_close(weights, expected[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("rows", "groups", "size", "kept", "k"),
    [(3, 4, 3, 2, 4), (5, 8, 32, 4, 8), (2, 3, 5, 3, 6), (4, 1, 16, 1, 6)],
)
def test_grouped_routing_is_its_reference(rows, groups, size, kept, k, device):
    draw = torch.Generator().manual_seed(groups)
    logits = torch.randn(rows, groups * size, generator=draw).to(device)
    bias = torch.randn(groups * size, generator=draw).to(device)
    expected = route_grouped_reference(logits, bias, k, groups, kept)
    weights, chosen = route_grouped_cuda(logits, bias, k, groups, kept)
    assert torch.equal(chosen, expected[1])
    torch.testing.assert_close(weights, expected[0])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's word for the NaN
@pytest.mark.parametrize("device", DEVICES)
def test_a_tie_goes_to_the_lowest_expert_and_nan_stays_in_range(device):
    logits = torch.zeros(2, 6, device=device)
    logits[1] = float("nan")
    ones = torch.ones(6, device=device)
    for _, chosen in (route_cuda(logits, 3, ones), route_grouped_cuda(logits, ones, 3, 2, 1)):
        assert chosen[0].tolist() == [0, 1, 2]
        assert ((chosen >= 0) & (chosen < 6)).all()

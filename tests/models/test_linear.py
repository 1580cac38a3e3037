"""A linear map: its names in a checkpoint, its shares over ranks, and what it computes."""

import pytest
import torch
from torch import Tensor

from hydraspec.models.linear import Linear
from hydraspec.models.parts import held
from hydraspec.models.place import Place
from hydraspec.parallel.group import SoloGroup

CPU = torch.device("cpu")
WHOLE = {"q_proj": (12, 8), "k_proj": (4, 8), "v_proj": (4, 8)}  # [n, k], as in a checkpoint


def place(rank: int = 0, size: int = 1) -> Place:
    group = SoloGroup()
    group.rank, group.size = rank, size
    return Place(torch.float64, CPU, group)


def fill(made: Linear, whole: dict[str, Tensor]) -> Linear:
    """Each weight's region of the whole tensors, as loading reads it."""
    for name, weight in made.tensors().items():
        tensor = whole[name]
        found = tensor if weight is held(weight) else weight.read(tensor.__getitem__)
        assert weight.shape == tensor.shape, name
        held(weight).copy_(found)
    return made


def drawn(*, bias: bool) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = {f"{name}.weight": shape for name, shape in WHOLE.items()}
    if bias:
        shapes |= {f"{name}.bias": shape[:1] for name, shape in WHOLE.items()}
    return {
        name: torch.randn(shape, generator=draw, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def qkv(at: Place, *, bias: bool) -> Linear:
    return Linear(at, 8, {name: at.share(rows) for name, (rows, _) in WHOLE.items()}, bias=bias)


def plain(x: Tensor, whole: dict[str, Tensor]) -> list[Tensor]:
    return [
        torch.nn.functional.linear(x, whole[f"{name}.weight"], whole.get(f"{name}.bias"))
        for name in WHOLE
    ]


X = torch.randn(5, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize("bias", [False, True])
def test_a_slab_computes_its_projections_side_by_side(bias: bool) -> None:
    whole = drawn(bias=bias)
    made = fill(qkv(place(), bias=bias), whole)
    expected = torch.cat(plain(X, whole), -1)
    assert torch.allclose(made.forward(X), expected)
    assert torch.allclose(made.by_library(X, 12), expected[:, 12:])
    sums = made.partial_sums(X)
    assert torch.allclose(sums.sum(0) if sums.dim() == 3 else sums, expected)


@pytest.mark.parametrize("bias", [False, True])
def test_ranks_hold_their_columns_of_every_projection(bias: bool) -> None:
    """A slab cut as one matrix would give rank 0 queries alone."""
    whole = drawn(bias=bias)
    ranks = [fill(qkv(place(rank, 2), bias=bias), whole).forward(X) for rank in range(2)]
    per_rank = [made.split([6, 2, 2], -1) for made in ranks]
    joined = [torch.cat(parts, -1) for parts in zip(*per_rank, strict=True)]
    for ours, expected in zip(joined, plain(X, whole), strict=True):
        assert torch.allclose(ours, expected)


@pytest.mark.parametrize("bias", [False, True])
def test_rows_over_ranks_add_up_and_the_bias_counts_once(bias: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    whole = {"o_proj.weight": torch.randn(6, 8, generator=draw, dtype=torch.float64)}
    if bias:
        whole["o_proj.bias"] = torch.randn(6, generator=draw, dtype=torch.float64)
    total = torch.zeros(5, 6, dtype=torch.float64)
    for rank in range(2):
        at = place(rank, 2)
        made = fill(Linear(at, at.share(8), {"o_proj": 6}, bias=bias), whole)
        sums = made.partial_sums(X[:, rank * 4 : rank * 4 + 4])
        total += sums.sum(0) if sums.dim() == 3 else sums
    expected = torch.nn.functional.linear(X, whole["o_proj.weight"], whole.get("o_proj.bias"))
    assert torch.allclose(total, expected)


def test_edited_copies_leave_the_original_as_it_is() -> None:
    whole = drawn(bias=False)
    made = fill(qkv(place(), bias=False), whole)
    before = made.weight.clone()
    assert made.reordered("o_proj", lambda rows: rows.flip(0)) is made
    turned = made.reordered("k_proj", lambda rows: rows.flip(0))
    assert made.weight.equal(before)
    tensors = {name: held(weight) for name, weight in turned.tensors().items()}
    assert tensors["k_proj.weight"].equal(whole["k_proj.weight"].flip(0))
    assert tensors["q_proj.weight"].equal(whole["q_proj.weight"])


def test_gate_and_up_change_places() -> None:
    at = place()
    made = Linear(at, 8, {"gate_proj": 3, "up_proj": 3}, bias=True)
    draw = torch.Generator().manual_seed(4)
    for weight in made.tensors().values():
        held(weight).normal_(generator=draw)
    y = made.forward(X)
    assert torch.allclose(made.swapped().forward(X), y.roll(3, 1))
    gate, up = y.chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    assert torch.allclose(made.gated(X, "silu"), expected)

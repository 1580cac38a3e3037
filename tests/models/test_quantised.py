"""Linear maps and experts with quantised matrices: memory, shares of ranks, and what they compute,
beside the decoded matrix and a rounding of rows written here.

Catches a scale of a neighbouring block, row or projection, a rank that reads another's scales, rows
rounded by a part of their magnitudes, gate and up in each other's places, and numbers of a row that
depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hydraspec_kernels.quantised import E4M3
from torch import Tensor

from hydraspec.errors import CheckpointError, ConfigurationError
from hydraspec.models.checkpoint import quantization
from hydraspec.models.checkpoint.quantization import Scheme, decode, encode
from hydraspec.models.linear import Linear
from hydraspec.models.moe import RoutedExperts
from hydraspec.models.parts import Part, Share, held
from hydraspec.models.place import Place
from hydraspec.parallel.group import SoloGroup

CPU = torch.device("cpu")
TOKEN = Scheme(kind="fp8", rows=1, columns=None, inputs="token")
SCHEMES = {
    "per token": TOKEN,
    "blocks": Scheme(kind="fp8", rows=8, columns=16, inputs="group", group=16),
    "odd blocks": Scheme(kind="fp8", rows=5, columns=8, inputs="group", group=8),
    "static": Scheme(
        kind="fp8", rows=None, columns=None, inputs="static", input_scale="input_scale"
    ),
    "int4": Scheme(kind="int4", rows=1, columns=16, inputs="float"),
}
WIDTH = 32
ROWS = {"q_proj": 24, "k_proj": 8, "v_proj": 8}
Files = dict[str, dict[str, Tensor]]


class Ranks(SoloGroup):
    """A rank that knows what the others would send."""

    def __init__(self, rank: int, size: int, sent: Tensor | None = None) -> None:
        self.rank, self.size, self.sent = rank, size, sent

    def all_gather(self, x: Tensor) -> Tensor:
        assert self.sent is not None
        assert torch.equal(self.sent[self.rank], x)
        return self.sent


def place(group: SoloGroup | None = None) -> Place:
    return Place(torch.float64, CPU, group or SoloGroup(), is_quantised=True)


def written(rows: Mapping[str, int], width: int, scheme: Scheme, seed: int = 0) -> Files:
    """A file's tensors of each projection, by their names after its own."""
    draw = torch.Generator().manual_seed(seed)
    found: Files = {}
    for i, (name, count) in enumerate(rows.items()):
        spread = torch.rand(count, 1, generator=draw) + 0.1
        found[name] = encode(torch.randn(count, width, generator=draw) * spread, scheme)
        if scheme.input_scale is not None:
            found[name][scheme.input_scale] = torch.tensor([0.004 + 0.001 * i])
    return found


def load(part: Linear | RoutedExperts, files: Files) -> None:
    for name, weight in part.tensors().items():
        stem, _, last = name.rpartition(".")
        whole = files[stem][last]
        tensor = held(weight)
        found = weight.read(whole.__getitem__) if isinstance(weight, Part) else whole
        tensor.copy_(found.reshape(tensor.shape))
    part.finish_quantised("here", "")


def map_of(
    files: Files, scheme: Scheme, at: Place, inputs: int | Share = WIDTH, split: bool = False
) -> Linear:
    shares = {name: at.share(rows) if split else rows for name, rows in ROWS.items()}
    made = Linear(at, inputs, shares)
    assert made.weight.is_meta, "no memory before the scheme is known"
    made.allocate(dict.fromkeys(ROWS, scheme))
    load(made, files)
    return made


def rounded(x: Tensor, scheme: Scheme, static: float = 0.0) -> Tensor:
    """Rows as facts about checkpoints say they enter a product, number by number."""
    if scheme.inputs == "float":
        return x
    size = scheme.group or x.shape[-1]
    parts = []
    for part in x.split(size, -1):
        top = part.abs().amax(-1, keepdim=True)
        scale = (top.clamp(min=1e-10) if scheme.inputs == "group" else top) / 448
        if scheme.inputs == "token":
            scale = scale.clamp(min=1 / (448 * 512))
        if scheme.inputs == "static":
            scale = torch.tensor(static, dtype=torch.float32).double()
        parts.append((part / scale).clamp(-448, 448).to(E4M3).double() * scale)
    return torch.cat(parts, -1)


def expected(x: Tensor, files: Files, scheme: Scheme) -> Tensor:
    found = []
    for tensors in files.values():
        static = float(tensors["input_scale"]) if scheme.input_scale else 0.0
        data, scale = tensors[scheme.data], tensors[scheme.scale]
        weight = decode({scheme.data: data, scheme.scale: scale}, scheme, x.shape[-1]).double()
        found.append(rounded(x, scheme, static) @ weight.t())
    return torch.cat(found, -1)


X = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_slab_computes_what_its_file_says(name: str) -> None:
    scheme = SCHEMES[name]
    files = written(ROWS, WIDTH, scheme)
    made = map_of(files, scheme, place())
    wanted = expected(X, files, scheme)
    torch.testing.assert_close(made.forward(X), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(made.by_library(X, 30), wanted[:, 30:], rtol=1e-6, atol=1e-6)
    alone = torch.cat([made.forward(row[None]) for row in X])
    torch.testing.assert_close(made.forward(X), alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SCHEMES)
def test_ranks_that_divide_outputs_hold_their_part_of_the_whole(name: str) -> None:
    scheme = SCHEMES[name]
    files = written(ROWS, WIDTH, scheme)
    whole = map_of(files, scheme, place()).forward(X).split(list(ROWS.values()), 1)
    for rank in range(2):
        mine = map_of(files, scheme, place(Ranks(rank, 2)), split=True).forward(X)
        wanted = torch.cat([part.chunk(2, 1)[rank] for part in whole], 1)
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SCHEMES)
def test_ranks_that_divide_inputs_add_up_to_the_whole(name: str) -> None:
    scheme = SCHEMES[name]
    files = written(ROWS, WIDTH, scheme)
    sent = torch.stack([part.abs().amax(1, keepdim=True) for part in X.chunk(2, 1)])
    total = torch.zeros(7, sum(ROWS.values()), dtype=torch.float64)
    for rank in range(2):
        at = place(Ranks(rank, 2, sent))
        mine = map_of(files, scheme, at, Share(WIDTH, 16 * rank, 16))
        total += mine.forward(X.chunk(2, 1)[rank])
    wanted = map_of(files, scheme, place()).forward(X)
    torch.testing.assert_close(total, wanted, rtol=1e-12, atol=1e-12)


def test_a_split_inside_a_group_is_refused() -> None:
    scheme = Scheme(kind="fp8", rows=8, columns=32, inputs="group", group=32)
    with pytest.raises(ConfigurationError, match=r"(?s)parallelism.tensor=2 cuts the 32.*group of"):
        map_of(written(ROWS, WIDTH, scheme), scheme, place(Ranks(0, 2)), Share(WIDTH, 0, 16))


def test_a_projection_of_a_slab_may_stay_in_float() -> None:
    files = written(ROWS, WIDTH, TOKEN)
    plain = torch.randn(8, WIDTH, dtype=torch.float64)
    made = Linear(place(), WIDTH, ROWS)
    made.allocate({"q_proj": TOKEN, "v_proj": TOKEN})
    load(made, {**files, "k_proj": {"weight": plain}})
    wanted = expected(X, files, TOKEN)
    wanted[:, 24:32] = X @ plain.t()
    torch.testing.assert_close(made.forward(X), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", SCHEMES)
def test_reordered_and_unpacked_maps_keep_each_rows_scale(name: str) -> None:
    scheme = SCHEMES[name]
    made = map_of(written(ROWS, WIDTH, scheme), scheme, place())
    y = made.forward(X)
    turned = made.reordered("k_proj", lambda rows: rows.flip(0)).forward(X)
    wanted = torch.cat((y[:, :24], y[:, 24:32].flip(1), y[:, 32:]), 1)
    torch.testing.assert_close(turned, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(made.forward(X), y)
    decoded = torch.cat(
        [
            decode({k: v for k, v in tensors.items() if k != "input_scale"}, scheme, WIDTH)
            for tensors in written(ROWS, WIDTH, scheme).values()
        ]
    )
    made.unpack()
    torch.testing.assert_close(made.forward(X), X @ decoded.double().t(), rtol=1e-6, atol=1e-6)


def test_rows_reordered_inside_their_blocks_keep_the_blocks_scales() -> None:
    """Kernels for blocks take no scales by row, which other orders need."""
    scheme = Scheme(kind="fp8", rows=8, columns=32, inputs="group", group=32)
    made = map_of(written(ROWS, WIDTH, scheme), scheme, place())
    y = made.forward(X)
    inside = [*range(8), *reversed(range(8, 16)), *range(16, 24)]
    across = list(reversed(range(24)))
    for order, rows in ((inside, 8), (across, 1)):
        turned = made.reordered("q_proj", lambda rows, order=order: rows[order])
        assert turned.slab is not None
        assert turned.slab.pieces[0].matrix.rows == rows
        wanted = torch.cat((y[:, order], y[:, 24:]), 1)
        torch.testing.assert_close(turned.forward(X), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_matrix_is_encoded_in_slices_as_in_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a slice that ends inside a block of scales, and a scale of a slice alone."""
    matrix = torch.randn(ROWS["q_proj"], WIDTH, generator=torch.Generator().manual_seed(5))
    whole = encode(matrix, SCHEMES[name])
    monkeypatch.setattr(quantization, "_WIDE_NUMBERS", 5 * WIDTH)
    for part, tensor in encode(matrix, SCHEMES[name]).items():
        assert torch.equal(tensor.view(torch.uint8), whole[part].view(torch.uint8)), part


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_scale_that_cannot_be_is_named(bad: float) -> None:
    files = written(ROWS, WIDTH, TOKEN)
    files["k_proj"]["weight_scale"][3] = bad
    with pytest.raises(CheckpointError, match=r"'here': k_proj\.weight_scale holds .*above 0"):
        map_of(files, TOKEN, place())


def test_a_number_that_is_not_one_is_named() -> None:
    files = written(ROWS, WIDTH, TOKEN)
    files["v_proj"]["weight"].view(torch.uint8)[2, 5] = 0xFF
    with pytest.raises(CheckpointError, match=r"holds NaN: v_proj\.weight;"):
        map_of(files, TOKEN, place())


COUNT, INNER = 6, 16


def expert_files(scheme: Scheme) -> Files:
    found: Files = {}
    for i in range(COUNT):
        found |= written({f"{i}.gate_proj": INNER, f"{i}.up_proj": INNER}, WIDTH, scheme, i)
        found |= written({f"{i}.down_proj": WIDTH}, INNER, scheme, 100 + i)
    return found


def experts_of(files: Files, scheme: Scheme, at: Place) -> RoutedExperts:
    made = RoutedExperts(COUNT, WIDTH, INNER, at, activation="silu")
    assert made.down.is_meta
    made.allocate(dict.fromkeys(files, scheme))
    load(made, files)
    return made


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("count", [1, 7])  # few rows gather experts, many run all of them
def test_experts_round_their_rows_and_their_inner_rows(name: str, count: int) -> None:
    scheme = SCHEMES[name]
    files = expert_files(scheme)
    made = experts_of(files, scheme, place())
    draw = torch.Generator().manual_seed(5)
    chosen = torch.rand(count, COUNT, generator=draw).topk(2).indices
    weights = torch.rand(count, 2, generator=draw, dtype=torch.float64)
    wanted = torch.zeros(count, WIDTH, dtype=torch.float64)
    for t in range(count):
        for w, i in zip(weights[t], chosen[t].tolist(), strict=True):
            names = (f"{i}.gate_proj", f"{i}.up_proj")
            both = expected(X[t : t + 1], {name: files[name] for name in names}, scheme)
            gate, up = both.chunk(2, 1)
            inner = torch.nn.functional.silu(gate) * up
            wanted[t] += w * expected(inner, {"d": files[f"{i}.down_proj"]}, scheme)[0]
    found = made.forward(X[:count], weights, chosen)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["blocks", "odd blocks"])
def test_stacked_experts_are_the_same_experts(name: str) -> None:
    """Files with one tensor for all gates and ups, whose blocks may begin in one and end in the
    other."""
    scheme = replace(SCHEMES[name], scale="weight_scale_inv", stacked=True)
    draw = torch.Generator().manual_seed(7)
    single = replace(scheme, stacked=False)
    gates = [encode(torch.randn(2 * INNER, WIDTH, generator=draw), single) for _ in range(COUNT)]
    downs = [encode(torch.randn(WIDTH, INNER, generator=draw), single) for _ in range(COUNT)]
    made = RoutedExperts(COUNT, WIDTH, INNER, place(), activation="silu")
    made.allocate({"gate_up_proj": scheme, "down_proj": scheme})
    stacked = {
        f"{name}{suffix}": torch.stack([each[part] for each in those])
        for name, those in (("gate_up_proj", gates), ("down_proj", downs))
        for suffix, part in (("", "weight"), ("_scale_inv", "weight_scale_inv"))
    }
    for name_, weight in made.tensors().items():
        held(weight).copy_(stacked[name_])
    made.finish_quantised("here", "")
    chosen, weights = torch.tensor([[1, 4]]), torch.tensor([[0.25, 0.75]], dtype=torch.float64)
    wanted = torch.zeros(1, WIDTH, dtype=torch.float64)
    for w, i in zip(weights[0], chosen[0].tolist(), strict=True):
        gate, up = expected(X[:1], {"both": gates[i]}, single).chunk(2, 1)
        inner = torch.nn.functional.silu(gate) * up
        wanted += w * expected(inner, {"down": downs[i]}, single)
    torch.testing.assert_close(made.forward(X[:1], weights, chosen), wanted, rtol=1e-6, atol=1e-6)


def test_ranks_that_divide_experts_add_up_to_the_whole() -> None:
    files = expert_files(TOKEN)
    chosen, weights = torch.tensor([[1, 4], [0, 2]]), torch.full((2, 2), 0.5, dtype=torch.float64)
    made = experts_of(files, TOKEN, place())
    assert made.slabs is not None
    sent: list[Tensor] = []

    class Recording(Ranks):
        def all_gather(self, x: Tensor) -> Tensor:
            sent.append(x)
            return torch.stack((x, x))

    for rank in range(2):
        experts_of(files, TOKEN, place(Recording(rank, 2))).forward(X[:2], weights, chosen)
    both, total = torch.stack(sent), torch.zeros(2, WIDTH, dtype=torch.float64)
    for rank in range(2):
        mine = experts_of(files, TOKEN, place(Ranks(rank, 2, both)))
        total += mine.forward(X[:2], weights, chosen)
    torch.testing.assert_close(total, made.forward(X[:2], weights, chosen), rtol=1e-12, atol=1e-12)


def test_experts_of_which_some_are_in_float_are_refused() -> None:
    made = RoutedExperts(COUNT, WIDTH, INNER, place(), activation="silu")
    schemes = dict.fromkeys(expert_files(TOKEN), TOKEN)
    del schemes["3.up_proj"]
    with pytest.raises(CheckpointError, match=r"experts\.3\.up_proj and 0 more have no scales"):
        made.allocate(schemes)

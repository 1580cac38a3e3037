"""target.weights=random in vLLM: the native engine's numbers on every rank, not its dummy ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_targets import load
from torch import Tensor, nn

from hydraspec.adapters.vllm.engine import VllmEngine
from hydraspec.adapters.vllm.weights import (
    DUMMY_WEIGHTS,
    LOAD_FORMAT,
    fill,
    order_tokens,
    random_weights,
)
from hydraspec.config.schema import Weights
from hydraspec.models.place import Place
from hydraspec.models.weights import EMPTY, randomise
from hydraspec.shipped import ZOO

CPU = torch.device("cpu")


def stored_as_on_a_device(self: Place, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    *batch, k, n = shape
    return self.empty(*batch, n, k, dtype=dtype).transpose(-1, -2)


def native_weights(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """What the native engine draws where matrices are stored as on a GPU, where vLLM runs."""
    monkeypatch.setattr(Place, "matrix", stored_as_on_a_device)
    model = load(f"zoo:{name}", weights=EMPTY, seed=seed)
    tensors: dict[str, Tensor] = model.tensors()  # type: ignore[attr-defined]
    randomise(tensors, seed)
    return tensors


@pytest.mark.parametrize(
    "name",
    [
        *("tiny_gemma4", "tiny_gemma4_e", "tiny_gemma4_moe", "tiny_gemma4_unified"),
        *("tiny_mistral", "tiny_deepseek"),
    ],
)
def test_every_weight_is_the_native_engines(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a name that vLLM does not know, and a weight drawn from another one's seed."""
    found = dict(random_weights(ZOO / name, dtype=torch.float32, device=CPU, seed=3))
    expected = native_weights(name, 3, monkeypatch)
    joined: dict[str, Tensor] = {}
    for own, weight in expected.items():
        full = own if own == "lm_head.weight" else f"model.{own}"
        if ".mlp.experts." not in own:
            joined[full] = weight
            continue
        before, _, part = full.rpartition(".")
        for i, expert in enumerate(weight):
            if part == "down_proj":
                joined[f"{before}.{i}.down_proj.weight"] = expert
            else:
                joined[f"{before}.{i}.gate_proj.weight"] = expert[: len(expert) // 2]
                joined[f"{before}.{i}.up_proj.weight"] = expert[len(expert) // 2 :]
    assert set(found) == set(joined)
    for full, weight in joined.items():
        assert torch.equal(found[full], weight), full
    assert not torch.equal(
        found["model.embed_tokens.weight"],
        dict(random_weights(ZOO / name, dtype=torch.float32, device=CPU, seed=4))[
            "model.embed_tokens.weight"
        ],
    )


class Stage(nn.Module):
    """A rank as vLLM builds one: some layers, a part of each; its loaders cut whole weights."""

    def __init__(self, layers: range, rank: int, size: int, width: int, inner: int) -> None:
        super().__init__()
        self.layers, self.rank, self.size = layers, rank, size
        for i in layers:
            joined = nn.Parameter(torch.zeros(2 * inner // size, width))
            self.register_parameter(f"gate_up_{i}", joined)
            self.register_parameter(f"down_{i}", nn.Parameter(torch.zeros(width, inner // size)))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        for name, whole in weights:
            layer = int(name.split(".")[2]) if name.startswith("model.layers.") else -1
            if layer not in self.layers or ".mlp." not in name:
                continue
            cut = whole.chunk(self.size, 1 if "down_proj" in name else 0)[self.rank]
            if "down_proj" in name:
                getattr(self, f"down_{layer}").data.copy_(cut)
            else:
                first = 0 if "gate_proj" in name else len(cut)
                getattr(self, f"gate_up_{layer}").data[first : first + len(cut)] = cut
        return set()


def test_ranks_of_two_stages_hold_parts_of_the_same_numbers() -> None:
    """Catches numbers that depend on a rank: every worker process draws by itself."""
    source = {"dtype": torch.float32, "device": CPU, "seed": 5}
    whole = dict(random_weights(ZOO / "tiny_mistral", **source))  # type: ignore[arg-type]
    gate, down = (whole[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "down"))
    inner, width = gate.shape
    count = len([name for name in whole if name.endswith("gate_proj.weight")])
    ranks = {}
    for stage, layers in enumerate((range(count // 2), range(count // 2, count))):
        for rank in range(2):
            ranks[stage, rank] = Stage(layers, rank, 2, width, inner)
            weights = random_weights(ZOO / "tiny_mistral", **source)  # type: ignore[arg-type]
            assert fill(ranks[stage, rank], weights) == []
    halves = [ranks[0, rank].gate_up_0[: inner // 2] for rank in range(2)]
    assert torch.equal(torch.cat(halves), gate)
    assert torch.equal(torch.cat([ranks[0, rank].down_0 for rank in range(2)], 1), down)
    last = whole[f"model.layers.{count - 1}.mlp.up_proj.weight"]
    halves = [getattr(ranks[1, r], f"gate_up_{count - 1}")[inner // 2 :] for r in range(2)]
    assert torch.equal(torch.cat(halves), last)


class Half(nn.Module):
    """Loads the first row of one parameter, and all of another."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Parameter(torch.full((2, 3), 9.0, dtype=torch.bfloat16))
        self.all = nn.Parameter(torch.full((3,), 9.0))
        self.ids = nn.Parameter(torch.arange(3), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, weight in weights:
            self.part.data[0], self.all.data[:] = weight, weight


def test_weights_that_nothing_reached_are_named_and_zero() -> None:
    """Catches what vLLM's allocator left, NaN perhaps, and a difference of which nobody knows."""
    model = Half()
    assert fill(model, [("x", torch.ones(3))]) == ["part"]
    assert torch.equal(model.part.float(), torch.tensor([[1.0, 1, 1], [0, 0, 0]]))
    assert torch.equal(model.all, torch.ones(3))
    assert torch.equal(model.ids, torch.arange(3))


@pytest.mark.parametrize("splits", [{}, {"tensor": 2}, {"data": 2}], ids=str)
def test_workers_fill_themselves_whatever_the_split(
    start: Callable[..., VllmEngine], splits: dict[str, int]
) -> None:
    engine = start("none", weights=Weights.random, **splits)
    running = engine.parts.engine
    workers = (running._engine.inner if "data" in splits else running).workers
    assert len(workers) == splits.get("tensor", 1)
    folder = Path(engine.parts.config.target.checkpoint)
    expected = dict(random_weights(folder, dtype=torch.float32, device=CPU, seed=0))
    for worker in workers:
        assert all(torch.equal(worker.model.seen[name], x) for name, x in expected.items())
        assert torch.equal(worker.model.norm, torch.ones(32))
        assert torch.equal(worker.model.layer_scalar, torch.ones(1))
    said = "vLLM has weights that the native engine has not, which are zero: other"
    assert said in engine.info.warnings


def test_a_target_that_only_vllm_knows_keeps_dummy_weights(
    start: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hydraspec.adapters.vllm.weights.TARGETS", {})
    engine = start(weights=Weights.random)
    assert engine.parts.engine.args.load_format == "dummy"
    assert engine.info.warnings == [DUMMY_WEIGHTS]


def test_a_checkpoint_is_left_as_it_is(start: Callable[..., VllmEngine]) -> None:
    (worker,) = start(weights=Weights.checkpoint).parts.engine.workers
    assert worker.model.norm.abs().max() <= 1e-3
    assert worker.model.layer_scalar.abs().max() <= 1e-3


def test_a_drafter_keeps_dummy_weights(start: Callable[..., VllmEngine]) -> None:
    engine = start(weights=Weights.random).parts.engine
    loader = engine.loaders[LOAD_FORMAT](SimpleNamespace(model_loader_extra_config={"seed": 0}))
    drafter = nn.ModuleDict({"masked_embedding": nn.Linear(2, 2)})
    drafter.register_buffer("token_ordering", torch.full((12,), 1 << 40))
    loader.load_weights(drafter, SimpleNamespace(runner_type="draft"))
    assert all((parameter == 0.5).all() for parameter in drafter.parameters())
    assert drafter.get_buffer("token_ordering").tolist() == list(range(12))


def test_a_dummy_assistant_names_tokens_of_its_vocabulary() -> None:
    """vLLM's buffer holds what its memory held before: a gather outside of the table."""
    embedder = nn.Module()
    embedder.register_buffer("token_ordering", torch.full((12,), 1 << 40))
    embedder.register_buffer("scale", torch.ones(2))
    order_tokens(nn.ModuleDict({"masked_embedding": embedder}))
    assert sorted(embedder.get_buffer("token_ordering").tolist()) == list(range(12))
    assert embedder.get_buffer("scale").tolist() == [1.0, 1.0]

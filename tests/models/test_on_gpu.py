"""Models on a GPU against themselves on the CPU: every kind, mixed steps, padding and graphs.

Catches a kernel handed strides it does not read, a read of the device within a pass, and a value
that a CUDA graph froze.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_oracle import make_dense, small
from gemma4_oracle import HeadAsTarget, PagedRun, Pass
from graph_runs import no_waiting
from tiny_targets import load as load_checkpoint
from torch import Tensor

from hydraspec.models.eagle.loading import load_eagle
from hydraspec.models.gemma4.assistant import load_assistant
from hydraspec.models.mtp.loading import load_mtp

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
# Of the largest value: float32 sums in another order, through up to 16 layers.
CLOSE = 2e-4
# Of the norm: bfloat16 has 8 bits, and a layer rounds about ten times.
NARROW = 0.1

# Where a router's near tie falls the other way a row gets another expert: float32 only.
DENSE = ["tiny_gemma4", "tiny_gemma4_e", "tiny_qwen3", "tiny_mistral"]
TARGETS = [*DENSE, "tiny_gemma4_moe", "tiny_deepseek"]
HEADS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "eagle": ("tiny_mistral", lambda t: eagle("tiny_mistral-eagle", "eagle", t)),
    "eagle3": ("tiny_qwen3", lambda t: eagle("tiny_qwen3-eagle3", "eagle3", t)),
    "eagle3 of gemma": ("tiny_gemma4", lambda t: eagle("tiny_gemma4-eagle3", "eagle3", t)),
    "peagle": ("tiny_qwen3", lambda t: eagle("tiny_qwen3-peagle", "peagle", t)),
    "mtp": (
        "tiny_deepseek",
        lambda t: load_mtp(
            "zoo:tiny_deepseek", weights="checkpoint", target=t, num_drafts=1, seed=0
        ),
    ),
}
ASSISTANTS = ["tiny_gemma4", "tiny_gemma4_e", "tiny_gemma4_moe", "tiny_gemma4_unified"]
CHUNKS = (
    {0: list(range(10, 40)), 1: list(range(50, 57)), 2: [60, 61]},
    {0: [7], 1: list(range(70, 90)), 2: [62, 63, 64, 65]},
    {0: [8], 1: [9], 2: [66]},
)


def eagle(name: str, method: str, target: Any) -> Any:
    return load_eagle(f"zoo:{name}", method=method, weights="checkpoint", target=target, seed=0)


def load(name: str, dtype: torch.dtype, device: str) -> Any:
    return load_checkpoint(f"zoo:{name}", dtype, device=torch.device(device))


class Run(PagedRun):
    """A PagedRun whose caches and batches are where the model is."""

    def __init__(self, model: Any, device: str) -> None:
        self.device = device
        super().__init__(model, 3, block_size=16, max_len=96)
        self.caches = [None if c is None else c.to(device) for c in self.caches]

    def batch(self, tokens: dict[int, list[int]]) -> Pass:
        def moved(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(self.device)
            return [moved(v) for v in value] if isinstance(value, list) else value

        made = super().batch(tokens)
        return Pass(**{f.name: moved(getattr(made, f.name)) for f in dataclasses.fields(made)})


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    found, expected = found.cpu().double(), expected.cpu().double()
    shown = expected.isfinite()  # suppressed tokens are minus infinity on both sides
    assert torch.equal(found.isfinite(), shown)
    apart, expected = (found - expected)[shown], expected[shown]
    if tolerance == NARROW:
        assert apart.norm() <= tolerance * expected.norm()
    else:
        assert apart.abs().max() <= tolerance * expected.abs().max()


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [(name, torch.float32, CLOSE) for name in TARGETS]
    + [(name, torch.bfloat16, NARROW) for name in DENSE],
)
def test_targets(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """Hidden states, aux states and logits. bfloat16 is compared with float32 of the CPU."""
    runs = [Run(load(name, torch.float32, "cpu"), "cpu"), Run(load(name, dtype, DEVICE), DEVICE)]
    ids = [runs[0].target.num_layers, 0, 3]
    for chunk in CHUNKS:
        found = []
        for run in runs:
            batch = run.batch(chunk)
            with no_waiting():
                hidden, aux = run.target.forward(batch, run.caches, ids)
                found.append([hidden, *aux, run.target.compute_logits(hidden)])
        for expected, ours in zip(*found, strict=True):
            assert ours.dtype == dtype
            assert_near(ours, expected, tolerance)


def test_queries_that_grow_with_positions(tmp_path: Path) -> None:
    """Of several sizes within a pass, and beside other requests' rows."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "llama_4_scaling_beta": 0.5}
    rope["original_max_position_embeddings"] = 8
    make_dense("ministral3", small(rope_parameters=rope), 1).save_pretrained(tmp_path)
    runs = [
        Run(load_checkpoint(str(tmp_path), torch.float32, device=torch.device(at)), at)
        for at in ("cpu", DEVICE)
    ]
    for chunk in CHUNKS:
        batches = [run.batch(chunk) for run in runs]
        with no_waiting():
            found = [r.target.forward(b, r.caches)[0] for r, b in zip(runs, batches, strict=True)]
        assert_near(found[1], found[0], CLOSE)


@pytest.mark.parametrize("name", TARGETS)
def test_a_graph_replays_what_an_eager_pass_computes(name: str) -> None:
    """At other lengths than those it was captured at, with a padding request among the rows."""
    run = Run(load(name, torch.bfloat16, DEVICE), DEVICE)
    run.target.forward(run.batch(CHUNKS[0]), run.caches)
    decode = {0: [7, 8], 1: [9, 10], 2: [11, 12]}
    held, later = run.batch(decode), run.batch(decode)
    for batch in (held, later):
        batch.has_padding = True
        batch.seq_lens[2] = 0
        for slots, table in zip(batch.slot_mapping, batch.block_tables, strict=True):
            slots[4:] = -1
            table[2] = 0
    run.target.forward(held, run.caches)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run.target.compute_logits(run.target.forward(held, run.caches)[0])
    caches = [cache for cache in run.caches if cache is not None]
    for batch in (held, later):
        before = [cache.clone() for cache in caches]
        eager = run.target.compute_logits(run.target.forward(batch, run.caches)[0])
        written = [cache.clone() for cache in caches]
        for cache, kept in zip(caches, before, strict=True):
            cache.copy_(kept)
        copy_into(held, batch)
        graph.replay()
        torch.cuda.synchronize()
        assert captured.isfinite().any(1).all()
        assert torch.equal(captured, eager)
        for cache, expected in zip(caches, written, strict=True):
            assert torch.equal(cache.nan_to_num(7.0), expected.nan_to_num(7.0))
            assert not cache[:16].any()


def copy_into(held: Pass, batch: Pass) -> None:
    """The numbers of `batch` into the tensors that a graph reads."""
    for field in dataclasses.fields(batch):
        ours, theirs = getattr(held, field.name), getattr(batch, field.name)
        if isinstance(theirs, Tensor):
            ours.copy_(theirs)
        elif isinstance(theirs, list) and isinstance(theirs[0], Tensor):
            for to, source in zip(ours, theirs, strict=True):
                to.copy_(source)


@pytest.mark.parametrize("name", HEADS)
def test_draft_heads(name: str) -> None:
    """A pass over a target's rows, then a step behind it."""
    folder, build = HEADS[name]
    found = []
    for device in ("cpu", DEVICE):
        head = build(load(folder, torch.float32, device))
        run = Run(HeadAsTarget(head, torch.float32), device)
        caches = [cache for cache in run.caches if cache is not None]
        width = head.spec.hidden_width
        draw = torch.Generator().manual_seed(1)
        outs = []
        for step, chunk in enumerate(CHUNKS[1:]):
            batch = run.batch(chunk)
            hidden = torch.randn(batch.input_ids.shape[0], width, generator=draw).to(device)
            with no_waiting():
                states, feedback = head.forward(batch, hidden, caches, step=step)
                outs += [states, feedback, head.compute_logits(states)]
        found.append(outs)
    for expected, ours in zip(*found, strict=True):
        assert_near(ours, expected, CLOSE)


@pytest.mark.parametrize("name", ASSISTANTS)
def test_assistants(name: str) -> None:
    """Three steps over the cache of a target that has read prompts of different lengths."""
    found = []
    for device in ("cpu", DEVICE):
        target = load(name, torch.float32, device)
        run = Run(target, device)
        assistant = load_assistant(
            f"zoo:{name}-assistant", weights="checkpoint", target=target, seed=0
        )
        batch = run.batch(CHUNKS[0])
        hidden, _ = target.forward(batch, run.caches)
        hidden = hidden[batch.query_start_loc[1:] - 1]
        lens, tables = batch.seq_lens, batch.block_tables
        outs, tokens = [], torch.tensor([11, 22, 33], device=device)
        with no_waiting():
            context = assistant.begin(lens - 1, lens, tables, 40, run.caches)
            for _ in range(3):
                d, hidden = assistant.step(context, tokens, hidden)
                tokens = assistant.greedy_tokens(d)
                outs += [d, hidden]
        found.append([*outs, tokens])
    for expected, ours in zip(*found, strict=True):
        assert_near(ours, expected, CLOSE)


def test_random_weights_of_a_public_shape_take_seconds() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()  # starts CUDA, whose time is not ours
    start = time.perf_counter()
    device = torch.device(DEVICE)
    target = load_checkpoint("shape:gemma4_e4b", torch.bfloat16, weights="random", device=device)
    torch.cuda.synchronize()
    assert time.perf_counter() - start < 5.0
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 1.02 * target.memory_bytes()
    for tensor in (target.table.weight, target.per_layer.table.weight):
        part = tensor[:: len(tensor) // 997].float()
        assert abs(float(part.std()) * tensor.shape[-1] ** 0.5 - 1) < 0.05

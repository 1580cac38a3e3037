"""Layers over the CPU functions and over the kernels' references compute the same, in float64.

With the references, matrices are views of transposed storage, as on a GPU. Catches a norm of the
wrong layer, head norms on the wrong heads, a layer scalar at the wrong place, a state that a later
layer overwrites, and padding that leaves a trace.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepseek_oracle import make_deepseek, random_deepseek_config
from dense_oracle import make_dense, random_config
from eagle_folders import FakeTarget, draw_eagle1, draw_eagle3, matrix, write, write_speculators
from eagle_rows import PagedRows, target_step
from eagle_rows import load as load_head
from gemma4_oracle import (
    FULL,
    SLIDING,
    HeadAsTarget,
    PagedRun,
    Pass,
    load,
    make_assistant,
    make_target,
    random_text_config,
    text_config,
)
from mtp_folders import KINDS, write_mtp
from mtp_folders import random_config as mtp_config
from torch import Tensor

from hydraspec.models.gemma4.assistant import load_assistant
from hydraspec.models.layers import Norm
from hydraspec.models.mtp.loading import load_mtp
from hydraspec.models.needed_rows import needed_rows
from hydraspec.models.place import Place
from hydraspec.types import StepPlan

# float64 both, sums in another order; rotary angles are the same float32 numbers.
CLOSE = {"rtol": 1e-8, "atol": 1e-8}

TARGETS: dict[str, Callable[[], Any]] = {
    "gemma4: per-layer inputs, shared KV, scalars": lambda: make_target(
        text_config(
            num_hidden_layers=6,
            layer_types=[SLIDING, FULL] * 3,
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=96,
        ),
        1,
    ),
    **{
        f"gemma4: most layers share KV, {name}": lambda width=width: make_target(
            text_config(
                num_hidden_layers=7,
                layer_types=[SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING, FULL],
                num_kv_shared_layers=4,
                hidden_size_per_layer_input=width,
                vocab_size_per_layer_input=96,
            ),
            5,
        )
        for name, width in (("per-layer inputs", 8), ("plain", 0))
    },
    "gemma4: k_eq_v and biases": lambda: make_target(
        text_config(attention_k_eq_v=True, attention_bias=True, tie_word_embeddings=False), 2
    ),
    "gemma4: experts": lambda: make_target(
        text_config(
            enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=12
        ),
        3,
    ),
    **{
        f"gemma4: random {seed}": lambda seed=seed: make_target(random_text_config(seed), seed)
        for seed in range(8)
    },
    **{
        f"{family} {seed}": lambda family=family, seed=seed: make_dense(
            family, random_config(family, seed), seed
        )
        for family in ("llama", "mistral", "qwen2", "qwen3")
        for seed in range(3)
    },
    **{
        f"deepseek {seed}": lambda seed=seed: make_deepseek(random_deepseek_config(seed), seed)
        for seed in range(6)
    },
}


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """Models built inside run the references, and hold their matrices as a GPU does."""

    def transposed(self: Place, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        *batch, k, n = shape
        return self.empty(*batch, n, k, dtype=dtype).transpose(-1, -2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Place, "uses_cpu_norms", property(lambda self: False))
        patch.setattr(Place, "matrix", transposed)
        yield


def a_norm_of(model: Any) -> Norm:
    """Any norm of a model or of its layers."""
    parts = [part for owner in (model, *model.layers) for part in vars(owner).values()]
    return next(part for part in parts if isinstance(part, Norm))


def load_both(build: Callable[[], Any]) -> tuple[Any, Any]:
    """The same model twice: with the CPU functions, and with the references."""
    plain = build()
    with as_on_a_device():
        reference = build()
    assert a_norm_of(plain).uses_cpu_norms
    assert not a_norm_of(reference).uses_cpu_norms
    return plain, reference


CHUNKS = (
    {0: [3, 14, 15], 1: [92]},
    {0: [65], 1: [35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79], 2: [5, 0]},
    {0: [28], 1: [8], 2: [41]},
)


def assert_same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, **CLOSE)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("name", TARGETS)
def test_targets(name: str, tmp_path: Path) -> None:
    """Hidden states, aux states, logits and the cache, through mixed steps."""
    with torch.inference_mode(False):
        TARGETS[name]().save_pretrained(tmp_path)
    models = load_both(lambda: load(tmp_path, torch.float64))
    # Files' tensors are copied, and random ones drawn, without going through a temporary.
    assert all(tensor.is_contiguous() for tensor in models[1].tensors().values())
    ids = [models[0].num_layers, 0, models[0].num_layers // 2, 1]
    runs = [PagedRun(model, 3) for model in models]
    for chunk in CHUNKS:
        found = []
        for run in runs:
            hidden, aux = run.target.forward(run.batch(chunk), run.caches, ids)
            found.append([hidden, *aux, run.target.compute_logits(hidden)])
        for a, b in zip(*found, strict=True):
            assert_same(a, b)
    for a, b in zip(runs[0].caches, runs[1].caches, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, **CLOSE, equal_nan=True)


class Counted:
    """A layer's MLP that notes how many rows it sees."""

    def __init__(self, mlp: Any, widths: list[int]) -> None:
        self.mlp, self.widths = mlp, widths

    def __getattr__(self, name: str) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            self.widths.append(x.shape[0])
            return getattr(self.mlp, name)(x)

        return call


def plan_of(batch: Pass, samples: list[bool], num_drafts: list[int]) -> StepPlan:
    ends = np.array(batch.ends)
    return StepPlan(
        slots=np.arange(len(ends)),
        num_rows=np.diff(ends, prepend=0),
        num_drafts=np.array(num_drafts),
        samples=np.array(samples),
        segments=batch.segments,
        block_tables=[],
        all_greedy=True,
        num_speculative_tokens=max(num_drafts),
    )


@pytest.mark.parametrize(
    ("side", "reads_after"),
    [(0, False), (1, True)],
    ids=["cpu functions, aux before", "references, aux after"],
)
@pytest.mark.parametrize("name", [name for name in TARGETS if not name.endswith(("1", "2"))])
def test_rows_whose_states_are_not_needed_are_left_out(
    name: str, reads_after: bool, side: int, tmp_path: Path
) -> None:
    """A step of a prefill chunk, the end of a prompt, verification and decoding: needed rows, aux
    states and the cache are those of the whole pass, and after the last layer that writes KV
    layers see needed rows only.
    """
    with torch.inference_mode(False):
        TARGETS[name]().save_pretrained(tmp_path)
    target = load_both(lambda: load(tmp_path, torch.float64))[side]
    whole = target.last_owner
    aux = (0, whole + reads_after)
    runs = [PagedRun(target, 5, frees=False) for _ in range(2)]
    first = {r: list(range(1 + r, 8 + 3 * r)) for r in range(5)}
    second = {0: [5], 1: [6, 7, 8], 2: list(range(9)), 3: list(range(20, 31)), 4: list(range(12))}
    for step, (chunk, samples, drafts) in enumerate(
        (
            (first, [False] * 5, [0] * 5),
            (second, [True, True, False, True, True], [0, 2, 0, 0, 3]),
        )
    ):
        batches = [run.batch(chunk) for run in runs]
        needed = needed_rows(plan_of(batches[0], samples, drafts))
        assert needed.rows.shape[0] == (0, 9)[step]
        expected, states = target.forward(batches[0], runs[0].caches, aux)
        widths: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            for layer in target.layers:
                patch.setattr(layer, "mlp", Counted(layer.mlp, widths))
            found, found_states = target.forward(batches[1], runs[1].caches, aux, needed)
        total, few = batches[0].ends[-1], (0, 9)[step]
        after = total if reads_after else few
        assert widths == [total] * whole + [after] * ((target.num_layers - whole) * (after > 0))
        assert found.shape == expected.shape
        assert found.isfinite().all()
        assert_same(found[needed.rows], expected[needed.rows])
        for a, b in zip(states, found_states, strict=True):
            assert_same(a, b)
    for a, b in zip(runs[0].caches, runs[1].caches, strict=True):
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, **CLOSE, equal_nan=True)


@pytest.mark.parametrize("side", [0, 1], ids=["cpu functions", "references"])
@pytest.mark.parametrize(
    "name", ["gemma4: k_eq_v and biases", "gemma4: experts", "qwen3 1", "deepseek 0"]
)
def test_padding_leaves_no_trace(name: str, side: int, tmp_path: Path) -> None:
    """A padding request after the others: no row of the cache changes, no other row's state."""
    with torch.inference_mode(False):
        TARGETS[name]().save_pretrained(tmp_path)
    target = load_both(lambda: load(tmp_path, torch.float64))[side]
    plain, padded = (PagedRun(target, 3) for _ in range(2))
    for chunk in ({0: [1, 2, 3], 1: [4, 5, 6]}, {0: [7], 1: [8], 2: [9]}):
        real = [r for r in chunk if r < 2]
        expected, _ = target.forward(plain.batch({r: chunk[r] for r in real}), plain.caches)
        batch = padded.batch(chunk)
        if 2 in chunk:
            rows = batch.ends[1]
            assert batch.requests[2] == 2
            batch.has_padding = True
            batch.input_ids[rows:] = 0
            batch.positions[rows:] = 0
            batch.seq_lens[2] = 0
            for slots, table in zip(batch.slot_mapping, batch.block_tables, strict=True):
                slots[rows:] = -1
                table[2] = 0
        found, _ = target.forward(batch, padded.caches)
        assert found.isfinite().all()
        assert_same(found[: len(expected)], expected)
    for a, b in zip(plain.caches, padded.caches, strict=True):
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, **CLOSE, equal_nan=True)
            assert not b[: padded.block_size].any()


def eagle_folder(method: str, seed: int, target: FakeTarget, folder: Path) -> tuple[Any, Path]:
    rng = np.random.default_rng([41, seed])
    if method != "eagle":
        plain = draw_eagle3(rng, target, method)
        return plain, write_speculators(folder, plain)
    plain = draw_eagle1(rng, target, is_mistral=False)
    config = {**plain.layer, "architectures": ["EagleLlamaForCausalLM"]}
    names = [name for name in plain.weights if name != "lm_head.weight"]
    return plain, write(folder, config, {n: plain.weights[n].contiguous() for n in names})


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("method", ["eagle", "eagle3", "peagle"])
def test_eagle_heads(method: str, seed: int, tmp_path: Path) -> None:
    """A pass over the target's rows and two steps after it. What enters stays as it was."""
    rng = np.random.default_rng([42, seed])
    target = FakeTarget(rng, hidden_size=16, vocab_size=40)
    plain, folder = eagle_folder(method, seed, target, tmp_path / "d")
    heads = load_both(lambda: load_head(folder, method, target))
    aux = [matrix(rng, 7, 16) for _ in plain.aux_layer_ids]
    final = matrix(rng, 7, 16)
    tokens = torch.from_numpy(rng.integers(0, 40, 9))
    found: list[list[Tensor]] = []
    for head in heads:
        torch.manual_seed(seed)
        paged = PagedRows(head, 9)
        hidden = head.combine_target_hidden(target_step(final, aux))
        outs = []
        for first, last in ((0, 7), (7, 8), (8, 9)):
            before = hidden.clone()
            states, feedback = head.forward(
                paged.rows(tokens[first:last], first), hidden, paged.caches, step=first
            )
            assert torch.equal(hidden, before)
            outs += [states.clone(), feedback.clone(), head.compute_logits(states)]
            hidden = feedback[-1:]
        found.append(outs)
    for a, b in zip(*found, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_mtp_heads(kind: str, seed: int, tmp_path: Path) -> None:
    with torch.inference_mode(False):
        base, drafter = write_mtp(tmp_path, kind, mtp_config(kind, seed), 2, seed)
    target = load(base, torch.float64)
    heads = load_both(
        lambda: load_mtp(str(drafter), weights="checkpoint", target=target, num_drafts=2, seed=0)
    )
    draw = torch.Generator().manual_seed(seed)
    entering = [torch.randn(n, target.hidden_size, generator=draw).double() for n in (5, 2)]
    found = []
    for head in heads:
        run = PagedRun(HeadAsTarget(head), 2)  # type: ignore[arg-type]
        hidden, outs = entering[0].clone(), []
        for step, chunk in enumerate(({0: [3, 1, 4], 1: [1, 5]}, {0: [9], 1: [2]})):
            states, _ = head.forward(run.batch(chunk), hidden, run.caches, step=step)
            assert torch.equal(hidden, entering[step])
            outs += [states, head.compute_logits(states)]
            hidden = entering[1].clone()
        found.append(outs)
    for a, b in zip(*found, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("centroids", [0, 12], ids=["dense head", "centroids"])
def test_assistants(centroids: int, tmp_path: Path) -> None:
    """Three steps after a target that has read prompts of different lengths."""
    ordered = {
        "use_ordered_embeddings": bool(centroids),
        "num_centroids": centroids,
        "centroid_intermediate_top_k": 3,
    }
    draft = text_config(
        hidden_size=24,
        num_hidden_layers=3,
        layer_types=[SLIDING, SLIDING, FULL],
        attention_k_eq_v=True,
    )
    with torch.inference_mode(False):
        make_target(text_config(attention_k_eq_v=True), 1).save_pretrained(tmp_path / "target")
        made = make_assistant(draft, 2, backbone_hidden_size=32, **ordered)
        made.save_pretrained(tmp_path / "assistant")
    folder = tmp_path / "assistant"
    assert json.loads((folder / "config.json").read_text())["backbone_hidden_size"] == 32
    run = PagedRun(load(tmp_path / "target", torch.float64), 3)
    states = run.step({0: [5, 9], 1: list(range(3, 30)), 2: [7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9]})
    lens = torch.tensor(run.lengths)
    found = []
    for assistant in load_both(
        lambda: load_assistant(str(folder), weights="checkpoint", target=run.target, seed=0)
    ):
        context = assistant.begin(lens - 1, lens, run.tables, int(lens.max()) + 5, run.caches)
        hidden = torch.stack([states[r][0][-1] for r in range(3)])
        tokens = torch.tensor([11, 22, 33])
        outs = []
        for _ in range(3):
            before = hidden.clone()
            d, feedback = assistant.step(context, tokens, hidden)
            assert torch.equal(hidden, before)
            tokens = assistant.greedy_tokens(d)
            outs += [d, feedback, tokens, assistant.compute_logits(d)]
            hidden = feedback
        found.append(outs)
    for a, b in zip(*found, strict=True):
        assert_same(a, b)

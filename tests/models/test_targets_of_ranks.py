"""Tensor-parallel targets of every family compute what one process computes, each rank with its
part of the weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_oracle import deepseek_config
from dense_oracle import small
from gemma4_oracle import PagedRun
from safetensors.torch import save_file
from thread_ranks import as_ranks
from tiny_targets import gemma4_config, write_folder
from torch import Tensor

from hydraspec.distributed.group import SOLO, TensorGroup
from hydraspec.distributed.layout import Layout
from hydraspec.errors import ConfigurationError
from hydraspec.models import load_target
from hydraspec.models.checkpoint import mistral_names
from hydraspec.models.parts import Part, held

TOLERANCE = 1e-12  # of float64 sums in another order, relative to the largest number
SHARED = {
    "attention_k_eq_v": False,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
}
EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
YARN_FREE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}


@dataclass(frozen=True)
class Case:
    """A config of 12 query heads, and numbers of ranks that divide it."""

    config: dict[str, Any]
    sizes: tuple[int, ...]


def deepseek(**changes: Any) -> dict[str, Any]:
    config = deepseek_config(num_attention_heads=12, num_key_value_heads=12, **changes)
    return {"model_type": "deepseek_v3"} | config


def dense(family: str, **changes: Any) -> dict[str, Any]:
    return small(model_type=family, num_attention_heads=12, head_dim=8, **changes)


def gemma4(**changes: Any) -> dict[str, Any]:
    heads = {"head_dim": 8, "global_head_dim": 16, "num_attention_heads": 12}
    return gemma4_config(**(heads | changes))


CASES = {
    # KV heads: divided, one for two ranks, one for all of them. 64, 97, 50 tokens: none divides by
    # 3, one by 2.
    "gemma4": Case(gemma4(num_key_value_heads=2, attention_bias=True), (2, 4)),
    "gemma4 e": Case(
        gemma4(num_key_value_heads=1, vocab_size_per_layer_input=50, **SHARED), (2, 3)
    ),
    "gemma4 moe": Case(gemma4(num_key_value_heads=6, **EXPERTS, vocab_size=97), (2, 3)),
    "llama": Case(
        dense("llama", num_key_value_heads=4, attention_bias=True, mlp_bias=True, vocab_size=97),
        (2, 4),
    ),
    "mistral": Case(dense("mistral", num_key_value_heads=3, sliding_window=5), (3,)),
    "qwen2": Case(dense("qwen2", num_key_value_heads=12, tie_word_embeddings=True), (3,)),
    "qwen3": Case(dense("qwen3", num_key_value_heads=2), (2, 6)),
    "deepseek": Case(deepseek(attention_bias=True, n_shared_experts=2, vocab_size=97), (2, 3)),
    "deepseek without query latent": Case(deepseek(q_lora_rank=None, **YARN_FREE), (4,)),
}
EACH = [(name, size) for name, case in CASES.items() for size in case.sizes]


def load(folder: Path, weights: str, group: TensorGroup = SOLO) -> Any:
    return load_target(
        str(folder),
        weights=weights,
        dtype=torch.float64,
        device=torch.device("cpu"),
        seed=3,
        max_model_len=None,
        group=group,
    )


def run(target: Any) -> tuple[list[Tensor], list[Tensor | None]]:
    """Hidden states, aux states and logits of mixed steps, and the caches after them."""
    paged = PagedRun(target, 3, frees=False)
    generator = torch.Generator().manual_seed(1)
    found: list[Tensor] = []
    for counts in ((9, 5, 1), (1, 6, 2), (1, 1, 1)):
        tokens = {
            r: torch.randint(target.vocab_size, (count,), generator=generator).tolist()
            for r, count in enumerate(counts)
        }
        batch = paged.batch(tokens)
        with torch.inference_mode():
            hidden, aux = target.forward(batch, paged.caches, (0, 1, target.num_layers))
            found += [hidden, *aux, target.vocabulary.whole(target.compute_logits(hidden))]
    return found, paged.caches


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    known = theirs.isfinite()
    assert ours.shape == theirs.shape
    assert ours.isfinite().equal(known)
    assert (ours - theirs)[known].abs().max() <= TOLERANCE * theirs[known].abs().max().clamp(min=1)


def kv_heads_of(rank: int, size: int, cache: Tensor, ours: Tensor) -> Tensor:
    """What a rank caches of one process's rows; latent rows it caches whole."""
    first = rank * cache.shape[-2] // size
    return cache[..., first : first + ours.shape[-2], :]


def assert_ranks_compute_the_same(folder: Path, weights: str, size: int, whole: Any) -> None:
    """States, logits and KV; every rank has the same bits of what is whole on all of them."""
    targets = as_ranks(Layout(tensor=size), lambda ranks: load(folder, weights, ranks.group))
    wanted, caches = run(whole)
    for name, tensor in whole.tensors().items():
        for target in targets:
            weight = target.tensors()[name]
            mine = weight.read(tensor.__getitem__) if isinstance(weight, Part) else tensor
            assert mine.equal(held(weight)), name
    results = as_ranks(Layout(tensor=size), lambda ranks: run(targets[ranks.rank]))
    for rank, (found, own) in enumerate(results):
        for ours, theirs, first in zip(found, wanted, results[0][0], strict=True):
            assert_near(ours, theirs)
            assert ours.equal(first)
        for ours, theirs in zip(own, caches, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                assert_near(ours, kv_heads_of(rank, size, theirs, ours))


def stirred(folder: Path) -> Any:
    """A target of the folder's config whose biases, norms and scalars are random too, written into
    the folder.
    """
    target = load(folder, "random")
    generator = torch.Generator().manual_seed(5)
    for name, weight in sorted(target.tensors().items()):
        if held(weight).dim() < 2:
            change = torch.rand(weight.shape, generator=generator, dtype=torch.float64)
            held(weight).copy_(change - 0.5 if name.endswith("bias") else change + 0.5)
    tensors = {k: held(v).to(torch.float64).contiguous() for k, v in target.tensors().items()}
    save_file(tensors, folder / "model.safetensors")
    return load(folder, "checkpoint")


@pytest.mark.parametrize(("name", "size"), EACH)
def test_ranks_compute_what_one_process_computes(name: str, size: int, tmp_path: Path) -> None:
    """Catches biases added by every rank, heads beside the wrong KV head, halves of gate and up
    mixed, norms before the sum over ranks, rows of tables off by a rank.
    """
    write_folder(tmp_path, CASES[name].config)
    assert_ranks_compute_the_same(tmp_path, "checkpoint", size, stirred(tmp_path))


@pytest.mark.parametrize(("name", "size"), EACH)
def test_random_weights_are_those_of_one_process(name: str, size: int, tmp_path: Path) -> None:
    write_folder(tmp_path, CASES[name].config)
    assert_ranks_compute_the_same(tmp_path, "random", size, load(tmp_path, "random"))


def test_ranks_read_mistrals_own_format(tmp_path: Path) -> None:
    """Rows of wq and wk are turned by whole heads before a rank takes its own."""
    config = dense("mistral", num_key_value_heads=4, sliding_window=None)
    whole = load(write_folder(tmp_path / "hf", config), "random")
    tensors = {}
    for name, weight in whole.tensors().items():
        full = name if name == "lm_head.weight" else f"model.{name}"
        theirs = mistral_names.consolidated_name(full)
        heads = mistral_names.rotary_heads(theirs, config)
        tensor = held(weight)
        tensors[theirs] = (
            tensor if heads is None else mistral_names.interleaved(tensor.contiguous(), heads)
        ).contiguous()
    (tmp_path / "own").mkdir()
    save_file(tensors, tmp_path / "own" / "consolidated.safetensors")
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    assert_ranks_compute_the_same(tmp_path / "own", "checkpoint", 2, whole)


@pytest.mark.parametrize(
    ("name", "size", "obstacle", "allowed"),
    [
        ("gemma4", 5, "num_attention_heads is 12", "1, 2, 4, 6, 12"),
        ("mistral", 2, "num_key_value_heads is 3", "1, 3, 6, 12"),
        ("gemma4 moe", 4, "KV heads of sliding_attention layers is 6", "1, 2, 3, 6, 12"),
        ("deepseek", 8, "num_attention_heads is 12", "1, 2, 3, 4, 6, 12"),
    ],
)
def test_what_does_not_divide_is_refused(
    name: str, size: int, obstacle: str, allowed: str, tmp_path: Path
) -> None:
    """One message with the key, its value, what stands in the way, and what would go."""
    write_folder(tmp_path, CASES[name].config)
    with pytest.raises(ConfigurationError) as refused:
        as_ranks(Layout(tensor=size), lambda ranks: load(tmp_path, "random", ranks.group))
    message = str(refused.value)
    assert message.startswith(f"parallelism.tensor={size} ")
    assert obstacle in message
    assert f"\n  allowed: {allowed}\n" in message
    assert refused.value.key == "parallelism.tensor"

"""Tensor-parallel targets of every family compute what one process computes, each rank with its
part of the weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_oracle import deepseek_config, random_deepseek_config
from dense_oracle import random_config, small
from gemma4_oracle import PagedRun, random_text_config
from gemma4_oracle import load as load_checkpoint
from safetensors.torch import save_file
from thread_ranks import as_ranks
from tiny_targets import gemma4_config, write_folder
from torch import Tensor

from hydraspec.errors import ConfigurationError
from hydraspec.models.checkpoint import mistral_names
from hydraspec.models.checkpoint.reader import open_checkpoint
from hydraspec.models.decoder import Decoder
from hydraspec.models.kv_groups import FULL, SLIDING
from hydraspec.models.moe import one_by_one
from hydraspec.models.parts import Part, held
from hydraspec.models.stages import WHOLE, Stage
from hydraspec.models.weights import EMPTY
from hydraspec.parallel.group import SOLO, SoloGroup, TensorGroup
from hydraspec.parallel.layout import Layout
from hydraspec.types import IntermediateTensors

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
GROWING = {"rope_type": "default", "original_max_position_embeddings": 4}
GROWING |= {"rope_theta": 1e4, "llama_4_scaling_beta": 0.5}
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
    "ministral3": Case(dense("ministral3", num_key_value_heads=4, rope_parameters=GROWING), (2,)),
    "qwen2": Case(dense("qwen2", num_key_value_heads=12, tie_word_embeddings=True), (3,)),
    "qwen3": Case(dense("qwen3", num_key_value_heads=2), (2, 6)),
    "deepseek": Case(deepseek(attention_bias=True, n_shared_experts=2, vocab_size=97), (2, 3)),
    "deepseek without query latent": Case(deepseek(q_lora_rank=None, **YARN_FREE), (4,)),
}
EACH = [(name, size) for name, case in CASES.items() for size in case.sizes]


def load(folder: Path, weights: str, group: TensorGroup = SOLO, stage: Stage = WHOLE) -> Any:
    return load_checkpoint(folder, torch.float64, weights=weights, seed=3, group=group, stage=stage)


def steps(vocab_size: int) -> list[dict[int, list[int]]]:
    """Tokens of three requests in mixed steps."""
    generator = torch.Generator().manual_seed(1)
    return [
        {
            r: torch.randint(vocab_size, (count,), generator=generator).tolist()
            for r, count in enumerate(counts)
        }
        for counts in ((9, 5, 1), (1, 6, 2), (1, 1, 1))
    ]


def run(
    target: Any, received: Sequence[IntermediateTensors | None] = (None, None, None)
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Hidden states, aux states and logits of mixed steps, and the caches after them; of a last
    stage from what the stage before handed over in each step.
    """
    paged = PagedRun(target, 3, frees=False)
    found: list[Tensor] = []
    for tokens, before in zip(steps(target.vocab_size), received, strict=True):
        batch = paged.batch(tokens)
        with torch.inference_mode():
            hidden, aux = target.forward(
                batch, paged.caches, (0, 1, target.num_layers), None, before
            )
            found += [hidden, *aux, target.vocabulary.whole(target.compute_logits(hidden))]
    return found, paged.caches


def hand_over(target: Any) -> list[IntermediateTensors]:
    """What the first of two stages hands over in each step."""
    paged = PagedRun(target, 3, frees=False)
    found = []
    for tokens in steps(target.vocab_size):
        with torch.inference_mode():
            h, aux = target.forward(paged.batch(tokens), paged.caches, (0, 1, target.num_layers))
        found.append(IntermediateTensors(hidden_states=h, aux_hidden_states=aux))
    return found


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    known = theirs.isfinite()
    assert ours.shape == theirs.shape
    assert ours.isfinite().equal(known)
    assert (ours - theirs)[known].abs().max() <= TOLERANCE * theirs[known].abs().max().clamp(min=1)


def kv_heads_of(rank: int, size: int, cache: Tensor, ours: Tensor) -> Tensor:
    """What a rank caches of one process's rows; latent rows it caches whole."""
    first = rank * cache.shape[-2] // size
    return cache[..., first : first + ours.shape[-2], :]


def ranks_with_parts(folder: Path, weights: str, size: int, whole: Any) -> list[Any]:
    """The ranks' targets, whose weights are parts of one process's."""
    targets = as_ranks(Layout(tensor=size), lambda ranks: load(folder, weights, ranks.group))
    for name, tensor in whole.tensors().items():
        for target in targets:
            weight = target.tensors()[name]
            mine = weight.read(tensor.__getitem__) if isinstance(weight, Part) else tensor
            assert mine.equal(held(weight)), name
    return targets


def assert_ranks_compute_the_same(folder: Path, size: int, whole: Any) -> None:
    """States, logits and KV; every rank has the same bits of what is whole on all of them."""
    targets = ranks_with_parts(folder, "checkpoint", size, whole)
    wanted, caches = run(whole)
    results = as_ranks(Layout(tensor=size), lambda ranks: run(targets[ranks.rank]))
    for rank, (found, own) in enumerate(results):
        for ours, theirs, first in zip(found, wanted, results[0][0], strict=True):
            assert_near(ours, theirs)
            assert ours.equal(first)
        for ours, theirs in zip(own, caches, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                assert_near(ours, kv_heads_of(rank, size, theirs, ours))


def stirred(folder: Path, config: dict[str, Any], *, packed: bool = True) -> Any:
    """A target whose biases, norms and scalars are random too, and that suppresses tokens, written
    into the folder.
    """
    write_folder(folder, config)
    vocab = config["vocab_size"]
    suppressed = {"suppress_tokens": [3, vocab // 2, vocab - 1]}
    (folder / "generation_config.json").write_text(json.dumps(suppressed))
    target = load(folder, "random")
    generator = torch.Generator().manual_seed(5)
    named = target.tensors() if packed else one_by_one(target.tensors())
    for name, weight in sorted(named.items()):
        if held(weight).dim() < 2:
            change = torch.rand(weight.shape, generator=generator, dtype=torch.float64)
            held(weight).copy_(change - 0.5 if name.endswith("bias") else change + 0.5)
    tensors = {k: held(v).to(torch.float64).contiguous() for k, v in named.items()}
    save_file(tensors, folder / "model.safetensors")
    return load(folder, "checkpoint")


@pytest.mark.parametrize(("name", "size"), EACH)
def test_ranks_compute_what_one_process_computes(name: str, size: int, tmp_path: Path) -> None:
    """Catches biases added by every rank, heads beside the wrong KV head, halves of gate and up
    mixed, norms before the sum over ranks, rows of tables off by a rank.
    """
    whole = stirred(tmp_path, CASES[name].config)
    assert_ranks_compute_the_same(tmp_path, size, whole)


STAGED = {
    # The stage's border is before the layers that share KV and after some that do not.
    "gemma4 e": gemma4(
        num_key_value_heads=1,
        vocab_size_per_layer_input=50,
        **SHARED | {"num_hidden_layers": 6, "layer_types": [*SHARED["layer_types"], SLIDING, FULL]},
    ),
    "gemma4 moe": CASES["gemma4 moe"].config,
    "deepseek": CASES["deepseek"].config,
}


@pytest.mark.parametrize("name", STAGED)
def test_stages_of_two_ranks_compute_what_one_process_computes(name: str, tmp_path: Path) -> None:
    """tp2_pp2: hidden states, aux states of both stages, logits."""
    whole = stirred(tmp_path, STAGED[name])
    first, last = (
        as_ranks(
            Layout(tensor=2), lambda ranks, s=stage: load(tmp_path, "checkpoint", ranks.group, s)
        )
        for stage in (Stage(index=0, count=2), Stage(index=1, count=2))
    )
    assert [*first[0].held, *last[0].held] == list(range(whole.num_layers))
    handed = as_ranks(Layout(tensor=2), lambda ranks: hand_over(first[ranks.rank]))
    found = as_ranks(Layout(tensor=2), lambda ranks: run(last[ranks.rank], handed[ranks.rank])[0])
    for ours in found:
        for each, theirs, other in zip(ours, run(whole)[0], found[0], strict=True):
            assert_near(each, theirs)
            assert each.equal(other)


RANDOM = {
    "gemma4": (lambda seed: {"model_type": "gemma4_text"} | random_text_config(seed)),
    "deepseek_v3": (lambda seed: {"model_type": "deepseek_v3"} | random_deepseek_config(seed)),
} | {
    family: (lambda seed, family=family: {"model_type": family} | random_config(family, seed))
    for family in ("llama", "mistral", "qwen2", "qwen3", "mimo")
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("family", RANDOM)
def test_ranks_compute_random_shapes(family: str, seed: int, tmp_path: Path) -> None:
    """Shapes drawn over every field, on 2, 3 and 4 ranks where that divides them."""
    whole = stirred(tmp_path, RANDOM[family](seed), packed=bool(seed % 2))
    for size in (2, 3, 4):
        if whole.config.divided.obstacle(size) is None:
            assert_ranks_compute_the_same(tmp_path, size, whole)


@pytest.mark.parametrize("name", ["deepseek", "gemma4 moe"])
def test_experts_may_be_stored_one_by_one(name: str, tmp_path: Path) -> None:
    """Each rank reads its columns of every expert's matrices."""
    whole = stirred(tmp_path, CASES[name].config, packed=False)
    assert any(".experts.0.gate_proj" in name for name in open_checkpoint(str(tmp_path)).entries())
    assert_ranks_compute_the_same(tmp_path, 2, whole)


@pytest.mark.parametrize(("name", "size"), EACH)
def test_random_weights_are_those_of_one_process(name: str, size: int, tmp_path: Path) -> None:
    write_folder(tmp_path, CASES[name].config)
    ranks_with_parts(tmp_path, "random", size, load(tmp_path, "random"))


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
    assert_ranks_compute_the_same(tmp_path / "own", 2, whole)


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


@dataclass
class Rank(SoloGroup):
    """A rank that only builds."""

    rank: int
    size: int


NORMS = r"(.*norm(_[12])?|layer_scalar|.*layernorm(_[12])?)(\.weight)?"
REPLICATED = {
    # Beside norms and scalars: routers, per-layer inputs but their table, and KV heads where there
    # are fewer than ranks.
    "gemma4_31b": r"^$",
    "gemma4_26b_a4b": r"router\.(proj\.weight|scale|per_expert_scale)",
    "gemma4_e4b": r"per_layer_(model_projection|input_gate|projection).*",
    "gemma4_e2b": r"per_layer_(model_projection|input_gate|projection).*|self_attn\.[kv]_proj.*",
    "qwen3_8b": r"^$",
    "deepseek_v3": r"self_attn\.(q_a_proj|kv_a_proj_with_mqa).*|mlp\.gate\..*",
}


def bytes_of_weights(name: str, group: TensorGroup) -> dict[str, int]:
    """Of a published shape, in bfloat16, without memory."""
    where = torch.device("meta")
    target = load_checkpoint(
        f"shape:{name}", torch.bfloat16, weights=EMPTY, device=where, group=group
    )
    assert isinstance(target, Decoder)
    return {name: held(weight).nbytes for name, weight in target.tensors().items()}


@pytest.mark.parametrize("name", REPLICATED)
def test_a_rank_of_two_holds_half_of_the_weights(name: str) -> None:
    """At most 52 % of one process's bytes; what every rank holds whole is listed by name."""
    whole = bytes_of_weights(name, SOLO)
    for rank in (0, 1):
        own = bytes_of_weights(name, Rank(rank, 2))
        assert own.keys() == whole.keys()
        both = {k for k, size in own.items() if 2 * size > whole[k]}
        known = re.compile(rf"(layers\.\d+\.)?({NORMS}|{REPLICATED[name]})")
        assert [k for k in sorted(both) if not known.fullmatch(k)] == []
        assert sum(own.values()) <= 0.52 * sum(whole.values())
        divided = sum(whole.values()) - sum(whole[k] for k in both)
        assert sum(size for k, size in own.items() if k not in both) == divided / 2

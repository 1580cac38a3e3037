"""Target families beside an independent definition of each, for one regime of parity tests."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from deepseek_oracle import deepseek_logits, make_deepseek, pack_experts, random_deepseek_config
from dense_oracle import (
    make_dense,
    make_mimo,
    mimo_logits,
    random_config,
    to_multimodal_layout,
    to_old_rope_layout,
)
from dense_oracle import oracle as dense_logits
from gemma4_oracle import (
    PagedRun,
    load,
    make_target,
    oracle_logits,
    random_text_config,
    run_in_chunks,
    to_public_layout,
)
from torch import Tensor

Config = dict[str, Any]
DENSE = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Family:
    """Random configurations of a family, its oracle, and the layouts in which files come."""

    random_config: Callable[[int], Config]
    make: Callable[[Config, int], Any]  # a model of transformers, from a seed
    logits: Callable[[Any, list[int]], Tensor]  # [T, V] of a prompt of T tokens
    relayout: Callable[[Path, Config], object]  # rewrites a saved folder as it is released
    is_relaid: Callable[[int], bool]  # whether a seed's folder is rewritten
    num_shapes: int


def _dense(name: str) -> Family:
    return Family(
        random_config=lambda seed: random_config(name, seed),
        make=lambda config, seed: make_dense(name, config, seed),
        logits=lambda model, prompt: dense_logits(model, prompt)[0],
        relayout=lambda folder, _: to_old_rope_layout(folder),
        is_relaid=lambda seed: seed % 2 == 1,
        num_shapes=30,
    )


FAMILIES = {
    "gemma4": Family(
        random_config=random_text_config,
        make=make_target,
        logits=oracle_logits,
        relayout=to_public_layout,
        is_relaid=lambda seed: seed % 2 == 0,
        num_shapes=36,
    ),
    "deepseek_v3": Family(
        random_config=random_deepseek_config,
        make=make_deepseek,
        logits=deepseek_logits,
        relayout=lambda folder, _: pack_experts(folder),
        is_relaid=lambda seed: seed % 3 == 0,
        num_shapes=36,
    ),
    **{name: _dense(name) for name in (*DENSE, "ministral")},
    "ministral3": replace(
        _dense("ministral3"), relayout=lambda folder, _: to_multimodal_layout(folder), num_shapes=12
    ),
}


def mimo_config(seed: int) -> Config:
    """A configuration of MiMo, whose published code has no layer types and one activation."""
    config = random_config("qwen2", seed)
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 640000.0}
    return {key: value for key, value in config.items() if key not in ("layer_types", "hidden_act")}


def mimo_oracle(config: Config, seed: int, folder: Path) -> Callable[[list[int]], Tensor]:
    """Writes a checkpoint of MiMo, which transformers lacks; returns its logits of a prompt."""
    weights = make_mimo(config, seed, folder)
    return lambda prompt: mimo_logits(weights, config, prompt)


def prompts_of(seed: int, vocab: int = 96) -> list[list[int]]:
    """Three prompts, shorter than, about and well beyond a window."""
    draw = random.Random(seed)
    lengths = [(1, 6), (7, 20), (21, 45)]
    return [[draw.randrange(vocab) for _ in range(draw.randint(*n))] for n in lengths]


def logits_in_chunks(
    folder: Path, seed: int, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[list[int], Tensor]]:
    """Each prompt of a seed with its logits [T, V]: prefill and decode mixed, in chunks, through a
    cache that is NaN wherever nothing was written."""
    run = PagedRun(
        load(folder, dtype), 3, block_size=random.Random(seed).choice([1, 4, 16]), seed=seed
    )
    run.slack = seed % 3 * 7
    prompts = prompts_of(seed)
    yield from zip(prompts, run_in_chunks(run, prompts, seed), strict=True)


def logits_of_dtype(folder: Path, dtype: torch.dtype, seed: int) -> Tensor:
    """[T, V] of the three prompts of a seed, one after the other, computed in `dtype`."""
    return torch.cat(run_in_chunks(PagedRun(load(folder, dtype), 3), prompts_of(seed), seed))


def assert_near(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    """Logits differ by at most a share of their range."""
    assert (ours - theirs).abs().max() <= tolerance * (theirs.max() - theirs.min())

"""transformers' Gemma 4 as an oracle: random checkpoints on disk, and our models run over a paged
cache.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_targets import load
from torch import Tensor, nn
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)

from hydraspec.models import TargetModel
from hydraspec.types import RowSegment

SLIDING, FULL = "sliding_attention", "full_attention"


def text_config(**changes: Any) -> dict[str, Any]:
    """Arguments of a small dense Gemma4TextConfig; every one can be overridden."""
    return {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": False,
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "sliding_window": 8,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 256,
    } | changes


def random_text_config(seed: int) -> dict[str, Any]:
    """A shape drawn over every field that changes the computation."""
    draw = random.Random(seed)
    layers = draw.randint(2, 7)
    heads = draw.choice([2, 4, 6])
    kinds = [draw.choice([SLIDING, SLIDING, FULL]) for _ in range(layers - 1)] + [FULL]
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    changes: dict[str, Any] = {
        "hidden_size": draw.choice([24, 32, 40]),
        "intermediate_size": draw.choice([16, 48]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice(divisors),
        "num_global_key_value_heads": draw.choice([None, *divisors]),
        "head_dim": draw.choice([8, 16]),
        "global_head_dim": draw.choice([16, 32]),
        "attention_k_eq_v": draw.random() < 0.5,
        "attention_bias": draw.random() < 0.2,
        "layer_types": kinds,
        "sliding_window": draw.choice([3, 4, 8, 11]),
        "final_logit_softcapping": draw.choice([None, 5.0, 30.0]),
        "tie_word_embeddings": draw.random() < 0.8,
        "rms_norm_eps": draw.choice([1e-6, 1e-3]),
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": draw.choice([1e2, 1e4])},
            FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": draw.choice([0.25, 0.5, 1.0]),
                "rope_theta": draw.choice([1e3, 1e6]),
            },
        },
    }
    # Sharing layers need an owner of each of their types before them.
    shareable = [n for n in range(1, layers) if set(kinds[: layers - n]) == set(kinds)]
    if shareable and draw.random() < 0.5:
        changes["num_kv_shared_layers"] = draw.choice(shareable)
        changes["use_double_wide_mlp"] = draw.random() < 0.7
    if draw.random() < 0.4:
        changes["hidden_size_per_layer_input"] = draw.choice([4, 8])
        changes["vocab_size_per_layer_input"] = 96
    if draw.random() < 0.4:
        experts = draw.choice([3, 8])
        changes["enable_moe_block"] = True
        changes["num_experts"], changes["top_k_experts"] = experts, draw.randint(1, 3)
        changes["moe_intermediate_size"] = 12
    return text_config(**changes)


def stir(model: nn.Module, seed: int) -> None:
    """Random values for every weight and buffer, so that a part that is lost or misread shows."""
    draw = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("token_ordering"):
            tensor.data.copy_(torch.randperm(len(tensor), generator=draw))
        elif name.endswith(("scale", "scalar")) or "norm" in name or tensor.dim() == 0:
            if tensor.dim() and not name.endswith("embed_scale"):
                # Scores of deviation about 2: sharper attention amplifies rounding beyond any
                # tolerance.
                size = (
                    1.4 * len(tensor) ** -0.25
                    if name.endswith(("q_norm.weight", "k_norm.weight"))
                    else 1
                )
                tensor.data.copy_((torch.rand(tensor.shape, generator=draw) + 0.5) * size)
        elif not name.endswith("inv_freq"):
            std = tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.3
            tensor.data.copy_(torch.randn(tensor.shape, generator=draw) * std)


def make_target(config: dict[str, Any], seed: int) -> Gemma4ForCausalLM:
    """transformers' model in float32 with stirred weights."""
    model = Gemma4ForCausalLM(Gemma4TextConfig(**config)).eval()
    stir(model, seed)
    return model


def oracle_logits(model: Gemma4ForCausalLM, prompt: list[int]) -> Tensor:
    """Logits [len, V] of an uncached forward."""
    # With hidden states asked for, 5.23 leaves out a shortcut that fails for shared KV without
    # per-layer inputs.
    with torch.no_grad():
        return model(torch.tensor([prompt]), output_hidden_states=True).logits[0]


def make_assistant(text: dict[str, Any], seed: int, **top: Any) -> Gemma4AssistantForCausalLM:
    """transformers' assistant in float32 with stirred weights."""
    mend_assistant_config()
    text = text | {"num_kv_shared_layers": text["num_hidden_layers"]}
    config = Gemma4AssistantConfig(text_config=Gemma4TextConfig(**text), **top)
    model = Gemma4AssistantForCausalLM(config).eval()
    stir(model, seed)
    return model


def mend_assistant_config() -> None:
    """transformers 5.23 refuses every assistant: its config wants a layer that owns KV, and none
    does.
    """
    ours = getattr(Gemma4TextConfig, "kv_sharing_modes", None)
    if ours is None or getattr(ours, "mended", False):
        return

    class Mended(property):
        mended = True

    def modes(config: Gemma4TextConfig) -> list[str | None]:
        if config.num_kv_shared_layers == config.num_hidden_layers:
            return ["reuse"] * config.num_hidden_layers
        return ours.fget(config)  # type: ignore[no-any-return]

    Gemma4TextConfig.kv_sharing_modes = Mended(modes)


def to_public_layout(folder: Path, config: dict[str, Any]) -> None:
    """Rewrite config.json as releases have it: global_ keys, text under text_config."""
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    raw.pop("per_layer_config")
    raw["global_head_dim"] = config["global_head_dim"]
    raw["num_global_key_value_heads"] = config["num_global_key_value_heads"]
    tied = raw["tie_word_embeddings"]
    whole = {"model_type": "gemma4", "text_config": raw, "tie_word_embeddings": tied}
    file.write_text(json.dumps(whole))


def random_target(
    folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32
) -> TargetModel:
    """Our target of a text config, with random weights; config.json is written into the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma4_text"} | config))
    return load(folder, dtype, weights="random")


def load_zoo(name: str) -> TargetModel:
    """A shipped target in float32."""
    return load(f"zoo:{name}")


class HeadAsTarget:
    """Lets PagedRun make caches and rows for a draft head."""

    def __init__(self, head: Any, dtype: torch.dtype = torch.float64, num_layers: int = 16) -> None:
        self.head, self.dtype, self.num_layers = head, dtype, num_layers

    def kv_groups(self, block_size: int) -> list[Any]:
        """The head's groups, from layer 0 on."""
        groups: list[Any] = self.head.kv_groups(block_size, 0)
        return groups


@dataclass
class Pass:
    """What a target's forward reads of a batch, and where each request's rows end."""

    requests: list[int]
    ends: list[int]
    segments: tuple[RowSegment, ...]
    input_ids: Tensor  # [T]
    positions: Tensor  # [T]
    seq_lens: Tensor  # [B]
    slot_mapping: list[Tensor]  # per KV group [T]
    block_tables: list[Tensor]  # per KV group [B, P]
    query_start_loc: Tensor  # [B+1]
    has_padding: bool = False
    encoded: Any = None


def final_hidden(target: Any, batch: Pass, caches: list[Tensor | None]) -> Tensor:
    """Hidden states after the final norm [T, D]; forward may return aux states beside them."""
    out = target.forward(batch, caches)
    return out[0] if isinstance(out, tuple) else out


@dataclass
class PagedRun:
    """Drives a target over shuffled block tables; whatever no request owns is NaN (but block 0,
    zero).
    """

    target: TargetModel
    num_requests: int
    block_size: int = 4
    max_len: int = 64
    seed: int = 0
    frees: bool = True  # whether blocks that a window has passed are given up
    slack: int = 0  # how far max_seq_len lies above the truth
    lengths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.groups = self.target.kv_groups(self.block_size)
        per_request = -(-self.max_len // self.block_size)
        blocks = self.num_requests * per_request
        shuffle = np.random.default_rng(self.seed)
        self.tables = [
            torch.from_numpy(shuffle.permutation(blocks) + 1).view(self.num_requests, per_request)
            for _ in self.groups
        ]
        self.caches: list[Tensor | None] = [None] * self.target.num_layers
        for group in self.groups:
            shape = ((blocks + 1) * self.block_size, *group.shape.page_row)
            for layer in group.layers:
                cache = torch.full(shape, torch.nan, dtype=self.target.dtype)
                cache[: self.block_size] = 0
                self.caches[layer] = cache
        self.lengths = [0] * self.num_requests

    def batch(self, tokens: dict[int, list[int]]) -> Pass:
        """Rows for the given requests, ordered by row count; lengths move on."""
        order = sorted(tokens, key=lambda r: len(tokens[r]))
        rows = torch.tensor([len(tokens[r]) for r in order])
        start = torch.tensor([self.lengths[r] for r in order])
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(start, rows, strict=True)])
        request = torch.repeat_interleave(torch.arange(len(order)), rows)
        tables = [table[order] for table in self.tables]
        slots = [
            t[request, positions // self.block_size] * self.block_size + positions % self.block_size
            for t in tables
        ]
        for r in order:
            self.lengths[r] += len(tokens[r])
        return Pass(
            requests=order,
            ends=rows.cumsum(0).tolist(),
            segments=self._segments([len(tokens[r]) for r in order], (start + rows).tolist()),
            input_ids=torch.tensor([t for r in order for t in tokens[r]]),
            positions=positions,
            seq_lens=start + rows,
            slot_mapping=slots,
            block_tables=tables,
            query_start_loc=torch.nn.functional.pad(rows.cumsum(0), (1, 0)),
        )

    def _segments(self, rows: list[int], lens: list[int]) -> tuple[RowSegment, ...]:
        segments, first_row = [], 0
        for count in sorted(set(rows)):
            first, num = rows.index(count), rows.count(count)
            longest = max(lens[first : first + num]) + self.slack
            segments.append(RowSegment(first_row, first, num, count, longest))
            first_row += count * num
        return tuple(segments)

    def step(self, tokens: dict[int, list[int]]) -> dict[int, tuple[Tensor, Tensor]]:
        """One forward: per request its hidden states [R, D] and logits [R, V]."""
        batch = self.batch(tokens)
        with torch.inference_mode():
            hidden = final_hidden(self.target, batch, self.caches)
            logits = self.target.compute_logits(hidden)
        self._free_passed_blocks()
        starts = [0, *batch.ends]
        return {
            r: (hidden[starts[i] : starts[i + 1]], logits[starts[i] : starts[i + 1]])
            for i, r in enumerate(batch.requests)
        }

    def shared_kv(
        self, request: int, length: int, sliding: str, full: str
    ) -> dict[str, tuple[Tensor, ...]]:
        """transformers' shared KV states of one request, sliding ones cut to the window.

        transformers' flipped mask shows a sliding draft layer one entry more than the target's own
        window.
        """
        states = {}
        for group, table in zip(self.groups, self.tables, strict=True):
            cache = self.caches[group.layers[-1]]
            assert cache is not None
            j = torch.arange(0 if group.window is None else max(0, length - group.window), length)
            rows = cache[
                table[request, j // self.block_size] * self.block_size + j % self.block_size
            ]
            kind = sliding if group.window else full
            states[kind] = tuple(rows[:, i].transpose(0, 1)[None] for i in (0, 1))
        return states

    def _free_passed_blocks(self) -> None:
        for group, table in zip(self.groups, self.tables, strict=True):
            if group.window is None or not self.frees:
                continue
            for r, length in enumerate(self.lengths):
                for block in range(max(0, length - group.window + 1) // self.block_size):
                    first = int(table[r, block]) * self.block_size
                    table[r, block] = 0
                    if first:
                        for layer in group.layers:
                            cache = self.caches[layer]
                            assert cache is not None
                            cache[first : first + self.block_size] = torch.nan


def run_in_chunks(run: PagedRun, prompts: list[list[int]], seed: int) -> list[Tensor]:
    """Logits [len, V] of every prompt, fed in random chunks of mixed sizes, singles among them."""
    draw = random.Random(seed)
    parts: list[list[Tensor]] = [[] for _ in prompts]
    while any(run.lengths[r] < len(p) for r, p in enumerate(prompts)):
        tokens = {}
        for r, prompt in enumerate(prompts):
            left = prompt[run.lengths[r] :]
            if left and draw.random() < 0.85:
                tokens[r] = left[: draw.choice([1, 1, 2, 4, 4, 13])]
        if tokens:
            for r, (_, logits) in run.step(tokens).items():
                parts[r].append(logits)
    return [torch.cat(p) for p in parts]

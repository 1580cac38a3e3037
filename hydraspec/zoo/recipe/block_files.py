"""Writes block drafters as files in the published formats, and reads them back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hydraspec.zoo.recipe.block_heads import BlockHead, BlockShape
from hydraspec.zoo.recipe.block_recipes import BlockRecipe
from hydraspec.zoo.recipe.draft_files import (
    MAX_POSITIONS,
    SPECULATORS_VERSION,
    proposals,
    read_tensors,
    vocabulary_tensors,
)
from hydraspec.zoo.recipe.modeling import write_json, write_tensors
from hydraspec.zoo.recipe.recipes import FULL, SLIDING
from hydraspec.zoo.recipe.train_block import build


def save_block(head: BlockHead, recipe: BlockRecipe, target: PreTrainedModel, folder: Path) -> None:
    """Write a head's tensors in bfloat16, and its config."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.to(torch.bfloat16) for k, v in head.state_dict().items()}
    if head.token_ids is not None:
        state |= vocabulary_tensors(head.token_ids, head.shape.vocab_size)
    if recipe.format == "speculators":
        state.pop("embed_tokens.weight", None)  # the target's
    write_tensors(folder, state)
    write_json(folder / "config.json", _config(head, recipe, target))


def load_block(folder: Path, recipe: BlockRecipe, target: PreTrainedModel) -> BlockHead:
    """A saved head in float32, on the target's device."""
    head = build(recipe, target.config)
    state = read_tensors(head, folder, target.device)
    if recipe.own_tables and "embed_tokens.weight" not in state:
        state["embed_tokens.weight"] = target.get_input_embeddings().weight
    head.load_state_dict({k: v.float() for k, v in state.items()})
    return head.to(target.device).eval()


def _config(head: BlockHead, recipe: BlockRecipe, target: PreTrainedModel) -> dict[str, Any]:
    shape = head.shape
    layers = _layers(shape)
    outputs = [i - 1 for i in recipe.aux_layer_ids]
    blocks = {
        "block_size": shape.block_size,
        "dtype": "bfloat16",
        "num_target_layers": target.config.num_hidden_layers,
    }
    if recipe.format == "z-lab":
        own = {"mask_token_id": shape.mask_token_id, "target_layer_ids": outputs}
        name = "DFlashDraftModel"
        if shape.selector_rank:
            name, own = "DFlash2DraftModel", own | _selector(shape)
        return {**layers, **blocks, "architectures": [name], "dflash_config": own}
    heads: dict[str, Any] = {
        "enable_confidence_head": bool(shape.markov_rank),
        "markov_rank": shape.markov_rank,
        "mask_token_id": shape.mask_token_id,
    }
    if shape.markov_rank:
        heads |= {"confidence_head_with_markov": True, "markov_head_type": shape.markov_kind}
    if recipe.format == "deepseek-ai":
        own = {"num_anchors": recipe.num_anchors, "target_layer_ids": outputs}
        return {**layers, **blocks, **heads, **own, "architectures": ["Qwen3DSparkModel"]}
    return _speculators(head, recipe, target, layers, heads)


def _selector(shape: BlockShape) -> dict[str, Any]:
    """DFlash2's keys."""
    return {
        "conv_group_size": shape.conv_group,
        "conv_kernel_size": shape.conv_taps,
        "selector_rank": shape.selector_rank,
        "selector_top_k": shape.num_candidates,
    }


def _layers(shape: BlockShape) -> dict[str, Any]:
    layer = shape.layer
    window = next((w for w in shape.windows if w is not None), None)
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "hidden_size": layer.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": layer.intermediate_size,
        "layer_types": [FULL if w is None else SLIDING for w in shape.windows],
        "max_position_embeddings": MAX_POSITIONS,
        "max_window_layers": 0,
        "model_type": "qwen3",
        "num_attention_heads": layer.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": layer.num_kv_heads,
        "rms_norm_eps": layer.eps,
        "rope_scaling": None,
        "rope_theta": layer.rope_theta,
        "sliding_window": window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": window is not None,
        "vocab_size": shape.vocab_size,
    }


def _speculators(
    head: BlockHead,
    recipe: BlockRecipe,
    target: PreTrainedModel,
    layers: dict[str, Any],
    heads: dict[str, Any],
) -> dict[str, Any]:
    shape = head.shape
    proposal = {"proposal_type": "greedy", "speculative_tokens": shape.most_drafts}
    return {
        **(heads if recipe.kind == "dspark" else {}),
        "architectures": ["DFlashDraftModel" if recipe.kind == "dflash" else "DSparkDraftModel"],
        "aux_hidden_state_layer_ids": list(recipe.aux_layer_ids),
        "block_size": shape.block_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "dtype": "bfloat16",
        "mask_token_id": shape.mask_token_id,
        "sample_from_anchor": shape.samples_anchor,
        "sliding_window_non_causal": False,
        "speculators_config": proposals(recipe.kind, proposal, target, recipe.target),
        "speculators_model_type": recipe.kind,
        "speculators_version": SPECULATORS_VERSION,
        "target_hidden_size": shape.target_size,
        "tie_word_embeddings": False,
        "transformer_layer_config": layers,
    }

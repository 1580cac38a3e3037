"""Trains a target on the corpus: next-token loss on responses, with a small weight on prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from hydraspec.zoo.recipe.batches import Sequences
from hydraspec.zoo.recipe.modeling import (
    CLASSES,
    GEMMA4,
    GEMMA4_CLASSES,
    initialise,
    load_target,
    prepare,
    run_target,
    save_checkpoint,
    target_masks,
    vary_layer_scalars,
)
from hydraspec.zoo.recipe.recipes import CHECKPOINTS, SEQUENCE_LENGTH, TargetRecipe
from hydraspec.zoo.recipe.training import train

PROMPT_WEIGHT = 0.05


def build(recipe: TargetRecipe) -> PreTrainedModel:
    """A target of the recipe's shape, untrained or with the weights that it starts from."""
    model: PreTrainedModel = (CLASSES | GEMMA4_CLASSES)[recipe.family](recipe.config())
    model.config._experts_implementation = "zoo_dense"
    initialise(model, recipe.seed)
    if isinstance(model, GEMMA4):
        vary_layer_scalars(model)
    else:
        prepare(model, recipe.seed)
    if recipe.start is not None:
        model.load_state_dict(load_target(CHECKPOINTS / recipe.start).state_dict())
        _divide_by_gain(model)
    return model


def _divide_by_gain(model: PreTrainedModel) -> None:
    """Divide queries and keys by YaRN's gain, so that scores start at their former size."""
    decoder: Any = model.get_decoder()
    with torch.no_grad():
        for layer in decoder.layers:
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                part.weight.div_(decoder.rotary_emb.attention_scaling)


def token_weights(batch: Sequences) -> Tensor:
    """Weight of predicting token t from row t-1, [B, T-1]: 1 in responses, PROMPT_WEIGHT in
    prompts, 0 in padding."""
    place = torch.arange(1, batch.tokens.shape[1], device=batch.tokens.device)[None]
    prompt, length = batch.prompt_length[:, None], batch.length[:, None]
    weight = torch.where(place < prompt, PROMPT_WEIGHT, 1.0)
    return weight * (place < length)


def next_token_loss(logits: Tensor, batch: Sequences, weights: Tensor) -> Tensor:
    """Mean cross entropy of all tokens but the first, from logits [B, T-1, V], by weights
    [B, T-1]."""
    targets = batch.tokens[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses.view_as(targets) * weights).sum() / weights.sum()


def train_target(
    recipe: TargetRecipe,
    data: Sequences,
    *,
    title: str,
    compiled: bool,
    max_seconds: float | None = None,
) -> PreTrainedModel:
    """Train a target from scratch on the data's device, for `max_seconds` at most."""
    device = data.tokens.device
    model = build(recipe).to(device)
    masks = target_masks(model, SEQUENCE_LENGTH)

    def loss_of(batch: Sequences) -> Tensor:
        logits = run_target(model, batch.tokens, masks).logits[:, :-1]
        return next_token_loss(logits, batch, token_weights(batch))

    if compiled and recipe.family != "gemma4":
        # Equal layers are compiled once; the whole forward would take ten times as long.
        for layer in model.get_decoder().layers:
            layer.compile()
    elif compiled:
        loss_of = torch.compile(loss_of)
    train(model, loss_of, data, recipe, title, max_seconds=max_seconds)
    return model


def save_target(model: PreTrainedModel, folder: Path, stop_tokens: list[int]) -> None:
    """Write a trained target as a checkpoint folder."""
    model.config._experts_implementation = "eager"
    save_checkpoint(model, folder, stop_tokens)

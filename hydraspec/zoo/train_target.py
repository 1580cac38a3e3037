"""Train a target on the corpus: next-token loss on responses, a little on prompts."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Gemma4ForCausalLM

from hydraspec.zoo.batches import Sequences
from hydraspec.zoo.modeling import (
    causal_masks,
    initialise,
    run_target,
    save_checkpoint,
    vary_layer_scalars,
)
from hydraspec.zoo.recipes import SEQUENCE_LENGTH, TargetRecipe
from hydraspec.zoo.training import Schedule, train

PROMPT_WEIGHT = 0.05
log = logging.getLogger(__name__)


def build(recipe: TargetRecipe) -> Gemma4ForCausalLM:
    model = Gemma4ForCausalLM(recipe.config())
    model.config._experts_implementation = "zoo_dense"
    initialise(model, recipe.seed)
    vary_layer_scalars(model)
    return model


def token_weights(batch: Sequences) -> Tensor:
    """Weight of predicting token t from row t-1, [B, T-1]: response 1, prompt little, padding 0."""
    place = torch.arange(1, batch.tokens.shape[1], device=batch.tokens.device)[None]
    prompt, length = batch.prompt_length[:, None], batch.length[:, None]
    weight = torch.where(place < prompt, PROMPT_WEIGHT, 1.0)
    return weight * (place < length)


def train_target(
    recipe: TargetRecipe,
    data: Sequences,
    *,
    title: str,
    compiled: bool,
    max_seconds: float | None = None,
) -> Gemma4ForCausalLM:
    """Train from scratch on the data's device."""
    device = data.tokens.device
    model = build(recipe).to(device)
    masks = causal_masks(SEQUENCE_LENGTH, model.config.sliding_window, device)

    def loss_of(batch: Sequences) -> Tensor:
        logits = run_target(model, batch.tokens, masks).logits[:, :-1]
        targets = batch.tokens[:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        weights = token_weights(batch)
        return (losses.view_as(targets) * weights).sum() / weights.sum()

    schedule = Schedule(
        steps=recipe.steps,
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        batch_size=recipe.batch_size,
        seed=recipe.seed,
        max_seconds=max_seconds,
    )
    loss = train(model, torch.compile(loss_of) if compiled else loss_of, data, schedule, title)
    log.info("%s: final loss %.4f", title, loss)
    return model


def save_target(model: Gemma4ForCausalLM, folder: Path, stop_tokens: list[int]) -> None:
    model.config._experts_implementation = "eager"
    save_checkpoint(model, folder, stop_tokens)

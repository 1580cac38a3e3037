"""Train an assistant against a frozen target, unrolled over several draft steps.

The convention, for a target row p (the last token with target KV and hidden state h_p): step 0
reads the target embedding of token p+1 and h_p and predicts token p+2; step j reads the embedding
of token p+1+j and the previous step's projected output and predicts token p+2+j. Every step uses
position p and sees the target's KV of 0..p. The loss is the cross entropy with the target's own
distribution at that place.

Letters: B batch, T target rows, Q draft rows, D target hidden width, K draft steps, V vocabulary.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM

from hydraspec.zoo.recipe.batches import Sequences
from hydraspec.zoo.recipe.centroids import cluster_targets, fit_ordering
from hydraspec.zoo.recipe.modeling import (
    causal_masks,
    draft_masks,
    initialise,
    run_draft_step,
    run_target,
)
from hydraspec.zoo.recipe.recipes import AssistantRecipe
from hydraspec.zoo.recipe.training import Schedule, train

DRAFT_ROWS = 72  # more than the longest response has
log = logging.getLogger(__name__)


def build(recipe: AssistantRecipe, target: Gemma4ForCausalLM) -> Gemma4AssistantForCausalLM:
    """An untrained assistant of the recipe's shape for this target."""
    model = Gemma4AssistantForCausalLM(recipe.config(target.config))
    initialise(model, recipe.seed)
    if model.masked_embedding is not None:
        table = target.model.embed_tokens.weight.detach().cpu()
        model.masked_embedding.token_ordering.copy_(fit_ordering(table, recipe.num_centroids or 1))
    return model


def gather_rows(values: Tensor, rows: Tensor) -> Tensor:
    """values [B, T, ...] at rows [B, Q] -> [B, Q, ...]."""
    index = rows.reshape(*rows.shape, *[1] * (values.dim() - 2)).expand(-1, -1, *values.shape[2:])
    return values.gather(1, index)


def unrolled_loss(
    recipe: AssistantRecipe,
    assistant: Gemma4AssistantForCausalLM,
    target: Gemma4ForCausalLM,
    batch: Sequences,
) -> Tensor:
    """Weighted mean over draft rows and steps of the cross entropy with the target."""
    window, length = target.config.sliding_window, batch.tokens.shape[1]
    with torch.no_grad():
        output = run_target(target, batch.tokens, causal_masks(length, window, batch.tokens.device))
        embedded = target.model.embed_tokens(batch.tokens)
    first = batch.prompt_length[:, None].long() - 1
    offsets = torch.arange(DRAFT_ROWS, device=batch.tokens.device)[None]
    rows = (first + offsets).clamp(max=length - 1)
    masks = draft_masks(rows, length, window)
    hidden = gather_rows(output.hidden, rows)
    total = torch.zeros((), device=rows.device)
    weight_sum = torch.zeros((), device=rows.device)
    for j in range(recipe.num_draft_steps):
        read = (rows + 1 + j).clamp(max=length - 1)
        state, hidden = run_draft_step(
            assistant, gather_rows(embedded, read), hidden, rows, output.kv, masks
        )
        teacher = gather_rows(output.logits, read).softmax(-1)
        losses = _cross_entropy(assistant.lm_head(state), teacher)
        if assistant.masked_embedding is not None:
            head = assistant.masked_embedding
            mass = cluster_targets(teacher, head.token_ordering, head.num_centroids)
            losses = losses + _cross_entropy(head.centroids(state), mass)
        valid = (first + offsets + 2 + j < batch.length[:, None]).float()
        total = total + recipe.step_weights[j] * (losses * valid).sum()
        weight_sum = weight_sum + recipe.step_weights[j] * valid.sum()
    return total / weight_sum


def _cross_entropy(logits: Tensor, teacher: Tensor) -> Tensor:
    """logits and teacher [B, Q, V] -> [B, Q]."""
    return -(teacher * F.log_softmax(logits.float(), dim=-1)).sum(-1)


def train_assistant(
    recipe: AssistantRecipe,
    target: Gemma4ForCausalLM,
    data: Sequences,
    *,
    title: str,
) -> Gemma4AssistantForCausalLM:
    """Train from scratch on the data's device; the target is left as it is.

    Not compiled: that would take longer than the training.
    """
    device = data.tokens.device
    target.requires_grad_(False)
    target.config._experts_implementation = "zoo_dense"
    assistant = build(recipe, target).to(device)

    def loss_of(batch: Sequences) -> Tensor:
        return unrolled_loss(recipe, assistant, target, batch)

    schedule = Schedule(
        steps=recipe.steps,
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        batch_size=recipe.batch_size,
        seed=recipe.seed,
        warmup_steps=max(1, recipe.steps // 10),
    )
    loss = train(assistant, loss_of, data, schedule, title)
    log.info("%s: final loss %.4f", title, loss)
    return assistant

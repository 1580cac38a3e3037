"""Trains an assistant against a frozen target, unrolled over several draft steps.

The convention, for a target row p (the last token with target KV and hidden state h_p): step 0
reads the target embedding of token p+1 and h_p and predicts token p+2; step j reads the embedding
of token p+1+j and the previous step's projected output and predicts token p+2+j. Every step uses
position p and sees the target's KV of 0..p. The loss is the cross entropy with the target's own
distribution at that place.

Letters: B batch, T target rows, Q draft rows, D target hidden width, K draft steps, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    Gemma4AssistantForCausalLM,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
)

from hydraspec.zoo.recipe.assistant_recipes import AssistantRecipe
from hydraspec.zoo.recipe.batches import Sequences
from hydraspec.zoo.recipe.modeling import (
    Assistant,
    TargetOutput,
    causal_masks,
    draft_masks,
    initialise,
    load_assistant,
    run_draft_step,
    run_target,
)
from hydraspec.zoo.recipe.recipes import CHECKPOINTS
from hydraspec.zoo.recipe.training import train

DRAFT_ROWS = 72  # more than the longest response has
ITERATIONS = 30  # of the clusters' k-means


def build(recipe: AssistantRecipe, target: Any) -> Assistant:
    """An assistant of the recipe's shape for this target: untrained, or as that of its target's
    teacher."""
    config = recipe.config(target.config)
    is_unified = isinstance(config, Gemma4UnifiedAssistantConfig)
    kind = Gemma4UnifiedAssistantForCausalLM if is_unified else Gemma4AssistantForCausalLM
    model: Assistant = kind(config)
    initialise(model, recipe.seed)
    if recipe.teacher is not None:  # a distilled target has its teacher's states and KV, nearly
        first = load_assistant(CHECKPOINTS / f"{recipe.teacher}-assistant")
        model.load_state_dict(first.state_dict())
        return model
    if model.masked_embedding is not None:
        table = target.model.embed_tokens.weight.detach().cpu()
        model.masked_embedding.token_ordering.copy_(fit_ordering(table, recipe.num_centroids or 1))
    return model


def gather_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Values [B, T, ...] at the rows [B, Q] of each text -> [B, Q, ...]."""
    index = rows.reshape(*rows.shape, *[1] * (values.dim() - 2)).expand(-1, -1, *values.shape[2:])
    return values.gather(1, index)


def unrolled_loss(
    recipe: AssistantRecipe,
    assistant: Assistant,
    target: Any,
    batch: Sequences,
) -> Tensor:
    """Weighted mean over draft rows and steps of the cross entropy with the target; an ordered head
    adds that of its clusters."""
    window, length = target.config.sliding_window, batch.tokens.shape[1]
    with torch.no_grad():
        output = run_target(target, batch.tokens, causal_masks(length, window, batch.tokens.device))
        embedded = target.model.embed_tokens(batch.tokens)
    return drafting_loss(recipe, assistant, batch, output, embedded, DRAFT_ROWS, window)


def drafting_loss(
    recipe: AssistantRecipe,
    assistant: Assistant,
    batch: Sequences,
    output: TargetOutput,
    embedded: Tensor,
    num_rows: int,
    window: int,
) -> Tensor:
    """The same from the target's output and its embeddings [B, T, D], for `num_rows` draft rows of
    each text."""
    length = batch.tokens.shape[1]
    first = batch.prompt_length[:, None].long() - 1
    offsets = torch.arange(num_rows, device=batch.tokens.device)[None]
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
    """Cross entropy of each row, logits and teacher probabilities [B, Q, V] -> [B, Q]."""
    return -(teacher * F.log_softmax(logits.float(), dim=-1)).sum(-1)


def train_assistant(
    recipe: AssistantRecipe,
    target: Any,
    data: Sequences,
    *,
    title: str,
) -> Assistant:
    """Train an assistant from scratch on the data's device; the target's weights stay fixed.

    The step is not compiled, which would take longer than the training.
    """
    device = data.tokens.device
    target.requires_grad_(False)
    target.config._experts_implementation = "zoo_dense"
    assistant = build(recipe, target).to(device)

    def loss_of(batch: Sequences) -> Tensor:
        return unrolled_loss(recipe, assistant, target, batch)

    train(assistant, loss_of, data, recipe, title)
    return assistant


# ------------------------------------------------------------------ clusters of the ordered head


def fit_ordering(table: Tensor, num_centroids: int) -> Tensor:
    """Balanced k-means over the rows of `table` [V, D]; returns `token_ordering` [V].

    Row c of `token_ordering.view(num_centroids, V // num_centroids)` lists the tokens of cluster c.
    Each round assigns (token, cluster) pairs best first until clusters are full.
    """
    points = torch.nn.functional.normalize(table.float(), dim=-1)
    size = len(points) // num_centroids
    if size * num_centroids != len(points):
        raise ValueError(f"num_centroids={num_centroids} must divide the vocabulary, {len(points)}")
    generator = torch.Generator().manual_seed(0)
    centres = points[torch.randperm(len(points), generator=generator)[:num_centroids]]
    members: list[list[int]] = []
    for _ in range(ITERATIONS):
        members = _assign(points @ centres.T, size)
        centres = torch.stack([points[rows].mean(0) for rows in members])
        centres = torch.nn.functional.normalize(centres, dim=-1)
    return torch.tensor([token for rows in members for token in sorted(rows)])


def _assign(similarity: Tensor, size: int) -> list[list[int]]:
    num_clusters = similarity.shape[1]
    members: list[list[int]] = [[] for _ in range(num_clusters)]
    placed = [False] * len(similarity)
    for pair in similarity.flatten().argsort(descending=True).tolist():
        token, cluster = divmod(pair, num_clusters)
        if not placed[token] and len(members[cluster]) < size:
            placed[token] = True
            members[cluster].append(token)
    return members


def cluster_targets(probabilities: Tensor, token_ordering: Tensor, num_centroids: int) -> Tensor:
    """Probability mass of each cluster: [..., V] -> [..., num_centroids]."""
    ordered: Tensor = probabilities[..., token_ordering.long()]
    return ordered.reshape(*ordered.shape[:-1], num_centroids, -1).sum(-1)

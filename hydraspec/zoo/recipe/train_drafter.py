"""Trains a drafter with its own KV over unrolled draft steps, on target states kept beforehand.

The target runs once over all texts; its states are kept, so that a training step is the head alone.
The loss is the cross entropy with the target's own distribution, a weighted mean over steps.

Letters: N texts, B batch, T rows, D target hidden width, A aux states, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from hydraspec.zoo.recipe.batches import Sequences
from hydraspec.zoo.recipe.draft_heads import (
    DraftHead,
    Eagle1Head,
    Eagle3Head,
    Eagle3Shape,
    MTPHead,
    TargetView,
)
from hydraspec.zoo.recipe.modeling import (
    ROUTER_BIAS,
    initialise,
    run_target,
    target_logits,
    target_masks,
)
from hydraspec.zoo.recipe.recipes import DraftRecipe
from hydraspec.zoo.recipe.tokenizer import VOCAB_SIZE
from hydraspec.zoo.recipe.training import train

MASK_TOKEN_ID = 0  # <pad>: no text holds it
CHUNK = 512


@dataclass
class KeptStates:
    """The target's states over all texts."""

    hidden: Tensor  # [N, T, D] after the final norm
    aux: Tensor  # [N, T, A * D]

    def view(self, target: PreTrainedModel, index: Tensor) -> TargetView:
        return view_of(target, self.hidden[index], self.aux[index])


def view_of(target: PreTrainedModel, hidden: Tensor, aux: Tensor) -> TargetView:
    """Inputs that a draft head may read of a target: its embedding, its head and its states."""
    table, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    return TargetView(table.detach(), head.detach(), hidden, aux)


@torch.no_grad()
def read_states(
    target: PreTrainedModel, tokens: Tensor, aux_layer_ids: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """A target's final-norm states [B, T, D], and its aux states side by side [B, T, A * D]."""
    masks = target_masks(target, tokens.shape[1])
    output = run_target(target, tokens, masks, aux_layer_ids)
    nothing = output.hidden.new_zeros(*output.hidden.shape[:2], 0)
    return output.hidden, torch.cat([nothing, *output.aux], -1)


def keep_states(
    target: PreTrainedModel, data: Sequences, aux_layer_ids: tuple[int, ...]
) -> KeptStates:
    """The target's states over all texts, in the precision that training computes in."""
    on_gpu = data.tokens.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    hidden, aux = [], []
    with torch.autocast(data.tokens.device.type, torch.bfloat16, on_gpu):
        for tokens in data.tokens.split(CHUNK):
            states = read_states(target, tokens.long(), aux_layer_ids)
            hidden.append(states[0].to(dtype))
            aux.append(states[1].to(dtype))
    return KeptStates(torch.cat(hidden), torch.cat(aux))


def most_frequent_tokens(data: Sequences, count: int, *more: Sequences) -> Tensor:
    """The `count` tokens that responses hold most often, in ascending order."""
    counts = torch.zeros(VOCAB_SIZE, dtype=torch.long, device=data.tokens.device)
    for part in (data, *more):
        place = torch.arange(part.tokens.shape[1], device=part.tokens.device)[None]
        inside = (place >= part.prompt_length[:, None]) & (place < part.length[:, None])
        counts += torch.bincount(part.tokens[inside].long(), minlength=VOCAB_SIZE)
    return counts.argsort(descending=True, stable=True)[:count].sort().values


def build(recipe: DraftRecipe, target_config: Any) -> DraftHead:
    """An untrained head of the recipe's shape."""
    if recipe.kind == "mtp":
        return MTPHead(target_config)
    assert recipe.layer is not None, "only MTP takes its target's layer"
    if recipe.kind == "eagle":
        return Eagle1Head(recipe.layer, recipe.num_layers)
    return Eagle3Head(
        Eagle3Shape(
            layer=recipe.layer,
            target_size=target_config.hidden_size,
            draft_vocab_size=recipe.draft_vocab_size or target_config.vocab_size,
            vocab_size=target_config.vocab_size,
            num_aux=len(recipe.aux_layer_ids),
            num_layers=recipe.num_layers,
            norm_before_residual=recipe.norm_before_residual,
            norm_before_fc=recipe.norm_before_fc,
            fc_norm=recipe.fc_norm,
            mask_token_id=MASK_TOKEN_ID if recipe.kind == "peagle" else None,
        )
    )


def start(head: DraftHead, recipe: DraftRecipe, aux: Tensor) -> None:
    """Set a head's initial weights. Its `fc` gives states of order one, whatever the size of
    the aux states [N, T, A * D].
    """
    initialise(head, recipe.seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                parameter.mul_(0.5)
            elif name == "mask_hidden":
                parameter.copy_(aux.float().mean((0, 1)))
        for name, buffer in head.named_buffers():
            if name.endswith(ROUTER_BIAS):
                buffer.copy_((torch.arange(len(buffer)) % 5 - 2) / 64)
        if isinstance(head, Eagle3Head) and not (recipe.norm_before_fc or recipe.fc_norm):
            head.fc.weight.div_(aux.float().pow(2).mean((0, 1)).sqrt().cpu() + 1e-3)


def unrolled_loss(
    head: DraftHead,
    recipe: DraftRecipe,
    target: PreTrainedModel,
    view: TargetView,
    batch: Sequences,
) -> Tensor:
    """Weighted mean over rows and steps of the cross entropy with the target."""
    with torch.no_grad():
        teacher = target_logits(target, view.hidden).softmax(-1)
        if head.token_ids is not None:
            teacher = teacher[..., head.token_ids]
    rows = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)[None]
    run = head.begin(view)
    total = torch.zeros((), device=rows.device)
    weight_sum = torch.zeros((), device=rows.device)
    for j, weight in enumerate(recipe.step_weights):
        logits = head.advance(run, batch.tokens.roll(-1 - j, 1)).float()
        wanted = teacher.roll(-1 - j, 1)
        losses = -(wanted * F.log_softmax(logits, dim=-1)).sum(-1)
        drafts = rows >= batch.prompt_length[:, None] - 1
        valid = (drafts & (rows + 2 + j < batch.length[:, None])).float()
        total = total + weight * (losses * valid).sum()
        weight_sum = weight_sum + weight * valid.sum()
    return total / weight_sum


@torch.inference_mode()
def draft_rows(
    target: PreTrainedModel, head: DraftHead, tokens: Tensor, aux_layer_ids: tuple[int, ...], k: int
) -> Tensor:
    """Greedy drafts [B, T, K] of every row of some texts [B, T], each step reading the last draft.

    The target is causal, so its states of a row are those of decoding.
    """
    hidden, aux = read_states(target, tokens, aux_layer_ids)
    run = head.begin(view_of(target, hidden, aux))
    read, drafts = tokens.roll(-1, 1), []
    for _ in range(k):
        read = head.advance(run, read).argmax(-1)
        read = read if head.token_ids is None else head.token_ids[read]
        drafts.append(read)
    return torch.stack(drafts, -1)


def train_drafter(
    recipe: DraftRecipe,
    target: PreTrainedModel,
    data: Sequences,
    *,
    title: str,
    kept: KeptStates | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> DraftHead:
    """Train a head on the data's device, from scratch or from `weights`; the target's weights stay
    fixed.
    """
    target.requires_grad_(False)
    target.config._experts_implementation = "zoo_dense"
    kept = kept or keep_states(target, data, recipe.aux_layer_ids)
    head = build(recipe, target.config)
    start(head, recipe, kept.aux[:CHUNK])
    if weights is not None:
        head.load_state_dict(weights)
    head.to(data.tokens.device)
    if recipe.draft_vocab_size is not None:
        head.token_ids = most_frequent_tokens(data, recipe.draft_vocab_size)

    def loss_of(batch: Sequences) -> Tensor:
        return unrolled_loss(head, recipe, target, kept.view(target, batch.index), batch)

    train(head, loss_of, data, recipe, title)
    return head

"""Trains a block drafter on blocks at random places of the target's answers.

The loss is the cross entropy with the target's distribution, earlier drafts weighing more; for
DSpark also that of its confidence with what would have been accepted.

Letters: N texts, B batch, T tokens, A blocks of a text, K drafts of a block, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from hydraspec.zoo.recipe.batches import Sequences
from hydraspec.zoo.recipe.block_heads import BlockHead, BlockShape
from hydraspec.zoo.recipe.block_recipes import BlockRecipe
from hydraspec.zoo.recipe.draft_heads import TargetView
from hydraspec.zoo.recipe.modeling import initialise, target_logits
from hydraspec.zoo.recipe.train_drafter import (
    CHUNK,
    MASK_TOKEN_ID,
    KeptStates,
    keep_states,
    most_frequent_tokens,
    read_states,
    view_of,
)
from hydraspec.zoo.recipe.training import train

DECAY = 0.85  # weight of a draft's loss, relative to the draft before it
CONFIDENCE_WEIGHT = 0.2
ANCHORS_AT_ONCE = 64


def build(recipe: BlockRecipe, target_config: Any) -> BlockHead:
    """An untrained head of the recipe's shape."""
    return BlockHead(
        BlockShape(
            layer=recipe.layer,
            target_size=target_config.hidden_size,
            draft_vocab_size=recipe.draft_vocab_size or target_config.vocab_size,
            vocab_size=target_config.vocab_size,
            mask_token_id=MASK_TOKEN_ID,
            block_size=recipe.block_size,
            num_aux=len(recipe.aux_layer_ids),
            num_layers=len(recipe.windows),
            windows=recipe.windows,
            samples_anchor=recipe.kind == "dspark",
            own_tables=recipe.own_tables,
            markov_rank=recipe.markov_rank,
            markov_kind=recipe.markov_kind,
            conv_taps=recipe.conv_taps,
            conv_group=recipe.conv_group,
            selector_rank=recipe.selector_rank,
            num_candidates=recipe.num_candidates,
        )
    )


def start(head: BlockHead, recipe: BlockRecipe, aux: Tensor, target: PreTrainedModel) -> None:
    """Set a head's initial weights. Its own tables begin as the target's."""
    initialise(head, recipe.seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.5)
        head.fc.weight.div_(aux.float().pow(2).mean((0, 1)).sqrt().cpu() + 1e-3)
        view = view_of(target, aux, aux)
        if head.embed_tokens is not None and head.lm_head is not None:
            head.embed_tokens.weight.copy_(view.table)
            head.embed_tokens.requires_grad_(False)
            ids = head.token_ids
            head.lm_head.weight.copy_(view.head if ids is None else view.head[ids])
        if head.markov_head is not None:
            head.markov_head.markov_w2.weight.mul_(0.1)
        for name, parameter in head.named_parameters():
            if name.endswith("base_kernel"):  # convolutions begin as what they convolve
                parameter[:, 0] = 1.0
            elif name.endswith("kernel_projection.weight"):
                parameter.zero_()
            elif name.endswith("codebook"):  # scores begin near those without the selector
                parameter.normal_(std=0.5 if "predecessor" in name else 0.05)


def draw_anchors(batch: Sequences, count: int) -> Tensor:
    """Places [B, A] of newest tokens, from the first token of each answer on."""
    room = (batch.length - batch.prompt_length - 1).clamp(min=1)
    share = torch.rand(len(room), count, device=room.device)
    return (batch.prompt_length[:, None] + (share * room[:, None]).long()).long()


def block_loss(
    head: BlockHead,
    recipe: BlockRecipe,
    target: PreTrainedModel,
    view: TargetView,
    batch: Sequences,
) -> Tensor:
    """Weighted mean over blocks and drafts of the cross entropy with the target."""
    anchors = draw_anchors(batch, recipe.num_anchors)
    k = head.shape.most_drafts
    after = anchors[..., None] + torch.arange(k, device=anchors.device)  # the tokens before drafts
    inside = after.clamp(max=batch.tokens.shape[1] - 1)
    with torch.no_grad():
        teacher = target_logits(target, view.hidden).softmax(-1)
        if head.token_ids is not None:
            teacher = teacher[..., head.token_ids]
        each = torch.arange(len(anchors), device=anchors.device)[:, None, None]
        wanted = teacher[each, inside]  # [B, A, K, W]
    states = head.states(view, batch.tokens, anchors, head.shape.block_size)
    logits = head.logits(view, states)
    valid = (after + 1 < batch.length[:, None, None]).float()
    weights = valid * DECAY ** torch.arange(k, device=anchors.device)
    extra = torch.zeros((), device=anchors.device)
    if head.markov_head is not None:
        logits, odds = head.forced(states, logits, batch.tokens[each, inside])
        is_right = (logits.argmax(-1) == wanted.argmax(-1)) & (wanted.sum(-1) > 0.5)
        losses = F.binary_cross_entropy_with_logits(odds, is_right.float(), reduction="none")
        extra = CONFIDENCE_WEIGHT * (losses * valid).sum() / valid.sum()
    if head.candidate_selector is not None:
        previous = batch.tokens[each, inside]
        extra = extra + _selector_loss(head, states, logits, previous, wanted, weights)
    losses = -(wanted * F.log_softmax(logits.float(), -1)).sum(-1)
    return (losses * weights).sum() / weights.sum() + extra


def _selector_loss(
    head: BlockHead,
    states: Tensor,
    logits: Tensor,
    previous: Tensor,
    wanted: Tensor,
    weights: Tensor,
) -> Tensor:
    """Weighted mean of the cross entropy with the target's best token among each draft's
    candidates [B, A, K, C], after the text's tokens `previous` [B, A, K]. Where the best token is
    none of them, it takes the last one's place."""
    assert head.candidate_selector is not None
    best = wanted.argmax(-1, keepdim=True)
    candidates = logits.detach().topk(head.shape.num_candidates).indices
    is_best = candidates == best
    has_best = is_best.any(-1, keepdim=True)
    place = is_best.int().argmax(-1).where(has_best.squeeze(-1), candidates.shape[-1] - 1)
    candidates = torch.cat((candidates[..., :-1], candidates[..., -1:].where(has_best, best)), -1)
    scores = logits.gather(-1, candidates).float()
    scores = scores + head.candidate_selector(states, previous, candidates).float()
    losses = F.cross_entropy(scores.flatten(0, 2), place.flatten(), reduction="none")
    return (losses.view(weights.shape) * weights).sum() / weights.sum()


def train_block(
    recipe: BlockRecipe,
    target: PreTrainedModel,
    data: Sequences,
    *,
    title: str,
    kept: KeptStates | None = None,
) -> BlockHead:
    """Train a head from scratch on the data's device; the target's weights stay fixed."""
    target.requires_grad_(False)
    torch.manual_seed(recipe.seed)  # anchors are drawn in every step
    kept = kept or keep_states(target, data, recipe.aux_layer_ids)
    head = build(recipe, target.config)
    if recipe.draft_vocab_size is not None:
        head.token_ids = most_frequent_tokens(data, recipe.draft_vocab_size)
    start(head, recipe, kept.aux[:CHUNK], target)
    head.to(data.tokens.device)

    def loss_of(batch: Sequences) -> Tensor:
        return block_loss(head, recipe, target, kept.view(target, batch.index), batch)

    train(head, loss_of, data, recipe, title)
    return head


@torch.inference_mode()
def block_draft_rows(
    target: PreTrainedModel, head: BlockHead, tokens: Tensor, aux_layer_ids: tuple[int, ...], k: int
) -> Tensor:
    """Greedy drafts [B, T - 1, K] of every row of some texts [B, T] but the last; the token after a
    row is its block's anchor."""
    view = view_of(target, *read_states(target, tokens, aux_layer_ids))
    anchors = torch.arange(1, tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
    parts = anchors.split(ANCHORS_AT_ONCE, 1)
    return torch.cat([head.drafts(view, tokens, part, k) for part in parts], 1)

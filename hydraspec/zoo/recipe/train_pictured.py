"""Trains the target that reads pictures, its assistant and its EAGLE-3 head.

The tower learns alone first, from heads that name the shape at each token, mark the tokens of
shapes' middles, and say at every token how many shapes of each kind there are, of which colour and
where. The projection then begins as the least
squares fit that makes a token the sum of the embeddings of the words for what it shows, which the
text model has attended to before. Last the whole model learns to answer, on questions with pictures
and on texts of the corpus.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hydraspec.workloads import drawn
from hydraspec.zoo.recipe import pictured, train_assistant, train_drafter
from hydraspec.zoo.recipe.batches import Sequences
from hydraspec.zoo.recipe.draft_heads import DraftHead, TargetView
from hydraspec.zoo.recipe.modeling import Assistant
from hydraspec.zoo.recipe.pictured_recipes import ASSISTANT, EAGLE3, TARGET, TOWER, VISION
from hydraspec.zoo.recipe.pictured_texts import (
    MOST_SHAPES,
    NUM_CLASSES,
    SLOTS,
    UNKNOWN,
    Mixture,
    PicturedTexts,
    Scenes,
)
from hydraspec.zoo.recipe.train_target import PROMPT_WEIGHT
from hydraspec.zoo.recipe.training import train

PROBED = 1000  # scenes of the fit
# Words for what a token shows: colour, kind and number of shapes, column and row.
SEEN: tuple[Sequence[str], ...] = (
    *(list(drawn.COLOURS), drawn.KINDS, [str(n) for n in range(MOST_SHAPES)]),
    *(drawn.COLUMNS, drawn.ROWS),
)
ANSWER_ROWS = 16  # more than the longest answer to a question has


class SceneHeads(nn.Module):
    """Linear heads over the tower's tokens, which are dropped after training."""

    def __init__(self) -> None:
        super().__init__()
        size, kinds = VISION["hidden_size"], len(drawn.KINDS)
        self.classes = nn.Linear(size, NUM_CLASSES)
        self.middles = nn.Linear(size, 1 + kinds)
        self.counts = nn.Linear(size, kinds * MOST_SHAPES)
        self.colours = nn.Linear(size, kinds * len(drawn.COLOURS))
        self.places = nn.Linear(size, kinds * 2 * len(drawn.ROWS))

    def loss(self, pooled: Tensor, scenes: Scenes) -> Tensor:
        """Sum of five mean cross entropies; pooled [P, S, E]. The first two heads read what a token
        shows, the others what its whole picture shows."""
        is_real = _is_real(scenes)
        x = F.rms_norm(pooled, (pooled.shape[-1],))

        def mean(logits: Tensor, labels: Tensor) -> Tensor:
            given = labels.flatten()
            losses = F.cross_entropy(
                logits.reshape(len(given), -1), given, reduction="none", ignore_index=UNKNOWN
            )
            known = is_real.view(*is_real.shape, *[1] * (labels.dim() - 2)) & (labels != UNKNOWN)
            return (losses.view_as(labels) * known).sum() / known.sum()

        def of_all(labels: Tensor) -> Tensor:
            return labels[:, None].expand(-1, SLOTS, *labels.shape[1:])

        return torch.stack(
            [
                mean(self.classes(x), scenes.classes),
                mean(self.middles(x), scenes.middles),
                mean(self.counts(x), of_all(scenes.counts)),
                mean(self.colours(x), of_all(scenes.colours)),
                mean(self.places(x), of_all(scenes.places)),
            ]
        ).sum()


def train_tower(wrapper: Any, scenes: Scenes, title: str) -> None:
    """Train the tower alone."""
    tower = wrapper.model.vision_tower
    both = nn.ModuleList([tower, SceneHeads().to(scenes.tokens.device)])
    heads: Any = both[1]

    def loss_of(batch: Scenes) -> Tensor:
        loss: Tensor = heads.loss(pictured.pooled_tokens(tower, batch.pictures), batch)
        return loss

    train(both, loss_of, scenes, TOWER, f"{title} tower")


@torch.no_grad()
def align(wrapper: Any, scenes: Scenes, words: Mapping[str, list[int]]) -> None:
    """Set the projection, and the mean and size by which the tower's tokens are standardised.

    words: token ids of each word of `SEEN`."""
    tower, reader = wrapper.model.vision_tower, wrapper.model.embed_vision
    is_real = _is_real(scenes)
    pooled = pictured.pooled_tokens(tower, scenes.pictures)[is_real]
    tower.std_bias.copy_(pooled.mean(0))
    tower.std_scale.copy_(1 / pooled.std(0))
    read = (pooled - tower.std_bias) * tower.std_scale
    x = reader.embedding_pre_projection_norm(read).double()
    y = _shown(wrapper, scenes, words)[is_real].double()
    ridge = 1e-5 * len(x) * torch.eye(x.shape[1], device=x.device, dtype=x.dtype)
    reader.embedding_projection.weight.copy_(torch.linalg.solve(x.T @ x + ridge, x.T @ y).T)


def _shown(wrapper: Any, scenes: Scenes, words: Mapping[str, list[int]]) -> Tensor:
    """Sums [P, S, D] of the embeddings of words: for each kind its number, colour and place in the
    picture, and for the token the kind and colour that it shows."""
    device, table = scenes.tokens.device, wrapper.model.language_model.embed_tokens

    def centred(group: Sequence[str]) -> Tensor:
        ids = (torch.tensor(words[word], device=device) for word in group)
        found = torch.stack([table(each).mean(0) for each in ids])
        found = found - found.mean(0)
        return torch.cat([found, torch.zeros_like(found[:1])])  # the last for UNKNOWN

    colours, kinds, digits, columns, rows = map(centred, SEEN)
    whole = digits[scenes.counts] + colours[scenes.colours]
    whole = whole + rows[scenes.places[..., 0]] + columns[scenes.places[..., 1]]
    named = (scenes.classes - 1).clamp(min=0)
    token = kinds[named // len(drawn.COLOURS)] + colours[named % len(drawn.COLOURS)]
    return whole.sum(1)[:, None] + token * (scenes.classes > 0)[..., None]


def _is_real(scenes: Scenes) -> Tensor:
    """Mask [P, S] of the tokens that are no padding."""
    at = torch.arange(SLOTS, device=scenes.tokens.device)
    return at[None] < scenes.pictures.num_tokens[:, None]


def _answer_loss(logits: Tensor, batch: Sequences) -> tuple[Tensor, Tensor]:
    """Sum of the weighted cross entropies of all tokens but the first, and of the weights: 1 in
    responses, `PROMPT_WEIGHT` in prompts without a picture, else 0."""
    place = torch.arange(1, batch.tokens.shape[1], device=batch.tokens.device)[None]
    is_text = isinstance(batch, PicturedTexts) and not len(batch.pictures)
    weights = torch.where(
        place < batch.prompt_length[:, None], PROMPT_WEIGHT if is_text else 0.0, 1.0
    )
    weights = weights * (place < batch.length[:, None])
    targets = batch.tokens[:, 1:]
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="none")
    return (losses.view_as(targets) * weights).sum(), weights.sum()


def train_target(scenes: Scenes, data: Mixture, words: Mapping[str, list[int]], title: str) -> Any:
    """The trained wrapper, on the data's device; words as in `align`."""
    wrapper: Any = pictured.build().to(data.tokens.device)
    train_tower(wrapper, scenes, title)
    align(wrapper, scenes.rows(torch.arange(PROBED, device=scenes.tokens.device)), words)
    text = pictured.text_of(wrapper)

    def loss_of(batch: Mixture) -> Tensor:
        total = torch.zeros((), device=batch.tokens.device)
        for part, share in zip(batch.parts, batch.shares, strict=True):
            loss, weight = _answer_loss(pictured.run(wrapper, text, part)[0].logits, part)
            total = total + share / sum(batch.shares) * loss / weight
        return total

    train(wrapper, loss_of, data, TARGET, title)
    return wrapper


@torch.no_grad()
def is_right(wrapper: Any, texts: PicturedTexts, size: int = 32) -> Tensor:
    """Mask [N] of texts whose response is the model's greedy one."""
    text, found = pictured.text_of(wrapper), []
    for rows in torch.arange(len(texts.tokens), device=texts.tokens.device).split(size):
        batch = texts.rows(rows)
        chosen = pictured.run(wrapper, text, batch)[0].logits[:, :-1].argmax(-1)
        place = torch.arange(1, batch.tokens.shape[1], device=chosen.device)[None]
        inside = (place >= batch.prompt_length[:, None]) & (place < batch.length[:, None])
        found.append(((chosen == batch.tokens[:, 1:]) | ~inside).all(1))
    return torch.cat(found)


# ------------------------------------------------------------------ drafters


def train_assistant_of(wrapper: Any, data: Mixture, title: str) -> Assistant:
    """An assistant trained on, over the wrapper's frozen weights."""
    wrapper.requires_grad_(False)
    text = pictured.text_of(wrapper)
    assistant = train_assistant.build(ASSISTANT, text).to(data.tokens.device)

    def loss_of(batch: Mixture) -> Tensor:
        total = torch.zeros((), device=batch.tokens.device)
        for part, share in zip(batch.parts, batch.shares, strict=True):
            with torch.no_grad():
                output, embedded = pictured.run(wrapper, text, part)
            rows = ANSWER_ROWS if len(part.pictures) else train_assistant.DRAFT_ROWS
            loss = train_assistant.drafting_loss(
                ASSISTANT, assistant, part, output, embedded, rows, text.config.sliding_window
            )
            total = total + share / sum(batch.shares) * loss
        return total

    train(assistant, loss_of, data, ASSISTANT, title)
    return assistant


@torch.no_grad()
def read_states(
    wrapper: Any, text: Any, batch: PicturedTexts, aux_layer_ids: tuple[int, ...]
) -> tuple[TargetView, Sequences]:
    """Inputs of a head that reads images: rows of pictures stand in its embedding table after the
    vocabulary, and the texts' placeholders name them."""
    output, embedded = pictured.run(wrapper, text, batch, aux_layer_ids)
    view = train_drafter.view_of(text, output.hidden, torch.cat(output.aux, -1))
    tokens = batch.tokens
    if len(batch.pictures):
        view.table = torch.cat([view.table, embedded.flatten(0, 1).to(view.table.dtype)])
        at = torch.arange(tokens.numel(), device=tokens.device).view_as(tokens)
        tokens = torch.where(batch.places >= 0, text.config.vocab_size + at, tokens)
    return view, Sequences(tokens, batch.prompt_length, batch.length, batch.index)


def train_eagle3(wrapper: Any, data: Mixture, title: str) -> DraftHead:
    """An EAGLE-3 head that reads images, over the wrapper's frozen weights."""
    wrapper.requires_grad_(False)
    text, device = pictured.text_of(wrapper), data.tokens.device
    head = train_drafter.build(EAGLE3, text.config)
    probed = data.sample(EAGLE3.batch_size, torch.Generator(device).manual_seed(0))
    aux = read_states(wrapper, text, probed.parts[0], EAGLE3.aux_layer_ids)[0].aux
    train_drafter.start(head, EAGLE3, aux)
    head.to(device)
    first, *more = data.parts
    assert EAGLE3.draft_vocab_size is not None
    head.token_ids = train_drafter.most_frequent_tokens(first, EAGLE3.draft_vocab_size, *more)

    def loss_of(batch: Mixture) -> Tensor:
        total = torch.zeros((), device=device)
        for part, share in zip(batch.parts, batch.shares, strict=True):
            view, texts = read_states(wrapper, text, part, EAGLE3.aux_layer_ids)
            loss = train_drafter.unrolled_loss(head, EAGLE3, text, view, texts)
            total = total + share / sum(batch.shares) * loss
        return total

    train(head, loss_of, data, EAGLE3, title)
    return head

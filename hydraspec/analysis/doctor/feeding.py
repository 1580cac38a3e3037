"""Variants of a drafter's inputs: target states, tokens, rotary positions, feedback, KV source."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import Any

from torch import Tensor

from hydraspec.analysis.doctor.variants import (
    Family,
    ScaledTokens,
    Subject,
    Variant,
    edited,
    edited_trial,
)
from hydraspec.models.aux_states import default_aux_layer_ids
from hydraspec.models.detect import SPECULATORS
from hydraspec.models.mtp.head import MTPHead
from hydraspec.speculators.teacher_forcing.trial import Trial
from hydraspec.types import Rows

MAX_PERMUTED = 4  # orders of aux states are tried for at most this many


def aux_ids(subject: Subject) -> Iterator[Variant]:
    """Other target layers for the aux states: all ids shifted, one id shifted, and the default of
    EAGLE-3's authors.
    """
    ids = subject.trial.aux_ids
    if not ids:
        return
    candidates = [tuple(i + by for i in ids) for by in (-1, 1, -2, 2)]
    candidates.append(default_aux_layer_ids(subject.target.num_layers))
    for slot, by in itertools.product(range(len(ids)), (-1, 1, -2, 2)):
        candidates.append((*ids[:slot], ids[slot] + by, *ids[slot + 1 :]))
    for found in dict.fromkeys(candidates):
        fits = len(found) == len(ids) and len(set(found)) == len(found) and found != ids
        if fits and all(i in subject.texts.states for i in found):
            yield _with_ids(subject.trial, found, doubt=1)


def aux_order(subject: Subject) -> Iterator[Variant]:
    """The same aux layer ids in every other order. The ascending one has the least doubt."""
    ids = subject.trial.aux_ids
    if not 2 <= len(ids) <= MAX_PERMUTED:
        return
    for found in itertools.permutations(ids):
        if found != ids:
            yield _with_ids(subject.trial, found, doubt=0 if list(found) == sorted(ids) else 2)


def _with_ids(trial: Trial, ids: tuple[int, ...], *, doubt: int) -> Variant:
    is_order = sorted(ids) == sorted(trial.aux_ids)
    return Variant(
        cause="aux_order" if is_order else "aux_layer_ids",
        says=f"aux layer ids are {list(trial.aux_ids)}",
        tried=str(list(ids)),
        remedy=aux_remedy(trial.head, ids),
        trial=replace(trial, aux_ids=ids),
        doubt=doubt,
    )


def aux_remedy(head: Any, ids: tuple[int, ...]) -> str:
    """The key of aux layer ids in the drafter's format, and its value for these ids."""
    key, value = "eagle_aux_hidden_state_layer_ids", list(ids)
    if head.spec.block_size is not None:
        key = "aux_hidden_state_layer_ids"
        if head.spec.format != SPECULATORS:
            key, value = "target_layer_ids", [i - 1 for i in ids]
    return f"set {key} of the drafter's config.json to {value}"


def tokens_and_states(subject: Subject) -> Iterator[Variant]:
    """The token and the target state of another position in each input row. The row of position t
    reads token t + 1 and state t; later ones would give the answer away, so only earlier ones are
    tried.
    """
    trial = subject.trial
    if trial.kind == "block":  # see blocks.py
        return
    pairs = [(1, 0), (0, 0), (1, -1), (0, -1)]
    for token, state in pairs:
        if (token, state) == (trial.token_shift, trial.state_shift):
            continue
        changed = "token_shift" if token != trial.token_shift else "state_shift"
        yield Variant(
            cause=changed,
            says=f"the row of position t reads {_pair(trial.token_shift, trial.state_shift)}",
            tried=_pair(token, state),
            remedy="the drafter was trained with other shifts than its method's: train it as "
            "docs/adding_a_speculator.md says, or write a speculator that feeds it so",
            trial=replace(trial, token_shift=token, state_shift=state),
            doubt=1 if (token, state) == (1, 0) else 2,
        )


def _pair(token: int, state: int) -> str:
    at = {1: "t + 1", 0: "t", -1: "t - 1"}
    return f"the token at {at[token]} and the state at {at[state]}"


def positions(subject: Subject) -> Iterator[Variant]:
    """Other rotary positions for draft steps 1 and after. Rotary attention depends on differences
    of positions alone, so shifting all of them in a head with its own KV would change nothing.
    """
    trial = subject.trial
    if trial.kind in ("parallel", "block") or (trial.kind == "own_cache" and subject.k == 1):
        return
    for gap in {-1, 0, 1} - {trial.step_gap}:
        yield Variant(
            cause="draft_positions",
            says=f"draft steps rotate at {_place(trial, trial.step_gap)}",
            tried=_place(trial, gap),
            remedy="the drafter was trained with other positions than its method's (docs/adr/0001)",
            trial=replace(trial, step_gap=gap),
        )
    if trial.kind == "own_cache":
        yield Variant(
            cause="draft_positions",
            says=f"positions {'grow with' if trial.advances else 'do not change over'} the steps",
            tried="positions that " + ("stay" if trial.advances else "grow"),
            remedy="the drafter was trained with other positions than its method's (docs/adr/0001)",
            trial=replace(trial, advances=not trial.advances),
        )


def _place(trial: Trial, gap: int) -> str:
    base = "p" if trial.kind == "target_cache" else "p + step"
    return base if gap == 0 else f"{base} {'+' if gap > 0 else '-'} {abs(gap)}"


def target_states(subject: Subject) -> Iterator[Variant]:
    """The target's last hidden states read before its final norm instead of after it, or the
    reverse.
    """
    trial = subject.trial
    if trial.aux_ids or subject.texts.num_layers not in subject.texts.states:
        return
    named = {True: "after the target's final norm", False: "before the target's final norm"}
    yield Variant(
        cause="target_state_norm",
        says=f"the drafter reads the states {named[trial.reads_normed]}",
        tried=named[not trial.reads_normed],
        remedy="the drafter was trained on the other states: choose a head of the method's format",
        trial=replace(trial, reads_normed=not trial.reads_normed),
    )


def feedback(subject: Subject) -> Iterator[Variant]:
    """The state that a draft step passes to the next one, taken before the head's final norm
    instead of after it, or the reverse.
    """
    trial, head = subject.trial, subject.trial.head
    if trial.kind != "own_cache" or subject.k == 1:
        return
    if isinstance(head, MTPHead):
        other: Any = copy(head)
        is_normed = type(head) is MTPHead
        other.__class__ = UnnormedFeedback if is_normed else MTPHead
    elif head.norm is not None:
        is_normed = head.config.norm_output
        config = replace(head.config, norm_output=not is_normed)
        other = edited(head, config=config)
    else:
        return
    named = {True: "after the head's final norm", False: "before the head's final norm"}
    yield Variant(
        cause="feedback_norm",
        says=f"a step reads the last step's state {named[is_normed]}",
        tried=named[not is_normed],
        remedy=f"set norm_output of the drafter's config.json to {str(not is_normed).lower()} "
        "where its format has that key",
        trial=edited_trial(trial, other),
    )


class UnnormedFeedback(MTPHead):
    """An MTP head whose steps pass on the residual stream from before their final norm."""

    def forward(
        self, rows: Rows, hidden: Tensor, kv_caches: list[Tensor], *, step: int
    ) -> tuple[Tensor, Tensor]:
        """Output states, and the residual stream for the next step; see MTPHead.forward."""
        kept = [_StreamKept(layer.block) for layer in self.layers]
        plain = copy(self)
        pairs = zip(self.layers, kept, strict=True)
        plain.layers = [edited(layer, block=block) for layer, block in pairs]
        states, _ = super(UnnormedFeedback, plain).forward(rows, hidden, kv_caches, step=step)
        return states, kept[step % len(kept)].stream


class _StreamKept:
    """A wrapper around a decoder layer that keeps the residual stream of its last call."""

    stream: Tensor

    def __init__(self, block: Any) -> None:
        self.block, self.input_norm = block, block.input_norm

    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        """The wrapped layer's outputs, of which the first is the residual stream."""
        self.stream, y = self.block.forward(*args)
        return self.stream, y


def embedding_scale(subject: Subject) -> Iterator[Variant]:
    """Token embeddings multiplied or divided by sqrt(D). Left out for heads with a norm after the
    embedding, which undoes any scale.
    """
    head = subject.trial.head
    place = "target" if subject.trial.kind == "target_cache" else "embedding"
    is_normed = getattr(head, "first", None) is not None or hasattr(head, "blocks")
    if is_normed:
        return
    root = math.sqrt(head.spec.hidden_width)
    for factor, words in ((root, "times sqrt(D)"), (1 / root, "divided by sqrt(D)")):
        scaled = ScaledTokens(getattr(head, place), factor)
        yield Variant(
            cause="embedding_scale",
            says="token embeddings enter as they are",
            tried=words,
            remedy="the drafter was trained with another scale of the embedding: fold the factor "
            f"{factor:.6g} into the half of its first projection that reads embeddings",
            trial=edited_trial(subject.trial, edited(head, **{place: scaled})),
        )


def kv_sources(subject: Subject) -> Iterator[Variant]:
    """KV of earlier target layers for Gemma 4's assistant, which reads the last layer of each kind
    (sliding and full attention).
    """
    trial = subject.trial
    if trial.kind != "target_cache":
        return
    fewest = min(len(spec.layers) for spec in subject.texts.specs)
    for by in {0, 1, 2} - {trial.kv_layers_back}:
        if by < fewest:
            yield Variant(
                cause="kv_source",
                says=f"the drafter reads the KV of {_source(trial.kv_layers_back)}",
                tried=_source(by),
                remedy="give the assistant that was released with this target",
                trial=replace(trial, kv_layers_back=by),
            )


def _source(back: int) -> str:
    place = f"layer {back} before the last" if back else "last layer"
    return f"the {place} of each kind"


FAMILIES: tuple[Family, ...] = (
    aux_ids,
    aux_order,
    tokens_and_states,
    positions,
    target_states,
    feedback,
    embedding_scale,
    kv_sources,
)

"""Variants of block heads (DFlash, DSpark, DFlash2): their mask, their norm of features, and the
places of their rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from hydraspec.analysis.doctor.variants import Family, Subject, Variant, edited, edited_trial
from hydraspec.models.detect import DEEPSPEC
from hydraspec.models.kv_groups import FULL, SLIDING
from hydraspec.models.parts import Tensors

TRAINED_SO = "the drafter was trained so: {}"


def block_masks(subject: Subject) -> Iterator[Variant]:
    """Rows of a block that see later rows, or do not, in each kind of layers that the head has."""
    head = subject.trial.head
    if subject.trial.kind != "block":
        return
    kinds = [kind for kind in (FULL, SLIDING) if any(x.kind == kind for x in head.layers)]
    names = {FULL: "is_causal", SLIDING: "is_sliding_causal"}
    now = {kind: getattr(head.config, names[kind]) for kind in kinds}
    for values in itertools.product((False, True), repeat=len(kinds)):
        tried = dict(zip(kinds, values, strict=True))
        if tried == now:
            continue
        config = replace(head.config, **{names[kind]: tried[kind] for kind in kinds})
        yield Variant(
            cause="is_causal",
            says=f"the rows of a block see {_seen(now)}",
            tried=_seen(tried),
            remedy="set is_causal (z-lab) or sliding_window_non_causal (speculators) of the "
            "drafter's config.json so, where its format has such a key",
            trial=edited_trial(subject.trial, edited(head, config=config)),
        )


def _seen(causal: dict[str, bool]) -> str:
    words = {True: "earlier rows", False: "all rows"}
    if len(set(causal.values())) == 1:
        return words[next(iter(causal.values()))]
    parts = {FULL: "full layers", SLIDING: "sliding layers"}
    return " and ".join(f"{words[value]} in {parts[kind]}" for kind, value in causal.items())


class Unnormed:
    """Takes the place of a norm that is left out."""

    def __init__(self, norm: Any) -> None:
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """The input itself."""
        return x

    def tensors(self) -> Tensors:
        """The norm's weight, by its name in the checkpoint."""
        found: Tensors = self.norm.tensors()
        return found


def feature_norm(subject: Subject) -> Iterator[Variant]:
    """Context features without hidden_norm, or with it where it is left out."""
    head = subject.trial.head
    if subject.trial.kind != "block":
        return
    norm, is_normed = head.hidden_norm, not isinstance(head.hidden_norm, Unnormed)
    words = {True: "features through hidden_norm", False: "features as fc gives them"}
    yield Variant(
        cause="hidden_norm",
        says=f"a block's context is {words[is_normed]}",
        tried=words[not is_normed],
        remedy=TRAINED_SO.format("give a head of the method's format"),
        trial=edited_trial(
            subject.trial, edited(head, hidden_norm=Unnormed(norm) if is_normed else norm.norm)
        ),
    )


def block_places(subject: Subject) -> Iterator[Variant]:
    """Rotary positions of a block one further or nearer than where its context ends, and features
    of the token before in place of a position's own."""
    trial = subject.trial
    if trial.kind != "block":
        return
    for gap in {-1, 0, 1} - {trial.step_gap}:
        yield Variant(
            cause="block_positions",
            says=f"a block begins at {_after(trial.step_gap)}",
            tried=_after(gap),
            remedy=TRAINED_SO.format("write a speculator that places its blocks there"),
            trial=replace(trial, step_gap=gap),
        )
    for shift in {-1, 0} - {trial.state_shift}:
        yield Variant(
            cause="state_shift",
            says=f"position t has the features of {_token(trial.state_shift)}",
            tried=_token(shift),
            remedy=TRAINED_SO.format("write a speculator that feeds it so"),
            trial=replace(trial, state_shift=shift),
            doubt=1 if shift == 0 else 2,
        )


def _after(gap: int) -> str:
    return {-1: "the position of the last feature", 0: "the position after the last feature"}.get(
        gap, "the second position after the last feature"
    )


def _token(shift: int) -> str:
    return "token t" if shift == 0 else "token t - 1"


def anchors(subject: Subject) -> Iterator[Variant]:
    """Rows that draft the token after their own position, the anchor's too, or their own token.
    Not for deepseek-ai's files, in which no key could say the other; there it would explain a block
    or features in a wrong place nearly as well as they do."""
    head = subject.trial.head
    if subject.trial.kind != "block" or head.config.format == DEEPSPEC:
        return
    now = head.config.samples_anchor
    words = {True: "the token after its position", False: "the token of its position"}
    yield Variant(
        cause="sample_from_anchor",
        says=f"a row drafts {words[now]}",
        tried=words[not now],
        remedy=f"set sample_from_anchor of the drafter's config.json to {str(not now).lower()}",
        trial=edited_trial(
            subject.trial, edited(head, config=replace(head.config, samples_anchor=not now))
        ),
    )


FAMILIES: tuple[Family, ...] = (block_masks, feature_norm, block_places, anchors)

"""What each part of a head contributes: drafts without it, and with its weights scaled.

Every part of a trained head helps it. A part without which drafts are better, or whose weights are
better doubled or halved, holds weights that training did not leave there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hydraspec.analysis.doctor.scores import Scores
from hydraspec.analysis.doctor.tensors import is_table
from hydraspec.models.moe import one_by_one
from hydraspec.models.parts import Weights, held

LEAST_NATS = 0.1  # likelihood per draft that a part's removal gains where the part is damaged
LEAST_GAIN = 0.1  # share of the acceptance length that another scale gains where the scale is wrong


@dataclass(slots=True, frozen=True, kw_only=True)
class Edit:
    """Another value for one kind of weight.

    Attributes:
        says: what is odd about a weight for which drafts are better so.
        of_matrix: the value for a matrix, or None where it is not tried.
        of_vector: the same for a norm's weight.
        needs_acceptance: likelihood alone does not count: a flatter distribution always gains some.
    """

    says: str
    of_matrix: Callable[[Tensor], Tensor] | None = None
    of_vector: Callable[[Tensor], Tensor] | None = None
    needs_acceptance: bool = True


def _bulk(w: Tensor) -> float:
    """The magnitude that one normal value in a million exceeds, by the median magnitude."""
    return 5 * float(w.abs().median()) / 0.6745


EDITS = (
    Edit(
        says="is worse than zero",
        of_matrix=torch.zeros_like,
        needs_acceptance=False,
    ),
    Edit(says="is too small", of_matrix=lambda w: w * 2, of_vector=lambda w: w * 2),
    Edit(says="is too large", of_matrix=lambda w: w / 4, of_vector=lambda w: w / 4),
    Edit(says="is worse than one everywhere", of_vector=torch.ones_like),
    Edit(
        says="has single values far out of range",
        of_matrix=lambda w: w.clamp(-_bulk(w), _bulk(w)),
        needs_acceptance=False,
    ),
)


@dataclass(slots=True, frozen=True, kw_only=True)
class Effect:
    """Drafts with an edited weight."""

    name: str
    says: str
    acceptance: float
    gain: float  # of acceptance, as a share of what it is
    nats: float  # gained per draft
    is_odd: bool


def module_of(name: str) -> str:
    """The part of a head that a weight belongs to, with the norm in front of it, since another
    scale of one is another scale of the other: "layers.0.mlp", "fc", "lm_head".
    """
    stem = re.sub(r"\.(weight|bias)$", "", name)
    for norm, part in _NORMS_OF.items():
        stem = re.sub(rf"\.{norm}$", f".{part}", stem)
    return re.sub(r"\.(self_attn|mlp)\..*$", r".\1", stem)


_NORMS_OF = {
    "input_layernorm": "self_attn",
    "hidden_norm": "self_attn",
    "post_attention_layernorm": "mlp",
    "pre_feedforward_layernorm": "mlp",
    "post_feedforward_layernorm": "mlp",
}


def weights_of(head: Any) -> dict[str, Tensor]:
    """The weights of a head by their names, experts one by one, as views of its memory."""
    found = {name: held(weight) for name, weight in one_by_one(head.tensors()).items()}
    return {n: w for n, w in found.items() if w.is_floating_point() and w.numel() > 1}


def effects(
    head: Any, base: Scores, score: Callable[[], Scores], weights: Mapping[str, Tensor]
) -> Iterator[Effect]:
    """Every edit of every weight, scored by `score`; the head is as before in between."""
    for name, weight in weights.items():
        for edit in EDITS:
            value = edit.of_matrix if weight.dim() == 2 else edit.of_vector
            if value is None:
                continue
            with replaced(head, weight, value(weight)):
                yield _effect(name, edit, base, score())


def _effect(name: str, edit: Edit, base: Scores, found: Scores) -> Effect:
    nats = float(found.log_probs.mean() - base.log_probs.mean())
    gain = found.acceptance / base.acceptance - 1
    return Effect(
        name=name,
        says=edit.says,
        acceptance=found.acceptance,
        gain=gain,
        nats=nats,
        is_odd=nats > LEAST_NATS and (gain > LEAST_GAIN or not edit.needs_acceptance),
    )


@contextmanager
def replaced(head: Any, weight: Tensor, value: Tensor) -> Iterator[None]:
    """Holds `value` in the memory of a head's weight, and what the head derived from it."""
    kept = weight.clone()
    try:
        weight.copy_(value)
        _derive(head)
        yield
    finally:
        weight.copy_(kept)
        _derive(head)


def _derive(head: Any) -> None:
    """Recompute what a head has computed from its weights."""
    for part in _parts(head):
        for name, value in vars(type(part)).items():
            if isinstance(value, cached_property):
                vars(part).pop(name, None)
    if getattr(head, "mask_state", None) is not None:
        head.project_mask()


def _parts(head: Any) -> Iterator[Any]:
    """A head and everything in it that names weights."""
    yield head
    found = [getattr(head, name) for name in getattr(head, "names", {})]
    for part in [*found, getattr(head, "layers", [])]:
        for each in part if isinstance(part, list) else [part]:
            if isinstance(each, Weights):
                yield from _parts(each)


def damaged(found: list[Effect]) -> list[Effect]:
    """Effects that speak of damage, the strongest first. An output projection that is worse than
    none may only pass on what came wrong, so it comes after equals.
    """
    odd = [effect for effect in found if effect.is_odd]
    return sorted(odd, key=lambda each: (-each.nats, is_table(each.name)))

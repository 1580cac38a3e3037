"""Variants of a drafter, and functions that make edited copies of a head without changing it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hydraspec.analysis.doctor.patient import Patient
from hydraspec.models.base import TargetModel
from hydraspec.models.layers import Norm
from hydraspec.speculators.teacher_forcing.texts import Texts
from hydraspec.speculators.teacher_forcing.trial import Trial


@dataclass(slots=True, frozen=True, kw_only=True)
class Change:
    """A change of one convention.

    Attributes:
        cause: identifier of the convention, such as "aux_layer_ids".
        says: the convention as configured, such as "aux layer ids are [2, 16, 29]".
        tried: the value tried instead, such as "[1, 15, 28]".
        remedy: what to do if the change is better.
        doubt: among changes with equal results, the one with the least doubt is named.
    """

    cause: str
    says: str
    tried: str
    remedy: str
    doubt: int = 1


@dataclass(slots=True, frozen=True, kw_only=True)
class Variant(Change):
    """A change, and the drafter with it."""

    trial: Trial


@dataclass(slots=True, frozen=True, kw_only=True)
class Subject:
    """A drafter of which variants are made, with the texts, target and number of drafts (k) for
    their comparison.
    """

    trial: Trial
    texts: Texts
    target: TargetModel
    k: int
    patient: Patient | None = None  # None: no variants that read the files again


Family = Callable[[Subject], Iterator[Variant]]  # all variants of one kind


# ------------------------------------------------------------------ edited copies


def with_norm_weight(norm: Norm, weight: Tensor) -> Norm:
    """A copy of a norm with another weight."""
    edited = copy(norm)
    edited.__dict__.pop("gain", None)  # cached from the weight
    edited.weight = weight
    return edited


def unit_norm(like: Tensor, eps: float, place: Any) -> Norm:
    """A new norm with weight one, as wide as the vector `like`."""
    norm = Norm(like.shape[0], eps, place)
    norm.weight.fill_(1.0)
    return norm


def edited(thing: Any, **changes: Any) -> Any:
    """A shallow copy with some attributes changed."""
    found = copy(thing)
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def replaced(thing: Any, path: Sequence[str | int], value: Any) -> Any:
    """A copy with the part at `path` (attribute names and list indices) replaced by `value`. All
    objects on the path are copied, so the original is not changed.
    """
    name, *rest = path
    found = copy(thing)
    if isinstance(name, int):
        found[name] = replaced(thing[name], rest, value) if rest else value
        return found
    return edited(thing, **{name: replaced(getattr(thing, name), rest, value) if rest else value})


@dataclass(slots=True, frozen=True, kw_only=True)
class Matrix:
    """A projection of a head, stored [in, out], whose input consists of equally wide blocks."""

    name: str  # in the checkpoint
    blocks: tuple[str, ...]
    trial: Trial
    path: tuple[str | int, ...]  # in the head, see `replaced`

    def arranged(self, order: Sequence[int], signs: Sequence[int]) -> Trial:
        """The trial with this projection rearranged: block i is block order[i] times signs[i]."""
        linear: Any = self.trial.head
        for name in self.path:
            linear = linear[name] if isinstance(name, int) else getattr(linear, name)
        parts = linear.weight.chunk(len(self.blocks), 0)
        pairs = zip(order, signs, strict=True)
        found = torch.empty_like(linear.weight)  # keeps the strides
        torch.cat([parts[i] * sign for i, sign in pairs], 0, out=found)
        return with_mask_state(
            edited_trial(
                self.trial, replaced(self.trial.head, self.path, linear.with_weight(found))
            )
        )


def with_mask_state(trial: Trial) -> Trial:
    """The same trial after P-EAGLE's mask state is projected again, as a changed projection
    requires. The trial's head must be a copy.
    """
    head = trial.head
    if getattr(head, "mask_state", None) is not None:
        states = head.mask_state.view(len(head.spec.aux_layer_ids), 1, -1).unbind()
        head.mask_hidden = head.combine.forward(states).view(-1)
    return trial


def with_combine(trial: Trial, **changes: Any) -> Trial:
    """The trial with changed attributes of `combine`, which joins the aux states of EAGLE-3."""
    combine = edited(trial.head.combine, **changes)
    return with_mask_state(edited_trial(trial, edited(trial.head, combine=combine)))


def edited_trial(trial: Trial, head: Any) -> Trial:
    """The same trial with another head."""
    return replace(trial, head=head)


def decoder_layers(head: Any) -> list[Any]:
    """The decoder layers of a head, first to last."""
    if hasattr(head, "blocks"):  # MTP
        return list(head.blocks)
    first = getattr(head, "first", None)
    return [*([] if first is None else [first]), *head.layers]


def with_layers(trial: Trial, edit: Callable[[Any], Any]) -> Trial:
    """The trial with every decoder layer replaced by `edit(layer)`, a changed copy."""
    head = copy(trial.head)
    if hasattr(head, "blocks"):
        head.blocks = [edit(block) for block in head.blocks]
        pairs = zip(head.layers, head.blocks, strict=True)
        head.layers = [edited(layer, block=block) for layer, block in pairs]
        return edited_trial(trial, head)
    if getattr(head, "first", None) is not None:
        head.first = edit(head.first)
    head.layers = [edit(layer) for layer in head.layers]
    if hasattr(head, "next_norms"):  # must be those of the edited layers
        head.next_norms = [*(layer.input_norm for layer in head.layers[1:]), head.norm]
    return edited_trial(trial, head)


def swapped_gate(mlp: Any) -> Any:
    """A copy of an MLP, or of a layer of experts, with gate and up projections exchanged."""
    if not hasattr(mlp, "routed"):
        return edited(mlp, gate_up=mlp.gate_up.swapped())
    found = edited(mlp, routed=mlp.routed.swapped())
    if hasattr(mlp, "shared"):
        found.shared = swapped_gate(mlp.shared)
    return found


class ScaledTokens:
    """A wrapper around a target or an embedding that multiplies token embeddings by `scale`."""

    def __init__(self, inner: Any, scale: float) -> None:
        self._inner, self._scale = inner, scale

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def embed(self, *args: Any) -> Tensor:
        """Scaled token embeddings; same arguments as the wrapped `embed`."""
        found: Tensor = self._inner.embed(*args) * self._scale
        return found

    def embed_beside(self, token_ids: Tensor, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """Scaled embeddings, each concatenated with its state; see TargetModel.embed_beside."""
        beside = hidden if rows is None else hidden.index_select(0, rows)
        return torch.cat((self.embed(token_ids), beside), -1)

"""The parts of a draft head and their weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from torch import Tensor

from hydraspec.models.deepseek.attention import HeadLatents
from hydraspec.models.linear import Linear
from hydraspec.models.moe import one_by_one
from hydraspec.models.parts import Weights, held


def module_of(name: str) -> str:
    """The part of a head that a weight belongs to, such as "layers.0.mlp", "fc" or "lm_head". A
    norm belongs to the part that it scales, since a change of scale in one can be undone in the
    other.
    """
    stem = re.sub(r"\.(weight|bias)$", "", name)
    for norm, part in _NORMS_OF.items():
        stem = re.sub(rf"\.{norm}$", f".{part}", stem)
    stem = re.sub(r"^(fc_norm\.\d+|input_norm|mask_hidden)$", "fc", stem)
    stem = re.sub(r"\.(enorm|hnorm)$", ".eh_proj", stem)
    return re.sub(r"\.(self_attn|mlp)\..*$", r".\1", stem)


_NORMS_OF = {  # norm → the part of its layer that it is counted with
    "input_layernorm": "self_attn",
    "hidden_norm": "self_attn",
    "post_attention_layernorm": "mlp",
    "pre_feedforward_layernorm": "mlp",
    "post_feedforward_layernorm": "mlp",
}


def weights_of(head: Any) -> dict[str, Tensor]:
    """Floating-point weights of a head by name, each expert's under its own name. The tensors are
    views: writing to one changes the head.
    """
    found = {name: held(weight) for name, weight in one_by_one(head.tensors()).items()}
    return {n: w for n, w in found.items() if w.is_floating_point() and w.numel() > 1}


def derive(head: Any) -> None:
    """Update everything that a head derived from its weights, after these were changed in place:
    cached properties, views of stacked weights, P-EAGLE's projected mask state.
    """
    for part in _parts(head):
        for name, value in vars(type(part)).items():
            if isinstance(value, cached_property):
                vars(part).pop(name, None)
        if isinstance(part, Linear) and part.weight._base is not None:
            # autograd refuses a view that was made under no_grad, so it is made again
            w = part.weight
            part.weight = part.weight._base.as_strided(w.shape, w.stride(), w.storage_offset())
        if isinstance(part, HeadLatents):
            by_head = part.weight.t().unflatten(0, (part.keys.shape[0], -1))
            num_keys = part.keys.shape[1]
            part.keys, part.values = by_head[:, :num_keys], by_head[:, num_keys:].transpose(1, 2)
    if getattr(head, "mask_state", None) is not None:
        head.project_mask()


def _parts(head: Any) -> Iterator[Any]:
    """A head and all parts of it, at any depth, that hold weights."""
    yield head
    found = [getattr(head, name) for name in getattr(head, "names", {})]
    for part in [*found, getattr(head, "layers", [])]:
        for each in part if isinstance(part, list) else [part]:
            if isinstance(each, Weights):
                yield from _parts(each)

"""Scales of a target's keys and values in an e4m3 cache, as checkpoints store them.

compressed-tensors announces them in `kv_cache_scheme`: a layer has k_scale and v_scale, one number
each or one for each KV head, by which a number in the cache is multiplied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hydraspec.errors import CheckpointError
from hydraspec.models.checkpoint.quantization_config import found_formats
from hydraspec.models.checkpoint.reader import Checkpoint, TensorEntry
from hydraspec.models.parts import Share, Weights

# k_scale of the attention, or of its inner module, or output_scale of a projection.
_NAME = re.compile(
    r"layers\.(\d+)\.self_attn\.(?:attn\.)?(?:([kv])_scale|([kv])_proj\.output_scale)\Z"
)


def stored_kv_scales(checkpoint: Checkpoint, target: Any) -> dict[int, Tensor]:
    """The checkpoint's scales [2, Hkv] of this rank's heads, by held layer of a Decoder that owns
    KV; see `read_kv_scales`.

    Raises CheckpointError: see `read_kv_scales` and `of_heads`.
    """
    where, found = str(checkpoint.folder), {}
    for i, scales in read_kv_scales(checkpoint, target).items():
        if i in target.held and target.kv_source(i) == i:
            heads = target.layers[i].attention.kv
            found[i] = of_heads(scales, heads, where, i).to(target.device)
    return found


def read_kv_scales(checkpoint: Checkpoint, model: Weights) -> dict[int, tuple[Tensor, Tensor]]:
    """Scales of keys and of values [1 or heads] float32 by layer, where the checkpoint has an e4m3
    `kv_cache_scheme`; {} where it has none, or no such tensors.

    Raises CheckpointError: a scale that is not above 0 and finite, or keys' scales without values'.
    """
    where = str(checkpoint.folder)
    formats = found_formats(checkpoint.config, where)
    if formats is None or not _is_e4m3(formats.get("kv_cache_scheme")):
        return {}
    found: dict[int, dict[str, Tensor]] = {}
    for name, entry in checkpoint.entries().items():
        match = _NAME.search(model.canonical_name(name) or "")
        if match is not None:
            found.setdefault(int(match[1]), {})[match[2] or match[3]] = _read(entry, where)
    for layer, scales in found.items():
        if len(scales) != 2:
            raise CheckpointError(
                f"checkpoint {where!r}: layer {layer} has scales of {' and '.join(scales)} alone "
                "for an FP8 cache; expected k_scale and v_scale: download it again"
            )
    return {layer: (scales["k"], scales["v"]) for layer, scales in found.items()}


def _is_e4m3(scheme: Any) -> bool:
    """Returns whether a kv_cache_scheme is of 8-bit floats with scales that files hold."""
    if not isinstance(scheme, Mapping):
        return False
    stated = scheme.get("type"), scheme.get("num_bits"), scheme.get("dynamic", False)
    return stated == ("float", 8, False)


def _read(entry: TensorEntry, where: str) -> Tensor:
    with safe_open(entry.file, framework="pt") as opened:
        scale: Tensor = opened.get_tensor(entry.name)
    scale = scale.float().reshape(-1)
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise CheckpointError(
            f"checkpoint {where!r}: {entry.name} is {scale.tolist()}; expected numbers above 0: "
            "download it again"
        )
    return scale


def of_heads(scales: tuple[Tensor, Tensor], heads: Share, where: str, layer: int) -> Tensor:
    """The scales [2, Hkv] of a rank's KV heads, from those of a whole layer. Raises
    CheckpointError: as many scales as neither 1 nor the layer's heads."""
    rows = []
    for scale in scales:
        if len(scale) not in (1, heads.size):
            raise CheckpointError(
                f"checkpoint {where!r}: layer {layer} has {len(scale)} scales for an FP8 cache and "
                f"{heads.size} KV heads; expected 1, or one for each head: download it again"
            )
        rows.append(scale.expand(heads.size)[heads.first : heads.first + heads.count])
    return torch.stack(rows)

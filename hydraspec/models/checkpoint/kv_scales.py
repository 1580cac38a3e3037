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
from hydraspec.models.checkpoint.config_reader import shown
from hydraspec.models.checkpoint.quantization_config import found_formats
from hydraspec.models.checkpoint.reader import Checkpoint, TensorEntry
from hydraspec.models.parts import Share, Weights

FP8 = ("float", 8)  # type and bits of a kv_cache_scheme
# k_scale of the attention, or of its inner module, or output_scale of a projection.
_NAME = re.compile(
    r"layers\.(\d+)\.self_attn\.(?:attn\.)?(?:([kv])_scale|([kv])_proj\.output_scale)\Z"
)


def stored_kv_scales(checkpoint: Checkpoint, target: Any) -> dict[int, Tensor]:
    """The checkpoint's scales [2, Hkv] of this rank's heads, by held layer of a Decoder that owns
    KV; see `read_kv_scales`.

    Raises CheckpointError: see `read_kv_scales` and `of_heads`; scales of some such layers alone,
    held or not, so that all ranks raise it.
    """
    where, stored = str(checkpoint.folder), read_kv_scales(checkpoint, target)
    owners = [i for i in range(target.num_layers) if target.kv_source(i) == i]
    found = {
        i: of_heads(stored[i], target.layers[i].attention.kv, where, i).to(target.device)
        for i in owners
        if i in target.held and i in stored
    }
    missing = [i for i in owners if i not in stored]
    if 0 < len(missing) < len(owners):
        raise CheckpointError(
            f"checkpoint {where!r}: {len(missing)} of {len(owners)} layers with a cache have no "
            f"scales for an FP8 cache (layer {missing[0]} is the first); expected k_scale and "
            "v_scale of all, or of none: download it again, or leave engine.kv_cache.dtype out"
        )
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


def other_kv_format(checkpoint: Checkpoint) -> str:
    """The checkpoint's `kv_cache_scheme` in words, if it is not of 8-bit floats; else empty."""
    formats = found_formats(checkpoint.config, str(checkpoint.folder))
    scheme = None if formats is None else formats.get("kv_cache_scheme")
    stated = _stated(scheme)
    if not scheme or stated == FP8:
        return ""
    return shown(scheme) if stated is None else f"type {stated[0]}, num_bits {stated[1]}"


def _is_e4m3(scheme: Any) -> bool:
    """Returns whether a kv_cache_scheme is of 8-bit floats with scales that files hold."""
    return _stated(scheme) == FP8 and scheme.get("dynamic", False) is False


def _stated(scheme: Any) -> tuple[str, Any] | None:
    """Type and bits of a kv_cache_scheme, by default those of the library; None: no object."""
    if not isinstance(scheme, Mapping):
        return None
    return str(scheme.get("type") or "int").lower(), scheme.get("num_bits", 8)


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

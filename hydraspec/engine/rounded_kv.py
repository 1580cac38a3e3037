"""The note of engines whose keys and values are kept in e4m3, and their number format."""

from __future__ import annotations

from collections.abc import Mapping

KV_CACHE = "kv_cache"  # of EngineInfo.quantization
KV_IS_ROUNDED = (
    "engine.kv_cache.dtype=fp8 rounds keys and values to e4m3: outputs may differ from those of a "
    "cache in {}, in the baseline as with drafts"
)


def with_fp8_cache(quantization: Mapping[str, str] | None) -> dict[str, str]:
    """EngineInfo.quantization of a target whose keys and values are kept in e4m3."""
    return {**(quantization or {}), KV_CACHE: "fp8 KV cache"}

"""What engines say of keys and values that are kept in e4m3."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from hydraspec.engine.base import EngineInfo
from hydraspec.engine.machine import log_once

KV_CACHE = "kv_cache"  # of EngineInfo.quantization
KV_IS_ROUNDED = (  # a warning
    "engine.kv_cache.dtype=fp8 rounds keys and values to e4m3: outputs may differ from those of a "
    "cache in {}, in the baseline as with drafts"
)


def log_rounding(info: EngineInfo) -> None:
    """Log the warning of rounded keys and values, if there is one, once in this process."""
    if KV_CACHE in (info.quantization or {}):
        log_once(KV_IS_ROUNDED.format(info.dtype), logging.WARNING)


def with_fp8_cache(quantization: Mapping[str, str] | None) -> dict[str, str]:
    """EngineInfo.quantization of a target whose keys and values are kept in e4m3."""
    return {**(quantization or {}), KV_CACHE: "fp8 KV cache"}

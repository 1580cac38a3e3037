"""Engines of the zoo's targets, loaded once for the tests that share them."""

from __future__ import annotations

from functools import cache

import torch

from hydraspec.cli.compose import plan
from hydraspec.engine.native import NativeEngine

DRAFTERS = {  # every kind, by a target that it drafts for
    "gemma4_mtp": "tiny_gemma4_e",
    "eagle": "tiny_mistral",
    "eagle3": "tiny_qwen3",
    "peagle": "tiny_gemma4",
    "mtp": "tiny_deepseek",
    "dflash": "tiny_gemma4",
    "dflash2": "tiny_qwen3",
    "dspark": "tiny_qwen3",
    "ngram": "tiny_mistral",
    "suffix": "tiny_qwen3",
}


@cache
def engine_of(target: str, method: str, *typed: str) -> NativeEngine:
    """A native engine in float32 on one thread; a module that uses it clears the cache."""
    torch.set_num_threads(1)
    given = [f"target={target}", f"method={method}", "cudagraph=none", *typed]
    return NativeEngine(plan(["target.dtype=float32", *given]).jobs[0].config)

"""Outputs over an FP8 KV cache beside those over a cache that rounds nothing."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TypedDict

Pair = tuple[Sequence[int], Sequence[int]]  # tokens of one request over both caches


class KVCacheAgreement(TypedDict):
    """How many outputs an FP8 KV cache leaves as they are."""

    num_requests: int
    num_equal: int
    equal_prefix: float  # mean share of an output before the first difference


def agreement(pairs: Sequence[Pair]) -> KVCacheAgreement:
    """The figures of one request or more."""
    return {
        "num_requests": len(pairs),
        "num_equal": sum(list(ours) == list(theirs) for ours, theirs in pairs),
        "equal_prefix": fmean(_equal_prefix(*pair) for pair in pairs),
    }


def _equal_prefix(ours: Sequence[int], theirs: Sequence[int]) -> float:
    """Share of the longer output's tokens before the first difference; 1 for two empty ones."""
    longest, shortest = max(len(ours), len(theirs)), min(len(ours), len(theirs))
    equal = next((i for i in range(shortest) if ours[i] != theirs[i]), shortest)
    return equal / longest if longest else 1.0

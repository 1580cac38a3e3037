"""K of a run in words; the engine may choose K for each step."""

from __future__ import annotations

from hydraspec.metrics.summary import Summary

PER_STEP = "auto"  # K of a run whose engine chose it for each step


def drafts_of(summary: Summary) -> int | str:
    """K of a run, or "auto" if the engine chose it per step, up to `num_speculative_tokens`."""
    is_chosen = summary.get("num_speculative_tokens_used") is not None
    return PER_STEP if is_chosen else summary["num_speculative_tokens"]


def drafts_name(summary: Summary) -> str:
    """K of a run in words: "K=3", or "K=auto (0 to 6)"."""
    drafts, most = drafts_of(summary), summary["num_speculative_tokens"]
    return f"K={drafts} (0 to {most})" if drafts == PER_STEP else f"K={drafts}"

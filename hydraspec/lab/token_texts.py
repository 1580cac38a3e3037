"""Texts of single tokens, for figures and pages of a run that records its drafts.

Engines give texts of whole outputs only, so the target's tokenizer is read once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hydraspec.config.schema import RunConfig
from hydraspec.models.checkpoint.reader import resolve_folder
from hydraspec.models.tokenizer import load_tokenizer
from hydraspec.types import CheckpointError


def decoder(config: RunConfig) -> Callable[[Sequence[int]], str] | None:
    """Text of token ids, without special tokens; None where the target has no tokenizer, or the run
    records no drafts and so shows none of its tokens.
    """
    if not (config.metrics.trace or config.metrics.all_positions):
        return None
    try:
        tokenizer = load_tokenizer(resolve_folder(config.target.checkpoint))
    except CheckpointError:
        return None
    if tokenizer is None:
        return None
    known = tokenizer

    def decode(token_ids: Sequence[int]) -> str:
        try:
            return known.decode(token_ids)
        except (CheckpointError, ValueError, OverflowError, TypeError):  # no token of its files
            return ""

    return decode

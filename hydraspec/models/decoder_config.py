"""What the configs of all target families hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder's shape, as far as all families agree."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    max_position_embeddings: int
    rms_norm_eps: float
    tied: bool  # the head is the embedding table

"""The record of rows that read no token's embedding."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, frozen=True, kw_only=True)
class EncodedRows:
    """Rows of a pass whose embedding is an encoder's output, in place of a token's."""

    rows: Tensor  # [E] int64, rows of T
    states: Tensor  # [E, D], unscaled
    sees_until: Tensor | None = None  # [T] int64, see `AttentionPlan`, of sliding layers

    def merge(self, embedded: Tensor) -> Tensor:
        """Embeddings [T, D], in which these rows are replaced, in place."""
        return embedded.index_copy_(0, self.rows, self.states)

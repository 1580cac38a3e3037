"""A vocabulary split over tensor-parallel ranks: rows of tables and heads, columns of logits.

Every rank has the same number of rows, the last ones padded, so that gathered parts have one shape
and id = rank * num_rows + row holds everywhere. Padding is at the end of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from hydraspec_kernels.embedding import embed, embed_beside, embed_part
from hydraspec_kernels.sampling.token_choice import (
    best_candidates,
    greedy_candidates,
    greedy_tokens,
)
from torch import Tensor

from hydraspec.parallel.group import SOLO, TensorGroup

EXACT_IDS = 1 << 24  # float32 holds every whole number up to this one


@dataclass(slots=True, frozen=True)
class Vocabulary:
    """The part of V tokens that a rank holds. With one rank it is all of them."""

    size: int  # V
    group: TensorGroup = SOLO

    def __post_init__(self) -> None:
        assert 0 < self.size <= EXACT_IDS, f"a vocabulary of {self.size} tokens"

    @property
    def num_rows(self) -> int:
        """Rows of this rank's part of a table or head, and columns of its logits; the same number
        on every rank.
        """
        return -(-self.size // self.group.size)

    @property
    def first(self) -> int:
        """The token id of row 0; V on a rank without tokens."""
        return min(self.group.rank * self.num_rows, self.size)

    @property
    def num_tokens(self) -> int:
        """Rows that are tokens; those after them are padding and may hold anything."""
        return min(self.num_rows, self.size - self.first)

    def rows_of(self, tokens: Iterable[int]) -> list[int]:
        """The tokens that this rank holds, as rows of its part."""
        stop = self.first + self.num_tokens
        return [token - self.first for token in tokens if self.first <= token < stop]

    def embed(self, token_ids: Tensor, table: Tensor, scale: float | None = None) -> Tensor:
        """Rows token_ids [...] of the whole table times scale -> [..., D]; `table` [num_rows, D] is
        this rank's part."""
        if self.group.size == 1:
            return embed(token_ids, table, scale)
        own = embed_part(token_ids, table, self.first, self.num_tokens, scale)
        return self.group.all_reduce(own)

    def embed_beside(
        self,
        token_ids: Tensor,
        table: Tensor,
        scale: float | None,
        hidden: Tensor,
        rows: Tensor | None,
    ) -> Tensor:
        """`embed` of token_ids [B], concatenated with hidden [B, H], or with hidden [T, H] at rows
        [B] -> [B, D + H].
        """
        if self.group.size == 1:
            return embed_beside(token_ids, table, scale, hidden, rows)
        beside = hidden if rows is None else hidden.index_select(0, rows)
        return torch.cat((self.embed(token_ids, table, scale), beside), -1)

    def whole(self, logits: Tensor) -> Tensor:
        """Logits of every token [N, V], in the order of ids, from this rank's [N, num_rows]."""
        if self.group.size == 1:
            return logits
        columns = self.group.all_gather(logits).transpose(0, 1).flatten(1)
        return columns[:, : self.size].contiguous()

    def greedy_tokens(self, logits: Tensor, *, marks_not_finite: bool = False) -> Tensor:
        """The argmax [N] of the whole rows, from this rank's columns [N, num_rows]. Ties, NaN and
        `marks_not_finite` are treated as in token_choice.greedy_tokens.

        Ranks exchange their best values and the tokens of these: two numbers a row, or for each
        chunk of a row where kernels run.
        """
        if self.group.size == 1:
            return greedy_tokens(logits, marks_not_finite=marks_not_finite)
        candidates = greedy_candidates(logits, self.first, self.num_tokens)
        return best_candidates(self.group.all_gather(candidates), marks_not_finite=marks_not_finite)

    def best(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` largest logits [N, count] of the whole rows, in float32 or wider, and their
        tokens, from this rank's columns [N, num_rows]. Ranks exchange as many each."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        if self.group.size == 1:
            values, tokens = logits.topk(count)
            return values.to(wide), tokens
        own = logits.to(wide)
        own[:, self.num_tokens :] = -math.inf
        values, columns = own.topk(min(count, self.num_rows))
        found = torch.stack((values, (columns + self.first).to(wide)))
        values, tokens = self.group.all_gather(found).permute(1, 2, 0, 3).flatten(2)
        values, places = values.topk(count)
        return values, tokens.gather(1, places).long()


WHOLE = Vocabulary(EXACT_IDS)  # vocabulary of one rank, for logits of any width

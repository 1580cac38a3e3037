"""What a modelled engine is built with, and names for what its tokens are."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

VOCAB_SIZE = 3


@dataclass(slots=True, frozen=True, kw_only=True)
class Setting:
    """What one engine is built with."""

    groups: tuple[tuple[int, int | None, int], ...]  # block size, window, following tokens
    num_blocks: tuple[int, ...]
    num_drafts: int  # K
    max_num_seqs: int
    max_rows: int  # of a step
    max_len: int
    num_stages: int = 1
    runs_ahead: bool = False

    @property
    def num_lookahead(self) -> int:
        owns_kv = any(following for _, _, following in self.groups)
        return max(0, self.num_drafts - 1) if owns_kv else 0


class Histories:
    """Numbers for sequences of tokens: equal only for equal ones, for all practical purposes."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def of(self, tokens: Seq[int]) -> np.ndarray:
        """[len + 1]: entry n stands for the first n tokens."""
        found = [0]
        for token in tokens:
            key = found[-1], token
            found.append(self._numbers.setdefault(key, len(self._numbers) + 1))
        return np.array(found)

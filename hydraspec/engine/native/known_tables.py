"""Whose blocks a device's tables name, and what has to be written for the next plan's. Host numbers
alone: the work is that of the entries that changed, not of the tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hydraspec.types import BlockTable

if TYPE_CHECKING:
    from collections.abc import Sequence

NOTHING = np.empty(0, dtype=np.int64)


class KnownTables:
    """Tables of several groups one behind the other, [B, P] each. A row has the live entries of one
    owner (see BlockTable) and is zero elsewhere.
    """

    def __init__(self, max_num_seqs: int, widths: Sequence[int]) -> None:
        self._widths = widths
        self.first = [max_num_seqs * sum(widths[:g]) for g in range(len(widths))]
        self._live = np.zeros((len(widths), max_num_seqs, 3), dtype=np.int64)
        self._zeros = np.zeros(max(widths, default=0), dtype=np.int64)

    def forget(self) -> None:
        """All entries are zero."""
        self._live[:] = 0

    def changes(self, tables: Sequence[BlockTable]) -> tuple[np.ndarray, np.ndarray]:
        """Places and new values that turn what is known into `tables`, with which it is replaced.
        Rows behind the plan's become zeros.
        """
        now = np.zeros_like(self._live)
        for g, table in enumerate(tables):
            now[g, : len(table.live)] = table.live
        groups, requests = (self._live != now).any(2).nonzero()
        if not len(groups):
            return NOTHING, NOTHING
        before = self._live[groups, requests].tolist()
        after = now[groups, requests].tolist()
        found = _Changes(self._zeros)
        places = zip(groups.tolist(), requests.tolist(), strict=True)
        for (g, i), old, new in zip(places, before, after, strict=True):
            row = tables[g].rows[i] if new[0] else None
            found.add(self.first[g] + i * self._widths[g], old, new, row)
        self._live = now
        return found.arrays()


class _Changes:
    """Runs of table entries that get new values."""

    def __init__(self, zeros: np.ndarray) -> None:
        self._zeros = zeros
        self._starts: list[int] = []
        self._counts: list[int] = []
        self._values: list[np.ndarray] = []

    def add(self, place: int, old: list[int], new: list[int], row: np.ndarray | None) -> None:
        """The row at `place` has the live entries `new` instead of `old` (see BlockTable)."""
        (was, old_first, old_end), (owner, first, end) = old, new
        start = max(first, old_end) if owner == was else first
        if row is not None and end > start:
            self._run(place + start, row[start:end])
        gone = min(old_end, first) if owner else old_end
        if gone > old_first:
            self._run(place + old_first, self._zeros[: gone - old_first])
        behind = max(old_first, end)
        if owner and owner != was and old_end > behind:
            self._run(place + behind, self._zeros[: old_end - behind])

    def _run(self, start: int, values: np.ndarray) -> None:
        self._starts.append(start)
        self._counts.append(len(values))
        self._values.append(values)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Place and value of each entry."""
        counts = np.array(self._counts, dtype=np.int64)
        firsts = np.array(self._starts, dtype=np.int64) - (np.cumsum(counts) - counts)
        values = np.concatenate(self._values)
        return np.repeat(firsts, counts) + np.arange(len(values)), values

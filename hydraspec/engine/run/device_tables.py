"""Block tables on the device, and the entries in which the next plan's differ: the host's work
grows with the changes, not with the tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hydraspec.types import BlockTable

NOTHING = np.empty(0, dtype=np.int64)


class KnownTables:
    """Contents of the tables of all groups, in host numbers: [B, P] each, one group after the
    other. A row has the live entries of one owner (see BlockTable) and is zero elsewhere.
    """

    def __init__(self, max_num_seqs: int, widths: Sequence[int]) -> None:
        self._widths = widths
        self.first = [max_num_seqs * sum(widths[:g]) for g in range(len(widths))]
        self._live = np.zeros((len(widths), max_num_seqs, 3), dtype=np.int64)
        self._zeros = np.zeros(max(widths, default=0), dtype=np.int64)

    def forget(self) -> None:
        """Record that all entries are zero."""
        self._live[:] = 0

    def changes(self, tables: Sequence[BlockTable]) -> tuple[np.ndarray, np.ndarray]:
        """Places and new values, [n] each, that turn the known contents into `tables`, which are
        known from then on. Rows after the plan's become zeros.
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
        """Add the changes of the row at `place`, whose `old` live entries give way to `new` ones
        (see BlockTable)."""
        (was, old_first, old_end), (owner, first, end) = old, new
        start = max(first, old_end) if owner == was else first
        if row is not None and end > start:
            self._run(place + start, row[start:end])
        gone = min(old_end, first) if owner else old_end
        if gone > old_first:
            self._run(place + old_first, self._zeros[: gone - old_first])
        past = max(old_first, end)
        if owner and owner != was and old_end > past:
            self._run(place + past, self._zeros[: old_end - past])

    def _run(self, start: int, values: np.ndarray) -> None:
        self._starts.append(start)
        self._counts.append(len(values))
        self._values.append(values)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Place and value of each entry, [n] both."""
        counts = np.array(self._counts, dtype=np.int64)
        firsts = np.array(self._starts, dtype=np.int64) - (np.cumsum(counts) - counts)
        values = np.concatenate(self._values)
        return np.repeat(firsts, counts) + np.arange(len(values)), values


class DeviceTables:
    """Block tables on the device by batch position, and what the host has written there."""

    def __init__(self, max_num_seqs: int, widths: Sequence[int], device: torch.device) -> None:
        b = max_num_seqs
        self._device = device
        self._known = KnownTables(b, widths)
        self._is_certain = True  # the known contents have been sent
        self.flat = torch.zeros(b * sum(widths), dtype=torch.int64, device=device)
        self.groups = [
            self.flat[first : first + b * width].view(b, width)
            for first, width in zip(self._known.first, widths, strict=True)
        ]

    def changes(self, tables: Sequence[BlockTable]) -> tuple[np.ndarray, np.ndarray]:
        """Places in `flat` and new values, which count as written once `were_sent` is called."""
        if not self._is_certain:  # an interrupt came between `changes` and `were_sent`
            self.flat.zero_()
            self._known.forget()
        self._is_certain = False
        return self._known.changes(tables)

    def were_sent(self) -> None:
        """Record that the copy of the newest changes was launched."""
        self._is_certain = True

    def send(self, index: np.ndarray, values: np.ndarray) -> None:
        """Write many changes [n] at once, through pinned memory that the allocator provides."""
        both = torch.from_numpy(np.stack((index, values)))
        if self._device.type == "cuda":
            both = both.pin_memory()
        sent = both.to(self._device, non_blocking=True)
        self.flat.index_copy_(0, sent[0], sent[1])

"""Faults and signs of life of all ranks, in the store that they share, with a parent if they have
one.

The module imports no torch; the store is one of torch.distributed's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, astuple
from typing import Any, Protocol

from hydraspec.parallel.faults import Fault, Kind
from hydraspec.parallel.hosts import Process
from hydraspec.parallel.progress import Signs

FAULTS, SIGNS = "faults", "signs"


class Store(Protocol):
    """The methods of torch.distributed's stores that a board uses."""

    def append(self, key: str, value: str, /) -> None: ...

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


class Board:
    """Posts of the ranks: the first failure of each, and its newest signs of life."""

    def __init__(self, store: Store, num_ranks: int) -> None:
        """store: a connection that only this board uses."""
        self._store, self.num_ranks = store, num_ranks
        self._added: set[int] = set()
        self._present: list[int] = []  # ranks that have posted signs

    def add(self, fault: Fault) -> None:
        """Post a fault; readers skip it if the same rank has an earlier one."""
        if fault.rank not in self._added:
            self._added.add(fault.rank)
            plain = asdict(fault) | {"kind": fault.kind.value}
            self._store.append(FAULTS, json.dumps(plain) + "\n")

    def faults(self) -> list[Fault]:
        """The first fault of each rank so far."""
        if not self._store.check([FAULTS]):
            return []
        found: dict[int, Fault] = {}
        for line in self._store.get(FAULTS).splitlines():
            plain = json.loads(line)
            found.setdefault(plain["rank"], Fault(**plain | {"kind": Kind(plain["kind"])}))
        return list(found.values())

    def post(self, rank: int, signs: Signs, process: Process) -> None:
        """Replace the posted signs of a rank, and its process."""
        posted: list[Any] = [*astuple(signs), str(process)]
        self._store.set(f"{SIGNS}/{rank}", json.dumps(posted))

    def signs(self) -> Mapping[int, tuple[Signs, Process]]:
        """The last signs of each rank that has posted any, and its process."""
        for rank in range(self.num_ranks):
            if rank not in self._present and self._store.check([f"{SIGNS}/{rank}"]):
                self._present.append(rank)
        found = {}
        for rank in self._present:
            *numbers, process = json.loads(self._store.get(f"{SIGNS}/{rank}"))
            found[rank] = Signs(*numbers), Process.of_text(process)
        return found

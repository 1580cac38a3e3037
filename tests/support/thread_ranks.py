"""Ranks as threads of the test's process: cheap, and the same arithmetic as processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
import torch.distributed as dist
from thread_stages import Lanes, ThreadLink
from torch import Tensor

from hydraspec.parallel.control import Control
from hydraspec.parallel.group import TensorGroup
from hydraspec.parallel.layout import Layout
from hydraspec.parallel.ranks import Ranks, acting_as

WAIT_S = 60.0  # for the slowest rank of a step; a broken barrier raises in every rank
T = TypeVar("T")


class ThreadGroup(TensorGroup):
    """One thread's end of a tensor-parallel group."""

    def __init__(self, rank: int, barrier: threading.Barrier, slots: list[Tensor]) -> None:
        self.rank, self.size = rank, barrier.parties
        self._barrier, self._slots = barrier, slots

    def _exchanged(self, x: Tensor) -> list[Tensor]:
        self._slots[self.rank] = x.clone()
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum in the order of ranks, so that every rank has the same bits."""
        first, *others = self._exchanged(x)
        total = first.clone()
        for other in others:
            total += other
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape]."""
        return torch.stack(self._exchanged(x))


def as_ranks(layout: Layout, work: Callable[[Ranks], T]) -> list[T]:
    """What `work` returns on every rank. The first rank that raises ends the others."""
    barriers: list[threading.Barrier] = []
    groups: list[ThreadGroup] = []
    for _ in range(layout.pipeline * layout.data):
        barriers.append(threading.Barrier(layout.tensor, timeout=WAIT_S))
        slots = [torch.empty(0)] * layout.tensor
        groups += [ThreadGroup(rank, barriers[-1], slots) for rank in range(layout.tensor)]
    store, lost = dist.HashStore(), threading.Event()

    def watch() -> None:
        if lost.is_set():
            raise threading.BrokenBarrierError

    pipelines = [Lanes(layout.pipeline) for _ in range(layout.tensor * layout.data)]

    def run(rank: int) -> T:
        at = layout.coordinates(rank)
        lanes = pipelines[at.replica * layout.tensor + at.tensor]
        ranks = Ranks(
            layout=layout,
            rank=rank,
            group=groups[rank],
            link=ThreadLink(lanes, at.stage) if layout.pipeline > 1 else None,
            control=Control(store, layout, rank, watch=watch),
        )
        try:
            with acting_as(ranks):
                return work(ranks)
        except BaseException:
            lost.set()
            for end in [*barriers, *pipelines]:
                end.abort()
            raise

    with ThreadPoolExecutor(layout.num_ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(layout.num_ranks)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    causes = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (causes or errors)[0]
    assert all(lanes.are_empty for lanes in pipelines), "something was sent and not received"
    return [future.result() for future in futures]

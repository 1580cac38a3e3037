"""Hand-over between pipeline stages: the residual stream from each stage to the next, results from
the last one to all others.

Nothing is announced: both sides derive shapes from the same plan. Sending does not wait. Every
stage sends and receives in the order of steps, and collects a step's results only after it has
sent on everything that was launched before, so no two stages wait for each other.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from hydraspec.parallel.layout import Coordinates, Layout
from hydraspec.parallel.watch import Watch

Group: TypeAlias = dist.ProcessGroup


class StageLink(Protocol):
    """Exchanges of a stage with the others of its pipeline. Tensor-parallel ranks of a stage have a
    link each, to the ranks with the same place in the other stages.
    """

    def send(self, x: Tensor) -> None:
        """Send x to the next stage, which receives it in its turn; do not write x afterwards."""
        ...

    def receive(self, x: Tensor) -> None:
        """Receive the previous stage's next tensor into x, which is contiguous and shaped alike."""
        ...

    def send_results(self, x: Tensor) -> None:
        """Send x from the last stage to all others; do not write x afterwards."""
        ...

    def receive_results(self, x: Tensor) -> None:
        """Receive into x the next results of the last stage."""
        ...

    def share(self, found: Any) -> Any:
        """Returns the last stage's `found` on every stage; other stages give None. It is slow, and
        meant for facts that are known once models are loaded.
        """
        ...


class ProcessLink:
    """Stages in separate processes, over torch.distributed groups."""

    def __init__(self, ranks: list[int], index: int, groups: PipelineGroups, watch: Watch) -> None:
        """ranks: those of this pipeline; this rank is number `index`."""
        self._ranks, self._index, self._groups, self._watch = ranks, index, groups, watch
        self._under_way: deque[tuple[Work | None, Tensor]] = deque()

    def _keep(self, work: Work | None, x: Tensor) -> None:
        """Keep the memory of a tensor until it has been sent."""
        self._under_way.append((work, x))
        while self._under_way:
            first = self._under_way[0][0]
            if first is not None and not first.is_completed():
                break
            self._under_way.popleft()

    def _finish(self, work: Work | None, x: Tensor) -> None:
        assert work is not None
        if x.is_cuda:
            work.wait()  # the device's stream waits, not the host
        else:
            self._watch.finish(work)

    def open(self, device: torch.device) -> None:
        """Exchange once over every group, in one order on all stages. NCCL sets a group up in its
        first exchange, in which hosts wait for each other: in steps they would in several orders.
        """
        x = torch.zeros(1, device=device)
        for border in range(len(self._groups.borders)):
            if border == self._index:
                self.send(x)
            elif border == self._index - 1:
                self.receive(x)
        self._finish(self._broadcast_results(x), x)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def send(self, x: Tensor) -> None:
        """See StageLink."""
        x = x.contiguous()
        self._keep(self._cross(x, self._index), x)

    def receive(self, x: Tensor) -> None:
        """See StageLink."""
        self._finish(self._cross(x, self._index - 1), x)

    def _cross(self, x: Tensor, border: int) -> Work | None:
        """Move x from the stage before a border to the one after it.

        CPUs use a broadcast: a wait for gloo's irecv cannot go on after a time slice, and gloo's
        isend never reports that it is done.
        """
        source, group = self._ranks[border], self._groups.borders[border]
        if not x.is_cuda:
            return self._broadcast(x, source, group)
        with self._watch.naming_the_lost():
            if border == self._index:
                return dist.isend(x, self._ranks[border + 1], group=group)
            return dist.irecv(x, source, group=group)

    def _broadcast_results(self, x: Tensor) -> Work | None:
        return self._broadcast(x, self._ranks[-1], self._groups.results)

    def _broadcast(self, x: Tensor, source: int, group: Group) -> Work | None:
        with self._watch.naming_the_lost():
            work: Work | None = dist.broadcast(x, source, group=group, async_op=True)
        return work

    def send_results(self, x: Tensor) -> None:
        """See StageLink."""
        x = x.contiguous()
        self._keep(self._broadcast_results(x), x)

    def receive_results(self, x: Tensor) -> None:
        """See StageLink."""
        self._finish(self._broadcast_results(x), x)

    def share(self, found: Any) -> Any:
        """See StageLink."""
        held = [found]
        with self._watch.naming_the_lost():
            dist.broadcast_object_list(held, self._ranks[-1], group=self._groups.hosts)
        return held[0]


@dataclass(slots=True, frozen=True, kw_only=True)
class PipelineGroups:
    """The torch.distributed groups of one pipeline."""

    borders: list[Group]  # of two neighbours each, so that no border waits for another
    results: Group  # all stages
    hosts: Group  # all stages, for data that is on no device

    @classmethod
    def make(cls, ranks: list[int], backend: str, timeout: timedelta) -> PipelineGroups:
        """Make the groups of the pipeline `ranks`; every rank of the run has to call this."""
        new = partial(dist.new_group, timeout=timeout, backend=backend)
        return cls(
            borders=[new(ranks[i : i + 2]) for i in range(len(ranks) - 1)],
            results=new(ranks),
            hosts=dist.new_group(ranks, timeout=timeout, backend="gloo"),
        )


def link_stages(
    layout: Layout, rank: int, watch: Watch, *, backend: str, timeout: timedelta
) -> StageLink | None:
    """The link of `rank`; None with one stage. Every rank of the run calls this at the same time,
    since all make the groups of all pipelines, in one order.
    """
    own = layout.coordinates(rank)
    link = None
    for replica, tensor in product(range(layout.data), range(layout.tensor)):
        if layout.pipeline == 1:
            break
        stages = range(layout.pipeline)
        ranks = [layout.rank_at(Coordinates(replica, stage, tensor)) for stage in stages]
        groups = PipelineGroups.make(ranks, backend, timeout)
        if rank in ranks:
            link = ProcessLink(ranks, own.stage, groups, watch)
    if link is not None:
        link.open(torch.device("cuda" if backend == "nccl" else "cpu"))
    return link

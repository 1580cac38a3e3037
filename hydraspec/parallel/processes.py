"""The ranks of a run as processes: how they find each other, and the groups they form.

`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT` in the environment say which
rank a process is; parallel/launch.py sets them, and so does torchrun.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hydraspec.parallel.control import Control
from hydraspec.parallel.group import SOLO, ProcessGroup, TensorGroup, leave_out_multicast
from hydraspec.parallel.layout import Coordinates, Layout
from hydraspec.parallel.ranks import Ranks, acting_as
from hydraspec.parallel.stages import link_stages
from hydraspec.parallel.watch import Watch

TO_START = timedelta(minutes=5)  # for the slowest rank's imports
TO_LOAD = timedelta(minutes=30)  # between two ranks that enter a collective; `Watch` is quicker


@contextmanager
def joined(
    layout: Layout, rank: int, store: Store, watch: Watch, *, on_cuda: bool
) -> Iterator[Ranks]:
    """Form the groups of this run for the block, in which `current()` is this rank's view.

    On a CUDA device ranks exchange tensors through NCCL, on a CPU through gloo. After an exception
    the groups are left as they are: taking them down could wait for a rank that is lost.
    """
    if on_cuda:
        leave_out_multicast()
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=layout.num_ranks, timeout=TO_LOAD
    )
    backend = "nccl" if on_cuda else "gloo"
    group = _tensor_group(layout, rank, watch, backend)
    link = link_stages(layout, rank, watch, backend=backend, timeout=TO_LOAD)
    control = Control(store, layout, rank, watch=watch.check)
    ranks = Ranks(layout=layout, rank=rank, group=group, link=link, control=control, watch=watch)
    with acting_as(ranks):
        yield ranks
    dist.destroy_process_group()


def _tensor_group(layout: Layout, rank: int, watch: Watch, backend: str) -> TensorGroup:
    """The group of ranks that share this rank's layers. Every rank makes the groups of all, in one
    order."""
    if layout.tensor == 1:
        return SOLO
    own = None
    for replica in range(layout.data):
        for stage in range(layout.pipeline):
            members = [
                layout.rank_at(Coordinates(replica, stage, tensor))
                for tensor in range(layout.tensor)
            ]
            made = dist.new_group(members, timeout=TO_LOAD, backend=backend)
            if rank in members:
                own = _over(made, watch, backend)
    assert own is not None
    return own


def _over(group: dist.ProcessGroup, watch: Watch, backend: str) -> TensorGroup:
    if backend == "gloo":
        return ProcessGroup(group, watch)
    from hydraspec.parallel.symmetric import SymmetricGroup

    device = torch.device("cuda", torch.cuda.current_device())
    # Sooner than the hosts' limit, as devices know which rank they wait for.
    found = SymmetricGroup(group, device, wait_s=watch.timeout_s * 2 / 3)
    watch.look_at_device = found.check
    return found

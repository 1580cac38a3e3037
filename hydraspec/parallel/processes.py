"""The ranks of a run as processes: how they find each other, and the groups they form.

`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT` in the environment say which
rank a process is; our own launcher sets them, and torchrun does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from hydraspec.parallel.control import Control
from hydraspec.parallel.group import SOLO, ProcessGroup, TensorGroup, leave_out_multicast
from hydraspec.parallel.layout import Coordinates, Layout
from hydraspec.parallel.ranks import Ranks, acting_as
from hydraspec.parallel.stages import link_stages
from hydraspec.parallel.watch import Watch

TO_START = timedelta(minutes=5)  # for the slowest rank's imports
TO_LOAD = timedelta(minutes=30)  # between two ranks that enter a collective; `Watch` is quicker
PORT = "port"  # file with the port of the first rank's store
LOOPBACK = "lo"


def local_store(shared: Path, rank: int, num_ranks: int) -> TCPStore:
    """The store of ranks on one host; the first rank holds it, at a port that was free.

    Raises:
        TimeoutError: the first rank did not say its port.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    file = shared / PORT
    if rank == 0:
        store = TCPStore(
            *("127.0.0.1", 0, num_ranks), is_master=True, timeout=TO_START, wait_for_workers=False
        )
        port = str(store.port)
        part = file.with_suffix(".part")
        part.write_text(port, encoding="utf-8")
        part.rename(file)
    else:
        until = time.monotonic() + TO_START.total_seconds()
        while not file.is_file():
            if time.monotonic() > until:
                raise TimeoutError(f"rank 0 did not start within {TO_START}")
            time.sleep(0.02)
        port = file.read_text(encoding="utf-8")
        store = TCPStore("127.0.0.1", int(port), num_ranks, timeout=TO_START)
    os.environ["MASTER_PORT"] = port
    return store


@contextmanager
def joined(
    layout: Layout, rank: int, store: Store, watch: Watch, *, on_cuda: bool
) -> Iterator[Ranks]:
    """Form the groups of this run for a while, in which `current()` is this rank.

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
    """The ranks that share this one's layers. Every rank makes the groups of all, in one order."""
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

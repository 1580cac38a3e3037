"""What ranks of torchrun tell each other of their processes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import torch.distributed as dist

from hydraspec.parallel import hosts, torchrun
from hydraspec.parallel.faults import Kind
from hydraspec.parallel.hosts import this_process


def signs_of(store: dist.HashStore, rank: int) -> torchrun._Signs:
    return torchrun._Signs(store, rank, 2, torchrun._StoreRecords(store))


def test_a_rank_that_was_killed_is_named_at_once() -> None:
    """Catches a wait of ten seconds for its signs of life, in which torchrun's interrupt comes."""
    store = dist.HashStore()
    first, second = signs_of(store, 0), signs_of(store, 1)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = hosts._stat(process.pid)[1]
        second._process = replace(this_process(), pid=process.pid, started=started)
        second.own.num_steps = 7
        second.own.tick()
        second.publish()
        first.publish()
        assert not first._records.all()
        process.kill()
    first.record_gone()
    (fault,) = first._records.all()
    assert (fault.kind, fault.rank) == (Kind.ended, 1)
    assert str(fault).startswith("rank 1 of 2 was killed or has exited in step 7: torchrun's")

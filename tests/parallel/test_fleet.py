"""What ranks tell each other of their processes, through their store."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch.distributed as dist

from hydraspec.parallel import fleet as fleets
from hydraspec.parallel import hosts
from hydraspec.parallel.faults import Kind
from hydraspec.parallel.fleet import Fleet
from hydraspec.parallel.hosts import this_process
from hydraspec.parallel.launch import PARENT
from hydraspec.parallel.progress import Signs


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """The first of two ranks without a parent; it holds the store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.delenv(PARENT, raising=False)
    monkeypatch.setattr(fleets, "rendezvous", lambda *_, **__: iter([(store, 0, 2)]))
    return Fleet(0, 2)


def test_a_rank_that_was_killed_is_named_at_once(fleet: Fleet) -> None:
    """Catches a wait of ten seconds for its signs of life, in which torchrun's interrupt comes."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = hosts._stat(process.pid)[1]
        other = replace(this_process(), pid=process.pid, started=started)
        fleet.board.post(1, Signs(steps=7), other)
        assert fleet.fault() is None
        process.kill()
    fault = fleet.fault()
    fleet.close()
    assert fault is not None
    assert (fault.kind, fault.rank) == (Kind.ended, 1)
    assert str(fault).startswith("rank 1 of 2 was killed or has exited in step 7: torchrun's")


def test_jobs_are_told_in_order_until_the_end(fleet: Fleet) -> None:
    fleet.announce("first")
    assert fleet.next_job() == "first"
    fleet._number += 1
    fleet.end()
    assert fleet.next_job() == ""

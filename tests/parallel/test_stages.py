"""What stages in processes of their own hand over, on a CPU."""

from __future__ import annotations

import multiprocessing
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hydraspec.parallel import watch
from hydraspec.parallel.layout import Layout
from hydraspec.parallel.stages import ProcessLink, link_stages
from hydraspec.parallel.watch import Watch

NUM_SENT = 5
SLICE = timedelta(seconds=0.4)
PAUSE_S = 2.5 * SLICE.total_seconds()
LIMIT_S = 40.0


def late_stage(rank: int, late: int, store: str, said: Any) -> None:
    """Sends or receives numbers and results; stage `late` pauses before."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    link = link_stages(
        *(Layout(pipeline=3), rank, Watch(rank, 3)), backend="gloo", timeout=timedelta(seconds=30)
    )
    assert isinstance(link, ProcessLink)
    x, found = torch.zeros(4), []
    for number in range(NUM_SENT):
        if number == 2 and rank == late:
            time.sleep(PAUSE_S)
        if rank > 0:
            link.receive(x)
        if rank < 2:
            link.send(x + 1 if rank else torch.full((4,), 10.0 * number))
        else:
            link.send_results(x + 1)
            found.append(x.tolist())
    if rank < 2:
        for _ in range(NUM_SENT):
            link.receive_results(x)
            found.append(x.tolist())
    until = time.monotonic() + 5.0
    while link._under_way and time.monotonic() < until:
        link._keep(None, x)
    said.put((rank, found, len(link._under_way)))
    dist.destroy_process_group()


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("late", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stage_waits_for_one_that_is_late(
    late: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than a slice of a wait, after which faults are looked at; and what has been sent is
    not kept."""
    monkeypatch.setattr(watch, "SLICE", SLICE)
    context = multiprocessing.get_context("fork")  # of this process, which has torch
    said = context.Queue()
    stages = [
        context.Process(target=late_stage, args=(rank, late, str(tmp_path / "store"), said))
        for rank in range(3)
    ]
    for stage in stages:
        stage.start()
    try:
        found = {
            rank: (seen, kept) for rank, seen, kept in (said.get(True, LIMIT_S) for _ in stages)
        }
    finally:
        for stage in stages:
            stage.join(5.0)
            stage.kill()
    sent = [[10.0 * number + 1] * 4 for number in range(NUM_SENT)]
    results = [[number + 1 for number in row] for row in sent]
    assert found == {0: (results, 0), 1: (results, 0), 2: (sent, 0)}

"""The parent of ranks: which fault it names, how soon, and that no process is left.

The ranks are processes without an engine (support/faulty_rank.py), in most tests forks of this one,
as importing torch takes longer than what they do.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import faulty_rank
import forked
import pytest
from grids import slow_unless

from hydraspec.parallel import launch
from hydraspec.parallel.faults import Kind
from hydraspec.parallel.launch import Ended, run_ranks

TIMEOUT_S = 3.0  # of a step that takes 0.02 s
ENDS_WITHIN_S = 12.0  # once the ranks have started


def run(folder: Path, told: str, num_ranks: int = 2) -> Ended:
    shared = folder / "shared"
    shared.mkdir()
    return run_ranks(
        [sys.executable, faulty_rank.__file__, str(shared), told],
        num_ranks,
        job="a job",
        logs=folder / "ranks",
        timeout_s=TIMEOUT_S,
        environment=os.environ,
    )


@pytest.fixture
def _forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of ranks are forks of this one, which has imported what they import."""
    import hydraspec.parallel.fleet  # noqa: F401

    monkeypatch.setattr(subprocess, "Popen", forked.popen(faulty_rank.main))


forks = pytest.mark.usefixtures("_forks")


def since_start(folder: Path) -> float:
    """Seconds since the first rank had its connection to the others."""
    return time.time() - (folder / "shared" / "started").stat().st_mtime


def none_is_left(folder: Path) -> bool:
    pids = [int(file.read_text()) for file in (folder / "shared").glob("pid-*")]
    return bool(pids) and all(faulty_rank.is_gone(pid) for pid in pids)


def saved(folder: Path, rank: int = 0) -> str:
    file = folder / "shared" / f"saved-{rank}"
    return file.read_text() if file.exists() else ""


def test_ranks_that_end_well(tmp_path: Path) -> None:
    assert run(tmp_path, "9:0:none", num_ranks=3) == Ended(fault=None, interrupted=False)
    assert [saved(tmp_path, rank) for rank in range(3)] == ["done"] * 3
    assert none_is_left(tmp_path)


FAULTS = (
    ("raise", Kind.error, "failed in step 7: ValueError: the seventh head is missing"),
    ("memory", Kind.error, "failed in step 7: MemoryError: out of memory: 20 GiB asked for"),
    ("kill", Kind.ended, "was killed by SIGKILL in step 7: the system does that where memory"),
    ("exit", Kind.ended, "ended with exit status 7 in step 7"),
    ("stop", Kind.hung, "gave no sign of life for 2 s in step 7: it was stopped (SIGSTOP)"),
    ("spin", Kind.hung, "made no progress for 3 s in step 7: where steps take so long raise"),
)
# Each rank ends in two of the four ways that differ for the parent.
QUICK_FAULTS = {("raise", 1), ("kill", 0), ("stop", 0), ("spin", 1)}


@forks
@pytest.mark.parametrize(
    ("fault", "kind", "said", "rank"),
    slow_unless(
        lambda fault, kind, said, rank: (fault, rank) in QUICK_FAULTS,
        [(*fault, rank) for fault in FAULTS for rank in (0, 1)],
    ),
)
def test_the_rank_that_failed_is_named(
    tmp_path: Path, rank: int, fault: str, kind: Kind, said: str
) -> None:
    """Catches a survivor's lost connection being named, a wait without end, and a rank that is left
    with its device's memory."""
    found = run(tmp_path, f"{rank}:7:{fault}").fault
    assert since_start(tmp_path) < ENDS_WITHIN_S
    assert found is not None
    assert (found.kind, found.rank, found.step) == (kind, rank, 7)
    assert str(found).startswith(f"rank {rank} of 2 {said}")
    assert none_is_left(tmp_path)
    if rank:  # the first one saves, and knows why the run ends
        assert f"rank 1 of 2 {said}" in saved(tmp_path)
    log = (tmp_path / "ranks" / "rank1.log").read_text()
    assert ("said by rank 1" in log) == (rank == 0 or fault in ("raise", "memory"))


@forks
def test_a_rank_that_imports_for_long_is_no_stopped_one(tmp_path: Path) -> None:
    ended = run(tmp_path, "0:0:import", num_ranks=1)  # others would wait for it in their step
    assert ended == Ended(fault=None, interrupted=False)
    assert none_is_left(tmp_path)


@forks
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("stop", "gave no sign of life for 2 s before its first step: it was stopped (SIGSTOP)"),
        ("kill", "was killed by SIGKILL before its first step"),
        ("raise", "failed before its first step: ValueError: the seventh head is missing"),
    ],
)
def test_a_rank_that_fails_before_its_first_step_is_found_as_soon(
    tmp_path: Path, fault: str, said: str
) -> None:
    found = run(tmp_path, f"1:0:{fault}").fault
    assert since_start(tmp_path) < ENDS_WITHIN_S
    assert str(found).startswith(f"rank 1 of 2 {said}")
    assert none_is_left(tmp_path)


@forks
def test_a_mistake_of_every_rank_is_one(tmp_path: Path) -> None:
    found = run(tmp_path, "*:1:mistake", num_ranks=3).fault
    assert found is not None
    assert (found.kind, found.exit_code) == (Kind.mistake, 2)
    assert found.why == "parallelism.tensor=2 does not divide 3 heads"


@contextmanager
def interrupted_at(file: Path) -> Iterator[None]:
    """An interrupt of this process once the file exists."""

    def interrupt() -> None:
        while not file.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)  # there may be no such file
    thread.start()
    yield
    thread.join()


@forks
def test_an_interrupt_reaches_the_first_rank_once(tmp_path: Path) -> None:
    with interrupted_at(tmp_path / "shared" / "at-1-5"):
        ended = run(tmp_path, "9:0:none")
    assert ended.interrupted
    assert saved(tmp_path) == "interrupted"
    assert none_is_left(tmp_path)


@forks
def test_an_interrupt_does_not_wait_for_a_rank_that_waits_for_the_first(tmp_path: Path) -> None:
    """Catches Ctrl-C while ranks start, after which they waited a minute for rank 0's port."""
    with interrupted_at(tmp_path / "shared" / "at-0-1"):
        ended = run(tmp_path, "1:0:late")
    assert since_start(tmp_path) < ENDS_WITHIN_S
    assert ended == Ended(fault=None, interrupted=True)
    assert saved(tmp_path) == "interrupted"
    assert none_is_left(tmp_path)


@forks
def test_a_first_rank_that_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a run that never ends as its first rank waits for a device that spins."""
    monkeypatch.setattr(launch, "TO_SAVE_S", 0.2)
    monkeypatch.setattr(launch, "TO_END_S", 0.4)
    found = run(tmp_path, "0:7:spin").fault
    assert found is not None
    assert found.rank == 0
    assert none_is_left(tmp_path)

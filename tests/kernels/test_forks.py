"""Forked processes that compile: every call once, and none of them is left, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from hydraspec_kernels.runtime import forks


def touch_in_turn(folder: Path, number: int) -> None:
    """Fails for every third: the others must not miss it."""
    if number % 3 == 2:
        raise ValueError(number)
    (folder / f"{number}").write_text(str(os.getpid()))


def test_forks_make_every_call_once_and_drop_errors(tmp_path: Path) -> None:
    forks.run_in_forks([partial(touch_in_turn, tmp_path, n) for n in range(300)], 3, 60.0)
    done = {int(path.name): path.read_text() for path in tmp_path.iterdir()}
    assert sorted(done) == [n for n in range(300) if n % 3 != 2]
    assert str(os.getpid()) not in done.values()


def test_a_fork_that_hangs_is_ended(tmp_path: Path) -> None:
    started = time.monotonic()
    calls = [partial(time.sleep, 600.0), partial(touch_in_turn, tmp_path, 0)]
    forks.run_in_forks(calls, 2, 1.0)
    assert time.monotonic() - started < 60
    assert (tmp_path / "0").exists()


INTERRUPTED = """
import atexit, subprocess, sys
from hydraspec_kernels.runtime.forks import run_in_forks

atexit.register(print, "ended")
sys.stdout.write("buffered ")
sys.stderr.write("started")
sys.stderr.flush()
try:
    run_in_forks([lambda: subprocess.check_call(["sleep", "99"])] * 8, 4, 60.0)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_an_interrupt_ends_all_processes_once() -> None:
    """Closed pipes show that no process is left, and the output that children end at once."""
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    assert process.stderr.read(7) == b"started"
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out == b"buffered ended\n"
    assert not err


def test_a_fork_ends_with_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 1)
    forks.run_in_forks([partial(touch_in_turn, tmp_path, 0)], 1, 60.0)
    assert not any(tmp_path.iterdir())


def test_fewer_forks_than_wanted_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork, made = os.fork, []

    def second_fails() -> int:
        if made:
            raise BlockingIOError("no more processes")
        made.append(fork())
        return made[0]

    monkeypatch.setattr(os, "fork", second_fails)
    forks.run_in_forks([partial(touch_in_turn, tmp_path, n) for n in range(6)], 3, 60.0)
    assert len(list(tmp_path.iterdir())) == 4


def test_without_forks_no_call_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    forks.run_in_forks([partial(touch_in_turn, tmp_path, 0)], 1, 1.0)
    assert not any(tmp_path.iterdir())

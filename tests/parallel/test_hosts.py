"""What is known of a process by its number, and of one of another host."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hydraspec.parallel import hosts
from hydraspec.parallel.hosts import Process, this_process

pytestmark = pytest.mark.skipif(not Path("/proc/self/ns/pid").exists(), reason="no /proc here")


def other(pid: int) -> Process:
    return replace(this_process(), pid=pid, started=hosts._stat(pid)[1])


def test_a_process_is_stopped_and_then_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        named = Process.of_text(str(other(process.pid)))
        assert not named.is_gone()
        assert not named.is_stopped()
        process.send_signal(signal.SIGSTOP)
        until = time.monotonic() + 10
        while not named.is_stopped():
            assert time.monotonic() < until
            time.sleep(0.01)
        assert not named.is_gone()
        named.kill()
        while not named.is_gone():  # before it is reaped
            assert time.monotonic() < until
            time.sleep(0.01)
    assert process.returncode == -signal.SIGKILL
    assert named.is_gone()


def test_processes_with_the_same_number_are_told_apart() -> None:
    """Catches a SIGKILL of a process of another host's number."""
    own = this_process()
    assert not own.is_gone()
    assert replace(own, started="1").is_gone()  # the number is another one's now
    elsewhere = replace(own, host="another", started="1")
    elsewhere.kill()
    assert not elsewhere.is_gone()


def test_without_proc_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hosts, "PROC", tmp_path)
    hosts._host.cache_clear()
    try:
        own = Process.of_text(str(this_process()))
        own.kill()
        assert not own.is_gone()
        assert not own.is_stopped()
    finally:
        hosts._host.cache_clear()

"""What comes from outside: SIGTERM, second and third interrupts, readers that leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
from rich.console import Console

from hydraspec.lab.surroundings import (
    interrupts_held_back,
    output_may_be_cut,
    terminations_as_interrupts,
)


def test_a_termination_is_an_interrupt_once() -> None:
    """Another must not cut the saving short; and it is the command line's only."""
    before = signal.getsignal(signal.SIGTERM)
    with terminations_as_interrupts():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_termination_waits_for_whole_files() -> None:
    steps = []

    def write() -> None:
        with interrupts_held_back():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
                signal.raise_signal(number)
                steps.append(number)

    with terminations_as_interrupts(), pytest.raises(KeyboardInterrupt):
        write()
    assert len(steps) == 3


def test_who_ignores_terminations_goes_on() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with terminations_as_interrupts(), interrupts_held_back():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_get_no_signals() -> None:
    ended = []

    def work() -> None:
        with terminations_as_interrupts(), interrupts_held_back():
            ended.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended == [signal.getsignal(signal.SIGTERM)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_fork_ends_at_a_termination() -> None:
    """It would go on as another parent."""
    program = """
import os, signal
from hydraspec.lab.surroundings import terminations_as_interrupts
with terminations_as_interrupts():
    child = os.fork()
    if not child:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{128 + signal.SIGTERM}\n", "")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_run_outlives_the_reader_of_its_output(stream: str) -> None:
    """Rich would leave with status 1, print with an error, Python with 120 at its end."""
    program = f"""
import sys
from rich.console import Console
from hydraspec.lab.surroundings import output_may_be_cut
with output_may_be_cut():
    sys.stdin.readline()
    for _ in range(2):
        Console(stderr={stream == "stderr"}).print("x" * 100)
        print("y" * 100, file=sys.{stream})
    print("z", file=sys.{stream})
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    left, kept = (process.stdout, process.stderr)[:: 1 if stream == "stdout" else -1]
    assert left is not None
    assert kept is not None
    assert process.stdin is not None
    left.close()
    process.stdin.write("\n")
    process.stdin.close()
    assert kept.read() == ""
    assert process.wait() == 0
    kept.close()


def test_a_process_without_output_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", None)
        with output_may_be_cut():
            Console().print("x")

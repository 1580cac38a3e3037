"""Signals and standard streams: SIGTERM, repeated interrupts, output that cannot be written."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from hydraspec.signals import (
    interrupts_held_back,
    interrupts_stay_interrupts,
    output_may_be_cut,
    terminations_as_interrupts,
)


def test_a_termination_is_an_interrupt_once() -> None:
    """A second one must not cut saving short; the handler is removed afterwards."""
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


def test_terminations_that_were_ignored_stay_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with terminations_as_interrupts(), interrupts_held_back():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupts_wait_for_imports(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of importing torch or numpy they abort the process (134), or are swallowed."""
    name = f"imported_under_{number}"
    source = f"import signal\nsignal.raise_signal({number})\nfor _ in range(9): finished = _"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    signal.signal(number, signal.SIG_DFL)  # nohup ignores one of them
    with terminations_as_interrupts():
        finished, began = importlib.import_module(name).finished, time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            time.sleep(60)
    assert finished == 8
    assert time.monotonic() - began < 30, "it waited for the sleep to end"


def test_an_error_of_an_interrupted_library_is_raised_as_the_interrupt() -> None:
    """argparse, interrupted, raises an AttributeError while it cleans up."""

    def parse() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise AttributeError("save_nargs")

    with pytest.raises(KeyboardInterrupt), interrupts_stay_interrupts():
        parse()
    with pytest.raises(AttributeError), interrupts_stay_interrupts():
        raise AttributeError("a bug")


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
    """Catches a forked child that runs its parent's cleanup."""
    program = """
import os, signal
from hydraspec.signals import terminations_as_interrupts
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
    """Rich would exit with status 1, print would raise, and Python would exit with status 120."""
    program = f"""
import sys
from rich.console import Console
from hydraspec.signals import output_may_be_cut
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


@pytest.mark.parametrize("where", [">/dev/full", ">&-", "2>&-", ">&- 2>&-", "2>/dev/full"])
def test_a_process_outlives_an_output_that_cannot_be_written(where: str, tmp_path: Path) -> None:
    """Catches status 120 or 1 of a full disk, and files that get the number of a closed stdout."""
    if "full" in where and not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, logging\n"
        "from rich.console import Console\n"
        "from hydraspec.signals import output_may_be_cut\n"
        "with output_may_be_cut():\n"
        "    with open(sys.argv[1], 'w') as file:\n"
        "        for _ in range(2):\n"
        "            Console().print('x' * 100)\n"
        "            logging.error('y' * 100)\n"
        "            os.system('echo z; echo z >&2')\n"
        "        file.write('whole')\n"
    )
    line = f'"{sys.executable}" "{program}" "{tmp_path}/file" {where}'
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert (tmp_path / "file").read_text() == "whole"


def test_a_process_without_output_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", None)
        with output_may_be_cut():
            Console().print("x")

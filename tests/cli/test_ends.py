"""Processes that are interrupted, and ones whose output nobody reads."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TYPED = ["tracker=none", "hydra.run.dir=run"]


def start(*argv, cwd):
    return subprocess.Popen(
        [sys.executable, "-m", "hydraspec", *TYPED, *argv],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_termination_saves_what_was_finished(tmp_path):
    """Catches results lost when a container is stopped."""
    process = start("workload.limit=12", "sampling.max_tokens=48", cwd=tmp_path)
    while "round 2" not in process.stdout.readline():
        assert process.poll() is None
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert errors.endswith("hydraspec: interrupted: what was finished is saved\n")
    assert '"status": "interrupted"' in (tmp_path / "run" / "summary.json").read_text()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_an_interrupt_before_anything_was_finished_says_so(tmp_path, number):
    """A second interrupt, while the process ends, adds no traceback."""
    process = start(cwd=tmp_path)
    line = process.stderr.readline()  # of the engine that loads
    process.send_signal(number)
    while line and not line.startswith("hydraspec: "):
        line = process.stderr.readline()
    process.send_signal(number)
    _, errors = process.communicate()
    assert (process.returncode, line) == (130, "hydraspec: interrupted: nothing was finished\n")
    assert errors == ""
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left == {"config.yaml", "overrides.yaml"}


def test_a_benchmarks_process_ends_with_it(tmp_path):
    """It may hold the memory of a device."""
    bench = ["bench=decode", "bench.engines=[native]", "bench.methods=[none]", "bench.batches=[1]"]
    process = start(*bench, "bench.output_tokens=64", "bench.repeats=200", cwd=tmp_path)
    log = tmp_path / "run" / "native-none" / "log.txt"
    while not log.is_file() or "loaded in" not in log.read_text():
        assert process.poll() is None
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.is_file():
        pytest.skip("no /proc here")
    child = children.read_text().split()[-1]
    process.terminate()
    process.communicate()
    assert process.returncode == 130
    assert not Path(f"/proc/{child}").exists()


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path):
    process = start("workload.limit=2", "sampling.max_tokens=16", cwd=tmp_path)
    process.stdout.close()
    errors = process.stderr.read()
    assert (process.wait(), "Error" in errors) == (0, False)
    process.stderr.close()
    assert (tmp_path / "run" / "report.html").is_file()

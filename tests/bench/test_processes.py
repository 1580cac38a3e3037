"""The processes of a benchmark: interrupts save what was finished, no process outlives its
time, and what it said last is its reason."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from bench_runs import in_process, run_bench
from fake_engine import FakeEngine

from hydraspec.bench import decode as bench_decode
from hydraspec.bench import measure as bench_measure
from hydraspec.bench import run as bench
from hydraspec.config.schema import RunConfig
from hydraspec.types import Request


@pytest.mark.parametrize("during", ["a batch", "the first batch"])
def test_an_interrupt_leaves_what_was_finished(
    build: list[FakeEngine],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    during: str,
) -> None:
    """Of a process, finished parts and the batches of the one it cut short; nothing else starts."""
    told = in_process(monkeypatch, {})
    time_batch, batches = bench_decode._time_batch, []

    def interrupted(config: RunConfig, engine: FakeEngine, batch: int) -> Any:
        batches.append(batch)
        if len(batches) == (4 if during == "a batch" else 3):
            raise KeyboardInterrupt
        return time_batch(config, engine, batch)

    monkeypatch.setattr(bench_decode, "_time_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_bench(tmp_path)
    saved = json.loads((tmp_path / "run" / "bench.json").read_text())
    assert [name for name, *_ in told] == ["native-none", "vllm-none"]
    assert saved["status"] == "interrupted"
    assert [part["status"] for part in saved["parts"]] == ["ok", "interrupted"]
    wanted = [1] if during == "a batch" else []
    assert [row["batch"] for row in saved["parts"][1]["rows"]] == wanted
    said = "after 1 of 2 batch sizes" if wanted else "before a batch size was finished"
    assert f"vllm, none interrupted: {said}" in capsys.readouterr().out
    assert said in (tmp_path / "run" / "bench.html").read_text()
    assert all(engine.closed for engine in build)


def test_an_interrupt_in_this_process_keeps_its_batches(
    build: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also one while nvidia-smi is asked, when every batch is done."""

    def interrupted(engine: FakeEngine, requests: list[Request]) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_measure, "_clocks_under_load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_bench(
            tmp_path,
            "method=none",
            "bench.isolate=false",
            "bench.engines=[native]",
            "bench.methods=[none]",
        )
    saved = json.loads((tmp_path / "run" / "bench.json").read_text())
    assert (saved["status"], saved["parts"][0]["status"]) == ("interrupted", "interrupted")
    assert [row["batch"] for row in saved["parts"][0]["rows"]] == [1, 2]


def test_a_process_hears_of_an_interrupt_and_may_save(tmp_path: Path) -> None:
    """It leads another session, which a Ctrl-C of the terminal does not reach."""
    log = tmp_path / "log.txt"
    program = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "try:\n print('up', flush=True); time.sleep(60)\n"
        "except KeyboardInterrupt:\n time.sleep(0.2); print('saved', flush=True)"
    )

    def press() -> None:
        while "up" not in log.read_text():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    log.touch()
    keyboard = threading.Thread(target=press)
    keyboard.start()
    with pytest.raises(KeyboardInterrupt):
        bench._wait([sys.executable, "-c", program], log, dict(os.environ), 60)
    keyboard.join()
    assert log.read_text() == "up\nsaved\n"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("hydraspec: no device\n  to do: take one\nbye\n", "no device; to do: take one; bye"),
        ("Traceback\nacme.LoadError: no file\n[rank0] Warning: Error\n", "acme.LoadError: no file"),
        ("[rank0]: LoadError: no file\n[rank0]:[W1] Warning: no\n", "LoadError: no file"),
        ("(Worker_TP0 pid=4) ERROR 11-23 [a.py:9] LoadError: x\nException: y\n", "LoadError: x"),
        ("one\ntwo\n", "two"),
        ("", "it said nothing"),
    ],
)
def test_the_last_words_of_a_log_are_the_error(tmp_path: Path, log: str, words: str) -> None:
    (tmp_path / "log.txt").write_text(log)
    assert bench._last_words(tmp_path / "log.txt") == words


def test_a_process_and_its_children_end_at_the_time_limit(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    program = "import os, sys; print(os.environ['A']); sys.exit(3)"
    environment = {**os.environ, "A": "b"}
    assert bench._wait([sys.executable, "-c", program], log, environment, 60) == 3
    assert log.read_text() == "b\n"
    program = (
        "import subprocess, sys, time; c = subprocess.Popen(['sleep', '60']);"
        "print(c.pid, flush=True); time.sleep(60)"
    )
    assert bench._wait([sys.executable, "-c", program], log, environment, 2) is None
    child = int(log.read_text())
    deadline = time.monotonic() + 60
    while _runs(child):
        assert time.monotonic() < deadline, "what the process started outlives it"
        time.sleep(0.1)


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state.rpartition(")")[2].split()[0] != "Z"

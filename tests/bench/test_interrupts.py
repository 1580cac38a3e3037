"""Benchmarks that are interrupted: what was finished is saved, and no process outlives it."""

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

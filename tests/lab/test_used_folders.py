"""A folder that is used again: who is refused takes nothing away, who runs replaces it whole."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_runs import SMALL, in_process, run_bench
from fake_engine import FakeEngine

from hydraspec.bench import run as bench
from hydraspec.cli.compose import plan
from hydraspec.config.schema import RunConfig, TrackerConfig
from hydraspec.errors import CheckpointError, WorkloadError
from hydraspec.lab import run as run_module
from hydraspec.lab import tracking
from hydraspec.lab.folder import RunFolder
from hydraspec.metrics.sinks import Sink
from hydraspec.metrics.tracker import TrackerOptions

Use = Callable[[FakeEngine], FakeEngine]
Run = Callable[[], dict[str, Any]]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("refusal", ["workload", "vocabulary", "checkpoint", "interrupt"])
def test_a_run_that_is_refused_leaves_the_results_of_the_older(
    config: RunConfig,
    use_engine: Use,
    run_config: Run,
    tmp_path: Path,
    workload_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    refusal: str,
) -> None:
    use_engine(FakeEngine())
    run_config()
    before = contents(tmp_path / "run")
    config.seed = 7
    expected: type[BaseException] = WorkloadError
    if refusal == "workload":
        config.workload.path = str(tmp_path / "nowhere")
    elif refusal == "vocabulary":
        workload_file.write_text('{"prompt_token_ids": [64]}\n', encoding="utf-8")
    else:
        expected = CheckpointError if refusal == "checkpoint" else KeyboardInterrupt

        def build_engine(config: RunConfig) -> FakeEngine:
            raise expected("cut off")

        monkeypatch.setattr(run_module.factory, "build_engine", build_engine)
    with pytest.raises(expected):
        run_config()
    assert contents(tmp_path / "run") == before


def test_a_refused_run_leaves_its_configuration_in_a_new_folder(
    run_config: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a run ended while it loads (memory, a node) that no file records."""

    def build_engine(config: RunConfig) -> FakeEngine:
        raise CheckpointError("cut off")

    monkeypatch.setattr(run_module.factory, "build_engine", build_engine)
    with pytest.raises(CheckpointError):
        run_config()
    assert contents(tmp_path / "run").keys() == {"config.yaml", "overrides.yaml"}


def test_a_benchmark_writes_its_configuration_before_it_measures(
    build: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: list[set[str]] = []

    def parts(*arguments: object) -> list[dict[str, Any]]:
        found.append(set(contents(tmp_path / "run")))
        return []

    monkeypatch.setattr(bench, "_parts", parts)
    run_bench(tmp_path)
    assert found == [{"config.yaml", "overrides.yaml"}]


def test_a_tracker_starts_after_the_older_files_are_removed(
    config: RunConfig,
    use_engine: Use,
    run_config: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Catches the older run's wandb/ cleared away with what the new one has already written."""
    use_engine(FakeEngine())
    run_config()
    (tmp_path / "run" / "wandb" / "old").mkdir(parents=True)
    config.tracker = TrackerConfig(name="wandb")
    started: list[list[str]] = []

    class Starting(Sink):
        def __init__(self, options: TrackerOptions, *_: object) -> None:
            assert options.name == "tiny_fake-gemma4_mtp-3"
            started.append(sorted(path.name for path in (tmp_path / "run").iterdir()))

        def add_config(self, **facts: object) -> None:
            """As the tracker's."""

        def wait_until_ready(self) -> None:
            """As the tracker's."""

    monkeypatch.setattr(tracking, "WandbSink", Starting)
    use_engine(FakeEngine())
    run_config()
    assert started == [["config.yaml", "env.json", "overrides.yaml"]]


def test_replacing_is_said_in_one_line(
    use_engine: Use, run_config: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hydraspec.lab.folder")
    for count in range(2):
        use_engine(FakeEngine())
        run_config()
        said = [record.getMessage() for record in caplog.records]
        assert said == [f"{tmp_path / 'run'}: the files of an older run are replaced"] * count


def test_the_configuration_is_as_old_as_the_run(tmp_path: Path) -> None:
    """What a run read is known to be older; loading took a while since."""
    RunFolder(tmp_path, {}, []).write_environment({"versions": {"hydraspec": "0"}})
    folder, opened = RunFolder(tmp_path, {}, []), time.time()
    time.sleep(0.05)
    folder.replace_older_run()
    assert (tmp_path / "config.yaml").stat().st_mtime <= opened


def test_a_run_replaces_a_benchmark(
    build: list[FakeEngine],
    use_engine: Use,
    run_config: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    in_process(monkeypatch, {})
    run_bench(tmp_path)
    use_engine(FakeEngine())
    run_config()
    assert contents(tmp_path / "run").keys().isdisjoint({"bench.json", "bench.html"})


def test_a_benchmark_that_measures_nothing_leaves_the_older(
    build: list[FakeEngine],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    in_process(monkeypatch, {})
    run_bench(tmp_path)
    before = contents(tmp_path / "run")
    part = (tmp_path / "run" / "native-none" / "bench.json").read_bytes()
    in_process(monkeypatch, {"native-none": bench.STOPPED, "vllm-none": 3})
    typed = ["bench=decode", *SMALL, "bench.methods=[none]"]
    result = bench.run(plan(typed).jobs[0].config, run_dir=tmp_path / "run", overrides=typed)
    assert result["status"] == "failed"
    assert [part["rows"] for part in result["parts"]] == [[], []]
    assert contents(tmp_path / "run") == before
    assert (tmp_path / "run" / "native-none" / "bench.json").read_bytes() == part
    assert "nothing was measured" in caplog.text


def test_figures_are_shown_where_the_page_cannot_be_written(
    use_engine: Use,
    run_config: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(folder: RunFolder, page: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder.path / "report.html"))

    monkeypatch.setattr(RunFolder, "write_report", full)
    use_engine(FakeEngine())
    with pytest.raises(OSError, match="No space left"):
        run_config()
    assert (tmp_path / "run" / "summary.json").is_file()
    printed = capsys.readouterr().out
    assert "acceptance length" in printed
    assert "Report:" not in printed

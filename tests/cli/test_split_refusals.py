"""Splits that a target cannot have: refused before a rank loads, as the ranks refuse them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Command

import hydraspec
from hydraspec import factory
from hydraspec.cli import main as cli
from hydraspec.cli import ranks, report
from hydraspec.cli.compose import plan
from hydraspec.config import RunConfig
from hydraspec.engine import splits
from hydraspec.errors import ConfigurationError, UserError
from hydraspec.models.checkpoint import reader
from hydraspec.parallel.launch import Ended
from hydraspec.shipped import ZOO

QUICK = ["tracker=none", "engine.device=cpu", "workload.limit=2", "sampling.max_tokens=4"]

TENSOR = ["method=none", "parallelism.tensor=3"]
STAGES = ["method=none", "parallelism.pipeline=100"]
# Layers 10 to 13 of 14 read KV of layers 8 and 9.
BORDER = ["target=tiny_gemma4_e", "parallelism.pipeline=2", "parallelism.pipeline_layers=[10,4]"]
SHAPE = ["target=gemma4_31b", "target.weights=random", "method=none", "parallelism.tensor=6"]
WHOLE = ["method=none", "parallelism.data=2", "parallelism.pipeline_layers=[6]"]


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_ranks(*_: object, meanwhile: Callable[[], None], **__: object) -> None:
        meanwhile()
        raise AssertionError("the ranks go on")

    monkeypatch.setattr(ranks, "run_ranks", run_ranks)
    monkeypatch.setattr(ranks, "_num_cores", lambda: 1000)


def config_of(*typed: str) -> RunConfig:
    (job,) = plan([*QUICK, *typed]).jobs
    return job.config


def call(folder: Path, *typed: str) -> dict[str, Any]:
    return hydraspec.run([*QUICK, *typed, f"hydra.run.dir={folder}"], quiet=True)


def config_json(source: Path, folder: Path, **changed: object) -> Path:
    """A checkpoint folder without weights, some keys of whose text model are changed."""
    config = json.loads((source / "config.json").read_text())
    (config.get("text_config") or config).update(changed)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.usefixtures("no_ranks")
@pytest.mark.parametrize(
    ("typed", "said"),
    [
        pytest.param(TENSOR, "parallelism.tensor=3 does not divide checkpoint", id="tensor"),
        pytest.param(STAGES, "pipeline=100 does not go with the target's 16 layers", id="stages"),
        pytest.param(BORDER, "layers 10 to 13 read KV of layers from 8 on", id="border"),
        pytest.param(SHAPE, "num_attention_heads is 32", id="random weights"),
        pytest.param(WHOLE, r"\[6\] is no split of the target's 16 layers", id="one stage"),
    ],
)
def test_a_split_is_refused_while_ranks_start(tmp_path: Path, typed: list[str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        call(tmp_path, *typed)


@pytest.mark.parametrize("typed", [TENSOR, STAGES], ids=["tensor", "stages"])
def test_more_ranks_than_cores_are_refused_before_they_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, typed: list[str]
) -> None:
    """Catches a check that waits until so many processes have started: a minute for 64."""
    monkeypatch.setattr(ranks, "run_ranks", lambda *_, **__: pytest.fail("ranks start"))
    monkeypatch.setattr(ranks, "_num_cores", lambda: 2)
    with pytest.raises(ConfigurationError, match="does not"):
        call(tmp_path, *typed)


@pytest.mark.parametrize(("cores", "warned"), [(1, True), (2, False)])
def test_more_ranks_than_cores_are_warned_of_before_they_start(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    cores: int,
    warned: bool,
) -> None:
    """Catches minutes without a word; and a second check of a split that was found possible."""
    said: list[str] = []
    checked: list[RunConfig] = []

    def run_ranks(*_: object, meanwhile: Callable[[], None], **__: object) -> Ended:
        meanwhile()
        said.extend(record.getMessage() for record in caplog.records)
        return Ended(fault=None, interrupted=False, result='{"summary": {"status": "ok"}}')

    monkeypatch.setattr(ranks, "run_ranks", run_ranks)
    monkeypatch.setattr(ranks, "_num_cores", lambda: cores)
    monkeypatch.setattr(factory, "check_split", checked.append)
    (job,) = plan([*QUICK, "method=none", "parallelism=dp2", f"hydra.run.dir={tmp_path}"]).jobs
    ranks.run(job, quiet=False, logs=False)
    assert len(checked) == 1
    assert [line.partition(": they")[0] for line in said] == (
        ["parallelism.data=2: 2 ranks share 1 CPU cores"] if warned else []
    )
    caplog.clear()
    said.clear()
    ranks.run(job, quiet=True, logs=False)
    assert not said


@pytest.mark.usefixtures("no_ranks")
def test_folders_are_checked_without_their_weights(tmp_path: Path) -> None:
    target = config_json(ZOO / "tiny_qwen3", tmp_path / "target", num_attention_heads=6)
    typed = ["target=custom", f"target.checkpoint={target}", "method=none"]
    with pytest.raises(ConfigurationError, match="num_attention_heads is 6"):
        call(tmp_path / "run", *typed, "parallelism.tensor=4")


@pytest.mark.usefixtures("no_ranks")
def test_an_assistant_that_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    """Catches a target whose weights are read before its drafter's config.json is."""
    source = ZOO / "tiny_gemma4-assistant"
    drafter = config_json(source, tmp_path / "drafter", num_attention_heads=6)
    with pytest.raises(ConfigurationError, match=r"drafter': num_attention_heads is 6"):
        call(tmp_path / "run", f"method.checkpoint={drafter}", "parallelism=tp4")


@pytest.mark.parametrize(
    "typed",
    [
        TENSOR,
        pytest.param(BORDER, marks=pytest.mark.slow),
        pytest.param(WHOLE, marks=pytest.mark.slow),
    ],
    ids=["tensor", "border", "one stage"],
)
def test_the_message_is_that_of_the_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, typed: list[str]
) -> None:
    told = []
    for folder in (tmp_path / "before", tmp_path / "by ranks"):
        with pytest.raises(UserError) as refused:
            call(folder, *typed)
        told.append((type(refused.value), refused.value.exit_code, str(refused.value)))
        monkeypatch.setattr(factory, "check_split", lambda config: None)
    assert told[0] == told[1]


def test_a_device_that_is_refused_as_well_is_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_few(config: RunConfig) -> None:
        raise ConfigurationError("needs 100 CUDA devices")

    monkeypatch.setattr(splits, "pick_device", too_few)
    with pytest.raises(ConfigurationError, match="needs 100 CUDA devices"):
        splits.check(config_of(*STAGES))


def test_hub_ids_and_targets_of_plugins_are_left_to_the_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches the parent downloading weights, and a plugin's loader without its weights."""
    monkeypatch.setattr(reader, "download", lambda name: pytest.fail(f"{name} is downloaded"))
    typed = ["target=custom", "method=none", "parallelism.tensor=3"]
    splits.check(config_of(*typed, "target.checkpoint=someone/model"))
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "of_a_plugin"}))
    splits.check(config_of(*typed, f"target.checkpoint={folder}"))


def command(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr(sys, "argv", ["hydraspec", *argv])
    return cli.main()


def test_other_jobs_of_a_sweep_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    started: list[int] = []

    def run_ranks(
        command: object, num_ranks: int, *, meanwhile: Callable[[], None], **_: object
    ) -> Ended:
        meanwhile()
        started.append(num_ranks)
        return Ended(fault=None, interrupted=False, result='{"summary": {"status": "ok"}}')

    monkeypatch.setattr(ranks, "run_ranks", run_ranks)
    monkeypatch.setattr(report, "compare", lambda folder: None)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # main sets it: restored afterwards
    sweep = ["-m", *QUICK, "method=none", "parallelism.tensor=3,2,6"]
    assert command(monkeypatch, *sweep, f"hydra.sweep.dir={tmp_path}") == 2
    assert started == [2]
    errors = capfd.readouterr().err
    assert errors.count("parallelism.tensor=3 does not divide") == 1
    assert errors.count("parallelism.tensor=6 does not divide") == 1


@pytest.mark.slow
def test_torchrun_tells_it_once(tmp_path: Path) -> None:
    under_way = Command(tmp_path, *QUICK, *TENSOR, torchrun=3)
    errors = under_way.wait()
    assert under_way.process.returncode != 0
    assert errors.count("hydraspec: parallelism.tensor=3 does not divide") == 1
    assert "exitcode: 2" in errors
    assert "exitcode: 1" not in errors
    assert not under_way.processes()

"""--config-dir and hydra.searchpath: choices of another folder, in single runs and sweeps."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from installed import on_path

import hydraspec
from hydraspec.cli import main
from hydraspec.cli.compose import plan
from hydraspec.config.choices import choices_of
from hydraspec.errors import ConfigurationError

TARGET = "name: mine\ncheckpoint: zoo:tiny_gemma4\ndtype: float64\ndrafters: {}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "conf's" / "target").mkdir(parents=True)
    (tmp_path / "conf's" / "target" / "mine.yaml").write_text(TARGET)
    with on_path(tmp_path):
        yield tmp_path / "conf's"


def typed(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr(sys, "argv", ["hydraspec", *argv])
    return main.main()


def test_a_place_counts_for_one_command(folder: Path) -> None:
    escaped = str(folder).replace("'", "\\'")
    config = plan([f"hydra.searchpath=['{escaped}']", "target=mine", "method=none"]).jobs[0].config
    assert (config.target.name, config.target.dtype.value) == ("mine", "float64")
    assert "mine" in choices_of("target")
    plan([])
    assert "mine" not in choices_of("target")


def test_the_flag_shows_the_choices_of_its_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = ["target=mine", "method=none", "--cfg", "job"]
    assert typed(monkeypatch, "--config-dir", str(folder), *shown) == 0
    assert "name: mine" in capsys.readouterr().out
    assert typed(monkeypatch, *shown) == 2
    assert "target=mine is no choice" in capsys.readouterr().err
    assert typed(monkeypatch, "--config-dir", str(folder), "target=mime") == 2
    assert "did you mean target=mine?" in capsys.readouterr().err


def test_help_lists_the_choices_of_the_folder(folder: Path) -> None:
    command = [sys.executable, "-m", "hydraspec", "--config-dir", str(folder), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (targets,) = re.findall(r"^target: (.*)$", done.stdout, re.MULTILINE)
    assert "mine" in targets.split(", ")
    assert "--config-dir DIR" in done.stdout


def test_sweeps_and_python_know_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["method=none", "tracker=none", "workload.limit=1", "sampling.max_tokens=2"]
    summary = hydraspec.run(
        ["target=mine", *common, f"hydra.run.dir={folder.parent}/run"], config_dir=str(folder)
    )
    assert summary["target"] == "mine"
    recorded = (folder.parent / "run" / "overrides.yaml").read_text()
    assert "hydra.searchpath" in recorded, "what it takes to run this again"
    sweep = folder.parent / "sweep"
    flags = ["-m", "--config-dir", str(folder), f"hydra.sweep.dir={sweep}"]
    assert typed(monkeypatch, *flags, *common, "target=mine,tiny_gemma4") == 0
    assert {path.parent.name for path in sweep.glob("*/summary.json")} == {"0", "1"}
    assert "hydra.searchpath" in (sweep / "0" / "overrides.yaml").read_text()


@pytest.mark.parametrize("place", ["/nowhere/at/all", "pkg://no.such.package", "s3://bucket"])
def test_a_place_that_is_no_folder_is_refused(place: str) -> None:
    with pytest.raises(ConfigurationError, match=r"hydra.searchpath=\S+ is no folder"):
        plan([f"hydra.searchpath=['{place}']"])


def test_a_file_that_ours_would_hide_is_refused(folder: Path) -> None:
    (folder / "target" / "tiny_gemma4.yaml").write_text(TARGET)
    with pytest.raises(ConfigurationError, match=r"holds target/tiny_gemma4.yaml, which the pack"):
        hydraspec.run([], config_dir=str(folder))


def test_two_lists_of_places_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"hydra\.searchpath: given twice"):
        hydraspec.run(["hydra.searchpath=['file:///tmp']"], config_dir=str(folder))

"""The gate as typed, on a CPU: a dry run, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import verify


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PART", "CELLS", "OUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(verify.signal, "signal", lambda number, handler: None)  # pytest's stay


@pytest.mark.slow  # two processes that load engines
def test_a_dry_run_goes_the_whole_way_and_leaves_the_record_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in {"PART": "cells", "CELLS": "set03,set07", "OUT": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    before = verify.device_record.read()
    counts = ["--processes", "1", "--cpu-processes", "1", "--requests", "2"]
    assert verify.main(["--device", "cpu", "--work", str(tmp_path / "work"), *counts]) == 0
    record = json.loads((tmp_path / "device.json").read_text())
    assert record["parts"] == {}
    cells = record["partial"]["cells"]["cells"]
    assert [cell["name"][:5] for cell in cells] == ["set03", "set07"]
    assert {cell["status"] for cell in cells} == {"passed"}
    assert "cells: partial, 2 of 2 cells passed" in (tmp_path / "gate.txt").read_text()
    assert verify.device_record.read() == before


@pytest.mark.parametrize(
    ("part", "typed", "said"),
    [
        ("nope", [], "PART=nope is no part"),
        ("speed", ["--device", "cpu"], "--device cpu runs no speed"),
        ("cells", ["--checkout", "/nowhere"], "holds no hydraspec/"),
        ("cells", ["--device", "cpu", "--work", str(Path(__file__).parent)], "holds other files"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_touched(
    part: str,
    typed: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("PART", part)
    assert verify.main(typed) == 2
    assert said in capsys.readouterr().out
    assert Path(__file__).is_file()


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a device and without the packages."""
    absent = {"xgrammar", "compressed_tensors"}
    real = verify.find_spec
    monkeypatch.setattr(verify, "find_spec", lambda name: None if name in absent else real(name))
    monkeypatch.setattr(verify, "_device", lambda: "a device, 1.0")


@pytest.mark.parametrize(
    ("part", "only", "typed", "needs"),
    [
        ("cells", "", [], "PART=cells needs xgrammar,"),
        ("cells", "", ["--device", "cpu"], "PART=cells needs xgrammar,"),
        ("cells", "grammar-tiny_qwen3", ["--device", "cpu"], "PART=cells needs xgrammar,"),
        ("tests", "", [], "PART=tests needs xgrammar, compressed_tensors,"),
        ("memcheck,tests", "graphs", [], "PART=tests needs xgrammar, compressed_tensors,"),
    ],
)
@pytest.mark.usefixtures("lacking")
def test_missing_packages_are_refused_before_anything_runs(
    part: str,
    only: str,
    typed: list[str],
    needs: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Catches a gate that spends minutes of a device before a cell stops for want of a package."""
    monkeypatch.setenv("PART", part)
    monkeypatch.setenv("CELLS", only)
    work = tmp_path / "work"
    assert verify.main([*typed, "--work", str(work)]) == 2
    said = capsys.readouterr().out
    assert needs in said
    assert f"not installed for {verify.sys.executable}" in said
    assert "to do: in the checkout run `make setup`" in said
    assert not work.exists()


@pytest.mark.parametrize(("part", "only"), [("cells", "set03,set07"), ("memcheck,speed", "")])
@pytest.mark.usefixtures("lacking")
def test_parts_that_need_no_package_are_not_refused(
    part: str, only: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PART", part)
    monkeypatch.setenv("CELLS", only)
    assert verify._refusal(verify._arguments(["--work", str(tmp_path / "work")])) is None

"""What jobs of several splits are called."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from studied_runs import configure, divide, edit

from hydraspec.cli.gate import main as gate
from hydraspec.comparison.runs import pool, read_run


def test_a_label_names_the_split_as_its_choice(studied: Path) -> None:
    """Catches "name=tp2, tensor=2"; settings that are no sizes stand beside it."""
    for name, check in (("two", False), ("checked", True)):
        run = divide(Path(shutil.copytree(studied / "1", studied / name)), name, time=1.0, tensor=2)
        configure(run, parallelism__check=check)
    jobs = pool([read_run(studied / name) for name in ("1", "two", "checked")])
    assert [job.label for job in jobs] == [
        "gemma4_mtp, K=3, single, check=False",
        "gemma4_mtp, K=3, tp2, check=False",
        "gemma4_mtp, K=3, tp2, check=True",
    ]


def test_a_choice_of_a_group_is_called_by_the_group(studied: Path) -> None:
    """Catches "name=vllm"."""
    configure(Path(shutil.copytree(studied / "1", studied / "other")), engine__name="vllm")
    jobs = pool([read_run(studied / name) for name in ("1", "other")])
    assert jobs[1].label == "gemma4_mtp, K=3, engine=vllm"


def test_the_gate_names_the_split_that_is_missing(
    studied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches "has no job X; allowed: X": all that tells jobs apart is in their label."""
    stored, two = str(studied / "gate.json"), studied / "two"
    divide(Path(shutil.copytree(studied / "1", two)), "tp2", time=1.0, tensor=2)
    assert gate(["--write", stored, str(studied / "1")]) == 0
    assert gate([stored, str(two)]) == 2
    said = capsys.readouterr().err
    assert "the baseline has no job tiny_fake, gemma4_mtp, K=3, fake, tp2\n" in said
    assert "allowed: the same jobs on both sides: tiny_fake, gemma4_mtp, K=3, fake\n" in said
    edit(two, verification="block")
    assert gate([stored, str(two)]) == 2
    assert "K=3, fake, tp2, block\n" in capsys.readouterr().err

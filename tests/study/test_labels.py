"""What tells jobs apart by name: splits, and other settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from studied_runs import copied, divide, edit

from hydraspec.cli.gate import main as gate
from hydraspec.study.jobs import pool
from hydraspec.study.runs import read_run


def test_a_label_names_the_split_as_its_choice(studied: Path) -> None:
    """Catches "name=tp2, tensor=2"; settings that are no sizes stand beside it."""
    for name, check in (("two", False), ("checked", True)):
        run = copied(studied / "1", name, parallelism__check=check)
        divide(run, name, time=1.0, tensor=2)
    jobs = pool([read_run(studied / name) for name in ("1", "two", "checked")])
    assert [job.label for job in jobs] == [
        "gemma4_mtp, K=3, single, check=False",
        "gemma4_mtp, K=3, tp2, check=False",
        "gemma4_mtp, K=3, tp2, check=True",
    ]


def test_a_choice_of_a_group_is_called_by_the_group(studied: Path) -> None:
    """Catches "name=vllm"."""
    copied(studied / "1", "other", engine__name="vllm")
    jobs = pool([read_run(studied / name) for name in ("1", "other")])
    assert jobs[1].label == "gemma4_mtp, K=3, engine=vllm"


def test_a_label_of_many_settings_tells_jobs_apart(studied: Path) -> None:
    """Catches the third setting left out, which alone tells two of them apart; others are."""
    changes = {"engine__name": "vllm", "engine__device": "cuda", "engine__num_threads": 7}
    copied(studied / "1", "other", **changes)
    copied(studied / "1", "more", engine__max_num_seqs=8)
    jobs = pool([read_run(studied / name) for name in ("1", "other", "more")])
    assert [job.label for job in jobs] == [
        "gemma4_mtp, K=3, engine=native, device=auto, max_num_seqs=16",
        "gemma4_mtp, K=3, engine=vllm, device=cuda, max_num_seqs=16",
        "gemma4_mtp, K=3, engine=native, device=auto, max_num_seqs=8",
    ]


def test_the_gate_names_the_split_that_is_missing(
    studied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches "has no job X; allowed: X": all that tells jobs apart is in their label."""
    stored, two = str(studied / "gate.json"), copied(studied / "1", "two")
    divide(two, "tp2", time=1.0, tensor=2)
    assert gate(["--write", stored, str(studied / "1")]) == 0
    assert gate([stored, str(two)]) == 2
    said = capsys.readouterr().err
    assert "the baseline has no job tiny_fake, gemma4_mtp, K=3, fake, tp2\n" in said
    assert "allowed: the same jobs on both sides: tiny_fake, gemma4_mtp, K=3, fake\n" in said
    edit(two, verification="block")
    assert gate([stored, str(two)]) == 2
    assert "K=3, fake, tp2, block\n" in capsys.readouterr().err


def test_the_gate_tells_jobs_apart_by_their_settings(
    studied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches one label for two jobs that differ in a setting of the engine alone."""
    for number in (8, 9):
        copied(studied / "1", f"seqs{number}", engine__max_num_seqs=number)
    stored, both = str(studied / "gate.json"), [str(studied / name) for name in ("1", "seqs8")]
    assert gate(["--write", stored, *both]) == 0
    assert gate([stored, *both]) == 0
    printed = capsys.readouterr().out
    for number in (16, 8):
        name = f"tiny_fake, gemma4_mtp, K=3, fake, max_num_seqs={number}"
        assert f"{name}: 1 run, 6 requests\n" in printed
        assert f"{name}: no worse\n" in printed
    assert gate([stored, str(studied / "1"), str(studied / "seqs9")]) == 2
    said = capsys.readouterr().err
    assert "the baseline has no job tiny_fake, gemma4_mtp, K=3, fake, max_num_seqs=9\n" in said
    assert said.count("max_num_seqs=16") == said.count("max_num_seqs=8") == 1


def test_a_baseline_of_another_version_has_the_same_jobs(
    studied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches "has no job …, a_new_key=None": a setting that one version alone knows."""
    stored, folders = str(studied / "gate.json"), []
    for number in (8, 9):
        folders.append(str(copied(studied / "1", f"old{number}", engine__max_num_seqs=number)))
    assert gate(["--write", stored, *folders]) == 0
    for number in (8, 9):
        changes = {"engine__max_num_seqs": number, "engine__a_new_key": 3}
        folders[number - 8] = str(copied(studied / "1", f"new{number}", **changes))
    assert gate([stored, *folders]) == 0
    printed = capsys.readouterr()
    assert "K=3, fake, max_num_seqs=8: no worse\n" in printed.out
    assert "a_new_key" not in printed.out + printed.err

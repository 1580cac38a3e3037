"""Jobs: the names that tell them apart, and those that share no baseline (other splits, devices,
engine settings and loads).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from studied_runs import copied, divide, edit, slow_down, stretch

import hydraspec
from hydraspec.compare import main
from hydraspec.gate import main as gate
from hydraspec.study.jobs import baseline_keys, pool, setup_titles
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


# ---------------------------------------------------------------- setups


def of(found: dict[str, Any], name: str) -> dict[str, Any]:
    (job,) = (job for job in found["jobs"] if job["job"] == name)
    return dict(job)


@pytest.fixture
def splits(studied: Path) -> Path:
    """`one` (a device, speedup near 1.3) and `two` (tp2: ten times as slow, speedup near 2)."""
    for name, factor in (("one", 0.75), ("two", 0.5)):
        slow_down(copied(studied / "1", name), factor)
    divide(studied / "two", "tp2", time=10.0, tensor=2)
    return studied


def test_splits_are_ranked_by_tokens_per_second(
    splits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches the split with the slower baseline as the best, and "the machine changed"."""
    found = hydraspec.compare([splits / "one", splits / "two"])
    assert found["ranked_by"] == "tokens_per_second"
    assert found["drift"] is None
    one, two = of(found, "one"), of(found, "two")
    assert (one["rank"], two["rank"]) == (1, 2)
    assert one["speedup"]["mean"] < two["speedup"]["mean"]
    assert (one["num_devices"], two["num_devices"]) == (1, 2)
    assert two["label"] == "gemma4_mtp, K=3, tp2"
    overall = {f["measure"]: f for f in two["versus"] if f["category"] is None}
    speed, speedup = overall["tokens_per_second"], overall["speedup"]
    assert speed["says"] == "worse"
    assert speed["value"] == pytest.approx(two["tokens_per_second"]["mean"])
    assert speed["ratio"] == pytest.approx(speed["value"] / speed["reference_value"])
    assert speed["ratio"] < 0.2
    assert speedup["ratio"] > 1.2
    assert main([str(splits / "one"), str(splits / "two"), "--write", str(splits / "out")]) == 0
    printed = capsys.readouterr().out
    assert "tok/s per device" in printed
    assert "no common baseline: tokens/s are compared as measured" in " ".join(printed.split())
    lines = (splits / "out" / "compare.csv").read_text(encoding="utf-8").splitlines()
    assert sum(",tokens_per_second," in line for line in lines) == 2 * 3, "all and two categories"


def test_one_split_is_ranked_by_speedup(splits: Path) -> None:
    divide(splits / "one", "tp2", time=1.0, tensor=2)
    found = hydraspec.compare([splits / "one", splits / "two"])
    assert found["ranked_by"] == "speedup"
    assert of(found, "two")["rank"] == 1
    assert of(found, "two")["tokens_per_second"] is None
    assert "The same baseline ran at" in found["drift"]


def test_drift_is_judged_within_a_split(splits: Path) -> None:
    """`one` and `again` ran on one device, while the machine changed by half; tp2 is no drift."""
    again = copied(splits / "one", "again", method__num_speculative_tokens=2)
    edit(again, num_speculative_tokens=2)
    stretch(again, 1.5)
    found = hydraspec.compare([splits / name for name in ("one", "two", "again")])
    assert " in again and at " in found["drift"]
    assert " in one: the machine changed" in found["drift"]
    assert found["drift"].endswith("so the ranking by tokens/s may be the machine's.")


def test_another_load_is_no_drift(splits: Path) -> None:
    """Catches a baseline with more requests at once taken for a faster machine."""
    busy = copied(splits / "one", "busy", workload__concurrency=8)
    edit(busy, concurrency=8)
    stretch(busy, 0.3)
    found = hydraspec.compare([splits / "one", busy])
    assert (found["drift"], found["ranked_by"]) == (None, "speedup")


def test_what_makes_another_setup(studied: Path) -> None:
    def keys(name: str) -> set[str]:
        return set(baseline_keys([read_run(studied / each) for each in ("1", name)]))

    copied(studied / "1", "threads", engine__num_threads=7)
    changes = {"parallelism__timeout_s": 60.0, "method__verification": "block"}
    copied(studied / "1", "moved", **changes)
    edit(copied(studied / "1", "device"), device="cuda")
    assert len(keys("threads")) == 2
    assert len(keys("device")) == 2
    assert len(keys("moved")) == 1
    found = [read_run(studied / name) for name in ("1", "threads", "device")]
    assert setup_titles(found) == [
        "device cpu, num_threads -",
        "device cpu, num_threads 7",
        "device cuda",
    ]


def test_a_setting_of_another_version_makes_no_setup(studied: Path) -> None:
    """Catches two commits taken for two setups since one of them knows one more key."""
    newer = copied(studied / "1", "newer", engine__a_new_key=3)
    assert len(set(baseline_keys([read_run(studied / "1"), read_run(newer)]))) == 1

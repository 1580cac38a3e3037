"""The one answer of a sweep: which job, which are as good, what lies beyond K, and what is next."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from studied_runs import configure, copied, diverge, edit, edit_rows

from hydraspec.cli.flags import read_keys
from hydraspec.cli.overrides import with_config_dir
from hydraspec.compare import main as compare
from hydraspec.study.compare import compared
from hydraspec.study.decision import Decision, decide, to_best
from hydraspec.study.pairs import ALL
from hydraspec.study.sweep import compare as compare_sweep
from hydraspec.study.sweep import read

DRAFTS = 100  # verifications of each request


@pytest.fixture
def sweep(studied: Path) -> Path:
    """Jobs 0 and 1 of K=3, and 2 without drafts."""
    return studied


def pace(run: Path, speedup: float, *, spread: float = 0.01) -> None:
    """A run so many times as fast as its baseline in every request, give or take `spread`."""
    number = iter(range(1000))

    def change(row: dict[str, Any]) -> None:
        wobble = 1 + spread * (-1) ** next(number)
        row["decode_ms"] = row["baseline"]["decode_ms"] / speedup * wobble
        row["num_drafts"] = DRAFTS
        k = len(row["accepted_per_position"])
        row["accepted_per_position"] = [90 - 10 * i for i in range(k)]

    edit_rows(run, change)


def of_drafts(run: Path, k: int, speedup: float) -> Path:
    """A job of gemma4_mtp with K drafts."""
    configure(run, method__num_speculative_tokens=k, method__name="gemma4_mtp")
    edit(run, num_speculative_tokens=k, method="gemma4_mtp")
    typed = ["method=gemma4_mtp", f"method.num_speculative_tokens={k}", "workload.limit=6"]
    (run / "overrides.yaml").write_text("".join(f"- {one}\n" for one in typed), encoding="utf-8")
    edit_rows(run, lambda row: row.update(accepted_per_position=[0] * k))
    pace(run, speedup)
    return run


def decided(sweep: Path) -> Decision:
    (group,) = read(sweep).groups
    found = decide(group)
    assert found is not None
    assert decide(group) is found, "made once for console, page and file"
    return found


def test_the_answer_names_the_best_and_what_is_as_good(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a winner tied with `none`, and ties of all with all."""
    pace(sweep / "0", 1.75)
    pace(sweep / "1", 1.72)
    slow = copied(sweep / "1", "3", seed=0, method__draft_sampling="probabilistic")
    pace(slow, 0.8)
    compare_sweep(sweep)
    printed = capsys.readouterr().out
    assert printed.startswith("Use eagle3 with K=3: 1.75x (")
    assert "As good within 3 %: gemma4_mtp K=3" in printed
    assert "Slower than none: gemma4_mtp K=3, draft_sampling=probabilistic." in printed
    found = json.loads((sweep / "compare.json").read_text(encoding="utf-8"))
    answer = found["answer"]
    assert (answer["method"], answer["num_speculative_tokens"]) == ("eagle3", 3)
    assert answer["speedup"]["mean"] == pytest.approx(1.75, rel=0.01)
    assert [each["method"] for each in answer["as_good"]] == ["gemma4_mtp"]
    assert answer["slower"][0]["speedup"]["ci95"][1] < 1
    assert answer == found["rankings"][0]["answer"]
    assert answer["next"].startswith("python -m hydraspec method=eagle3 ")
    told = {row["method"]: row["told_from_best"] for row in found["rows"]}
    assert told["none"], "it is slower in each of six requests"


def test_none_is_not_tied_with_a_job_whose_interval_is_above_one(sweep: Path) -> None:
    """Catches the correction over all pairs of jobs: it tied `none` with 1.91x (1.37 to 2.65)."""
    pace(sweep / "0", 1.6, spread=0.25)
    for number in range(3, 11):
        pace(copied(sweep / "1", str(number), seed=0, method__draft_sampling=str(number)), 0.9)
    (group,) = read(sweep).groups
    low, _ = group.jobs[0].speedups[ALL]["ci95"]
    (plain,) = (each for each in group.jobs if each.job.is_plain)
    assert low > 1
    assert plain.against("speedup").says == "cannot_tell"
    assert plain.told_from_best


def test_the_smallest_effect_is_a_key_and_an_option(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pace(sweep / "0", 1.75)
    pace(sweep / "1", 1.60)
    folders = [str(sweep / job) for job in "012"]
    assert compare(folders) == 0
    assert "As good within 3 %: nothing" in capsys.readouterr().out
    assert compare([*folders, "--smallest-effect=0.1"]) == 0
    assert "As good within 10 %: gemma4_mtp K=3." in capsys.readouterr().out
    configure(sweep / "0", metrics__smallest_effect=0.1)
    assert [each.job.name for each in decided(sweep).as_good] == ["1"]
    assert compare([*folders, "--smallest-effect=2"]) == 2


def test_what_cannot_be_told_says_how_many_prompts_would(sweep: Path) -> None:
    pace(sweep / "0", 1.1, spread=0.4)
    pace(sweep / "1", 0.9, spread=0.4)
    found = decided(sweep)
    assert found.is_worth_it is None
    assert found.num_more
    assert f"workload.limit={6 + found.num_more}" in found.next_command()
    assert next(found.sentences()).startswith("It cannot be told whether drafts are worth it: ")
    pace(sweep / "0", 0.7)
    pace(sweep / "1", 0.6)
    found = decided(sweep)
    assert found.kind == "bad"
    assert found.num_more is None, "no number of prompts changes the answer"
    assert found.record()["method"] == "none"
    assert shlex.split(found.next_command())[3] == "method=none"


def test_of_two_jobs_the_first_may_be_as_good_as_the_best(sweep: Path) -> None:
    """Catches the ratio to a best job that is not the reference left out."""
    pace(sweep / "0", 1.6, spread=0.25)
    pace(sweep / "1", 1.9, spread=0.1)
    group = compared([sweep / "0", sweep / "1"])
    found = decide(group)
    assert found is not None
    assert group.reference is not None
    assert (group.reference.job.name, found.best.job.name) == ("0", "1")
    assert [each.job.name for each in found.maybe] == ["0"]
    assert found.num_more
    ratio = to_best(group.reference, found.best, group)
    assert ratio is not None
    assert ratio.ratio == pytest.approx(group.reference.speedup / found.best.speedup)


def test_beyond_the_k_that_were_tried(sweep: Path) -> None:
    """Catches the largest K tried taken for the best there is."""
    of_drafts(sweep / "0", 1, 1.3)
    of_drafts(sweep / "1", 3, 1.8)
    found = decided(sweep)
    assert found.edge == "K=3 is the largest"
    assert found.predicted is not None
    assert found.predicted.num_drafts > 3
    assert found.predicted.speedup > 1.03 * 1.8
    values = f"method.num_speculative_tokens=3,{found.predicted.num_drafts}"
    assert shlex.split(found.next_command()) == [
        *("python", "-m", "hydraspec", "-m", "method=none,gemma4_mtp", values, "workload.limit=6")
    ]
    assert any("K=3 is the largest that was tried: " in each for each in found.sentences())
    middle = of_drafts(copied(sweep / "1", "3"), 2, 1.9)
    assert decided(sweep).edge is None
    pace(middle, 1.0)
    pace(sweep / "0", 1.79)
    assert decided(sweep).predicted is None, "drafts cost too much for more of them to gain"
    assert any("no K beyond is predicted to gain 3 % more" in s for s in decided(sweep).sentences())


def test_the_next_command_repeats_the_folder_of_choices(sweep: Path, tmp_path: Path) -> None:
    of_drafts(sweep / "0", 3, 1.8)
    pace(sweep / "1", 1.5)
    plan = with_config_dir(str(tmp_path), ["method=gemma4_mtp", "workload.limit=6"])
    (sweep / "0" / "overrides.yaml").write_text(json.dumps(plan), encoding="utf-8")
    words = shlex.split(decided(sweep).next_command())[3:]
    assert words[:2] == ["method=gemma4_mtp", "method.num_speculative_tokens=3"]
    assert words[2:] == [f"--config-dir={tmp_path}"]
    assert read_keys(words, "").overrides[0] == plan[0]


def test_a_job_whose_outputs_are_not_the_targets_is_no_answer(sweep: Path) -> None:
    pace(sweep / "0", 3.0)
    pace(sweep / "1", 1.5)
    diverge(sweep / "0")
    assert decided(sweep).best.job.name == "1"

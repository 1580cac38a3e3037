"""The one answer of a sweep: which job, which are as good, what lies beyond K, and what is next."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from studied_runs import configure, copied, diverge
from studied_sweeps import of_drafts, pace, sized

from hydraspec.cli.flags import read_keys
from hydraspec.cli.overrides import with_config_dir
from hydraspec.compare import main as compare
from hydraspec.study import group_blocks
from hydraspec.study.compare import compared
from hydraspec.study.decision import Decision, decide, name, to_best
from hydraspec.study.pairs import ALL
from hydraspec.study.ranking import EQUAL, Group
from hydraspec.study.sweep import compare as compare_sweep
from hydraspec.study.sweep import read


@pytest.fixture
def sweep(studied: Path) -> Path:
    """Jobs 0 and 1 of K=3, and 2 without drafts."""
    return studied


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
    pace(sized(sweep / "0"), 1.1, spread=0.4)
    pace(sized(sweep / "1"), 0.9, spread=0.4)
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
    assert found.beyond is not None
    assert found.beyond.edge == "K=3 is the largest"
    assert found.predicted is not None
    assert found.predicted.num_drafts > 3
    assert found.predicted.speedup > 1.03 * 1.8
    values = f"method.num_speculative_tokens=3,{found.predicted.num_drafts}"
    assert shlex.split(found.next_command()) == [
        *("python", "-m", "hydraspec", "-m", "method=none,gemma4_mtp", values, "workload.limit=6")
    ]
    assert any("K=3 is the largest that was tried: " in each for each in found.sentences())
    middle = of_drafts(copied(sweep / "1", "3"), 2, 1.9)
    assert decided(sweep).beyond is None
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


# ---------------------------------------------------------------- the answer and the table


def cells(group: Group) -> dict[str, str]:
    """The cell "difference" of each job in the table of jobs."""
    table = group_blocks.jobs(group).table
    assert table is not None
    column = list(table.header).index("difference")
    return {line.link.name: line.cells[column] for line in table.lines if line.link is not None}


@pytest.fixture
def noisy(sweep: Path) -> Group:
    """Five jobs with drafts of different noise, and one without drafts, which is slower."""
    pace(sized(sweep / "0"), 1.9, spread=0.1)
    pace(sweep / "1", 1.6, spread=0.25)
    for job, speedup, spread in (("3", 1.5, 0.02), ("4", 1.3, 0.35), ("5", 1.2, 0.01)):
        made = copied(sweep / "1", job, seed=0, method__draft_sampling=job)
        pace(made, speedup, spread=spread)
    (group,) = read(sweep).groups
    return group


def test_the_answer_names_each_job_that_the_table_marks_as_equal(noisy: Group) -> None:
    """Catches an answer by single intervals beside a table by intervals of all pairs."""
    found = decide(noisy)
    assert found is not None
    assert found.is_worth_it
    marked = {each.job.name for each in noisy.jobs if each.mark == EQUAL}
    assert len(marked) > 1
    assert marked == {each.job.name for each in (*found.as_good, *found.maybe)}
    record = found.record()
    named = [each["speedup"] for each in record["may_be_as_good"]]
    assert named == [each.speedups[ALL] for each in found.maybe]
    assert all(name(each) in record["sentence"] for each in found.maybe)


def test_answer_and_table_have_one_number_of_prompts(noisy: Group) -> None:
    """Catches a level for one comparison in the answer, beside the table's for all pairs."""
    found = decide(noisy)
    assert found is not None
    assert found.num_more
    texts = cells(noisy)
    numbers = {
        job: int(text.partition(" ")[0].replace(",", ""))
        for job, text in texts.items()
        if text.endswith(" more prompts")
    }
    rivals = {each.job.name for each in found.maybe} - {each.job.name for each in found.hopeless}
    assert numbers.keys() == rivals
    assert found.num_more == max(numbers.values()) == found.record()["num_more_needed"]
    assert f"About {found.num_more:,} more prompts would settle" in found.record()["sentence"]
    (rival,) = (each for each in found.maybe if numbers.get(each.job.name) == found.num_more)
    versus = rival.against("speedup")
    assert versus is not None
    assert versus.ratio.num_more_needed() != found.num_more, "the levels differ here"


def test_a_job_that_is_told_to_be_worse_may_not_be_as_good(sweep: Path) -> None:
    """Catches "May be as good" beside "worse" in the table, for an interval that reaches 0.97."""
    pace(sweep / "0", 1.8, spread=0.01)
    pace(sweep / "1", 1.735, spread=0.025)
    (group,) = read(sweep).groups
    (other,) = (each for each in group.jobs if each.job.name == "1")
    versus = other.against("speedup")
    assert versus is not None
    assert versus.ratio.ci95 is not None
    assert versus.ratio.ratio < 0.97 < versus.ratio.ci95[1] < 1
    found = decide(group)
    assert found is not None
    assert (list(found.maybe), list(found.as_good), found.num_more) == ([], [], None)
    assert cells(group)["1"] == "worse"
    pace(sweep / "1", 1.77, spread=0.011)
    (group,) = read(sweep).groups
    assert cells(group)["1"] == "worse, within 3 %", "the answer counts it as good"
    pace(sweep / "1", 1.79, spread=0.1)
    (group,) = read(sweep).groups
    assert cells(group)["1"] == "within 3 %"


def test_the_answer_and_the_row_without_drafts_agree(sweep: Path) -> None:
    """Catches "Use eagle3" above a row of none that more prompts would tell, and two numbers."""
    pace(sweep / "0", 1.6, spread=0.25)
    for number in range(3, 11):
        pace(copied(sweep / "1", str(number), seed=0, method__draft_sampling=str(number)), 0.9)
    (group,) = read(sweep).groups
    (plain,) = (each for each in group.jobs if each.job.is_plain)
    versus = plain.against("speedup")
    assert versus is not None
    assert versus.says == "cannot_tell", "with the correction over all pairs"
    assert cells(group)["2"] == "worse"
    pace(sized(sweep / "0"), 1.1, spread=0.4)
    pace(sweep / "1", 0.9)
    (group,) = read(sweep).groups
    found = decide(group)
    assert found is not None
    assert (found.is_worth_it, bool(found.num_more)) == (None, True)
    assert cells(group)["2"] == f"{found.num_more:,} more prompts"

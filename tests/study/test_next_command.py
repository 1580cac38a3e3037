"""The next command of an answer: jobs that are open, K in order, and prompts that there are."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from studied_runs import configure, copied, edit, summary_of
from studied_sweeps import of_drafts, pace, sized

from hydraspec.errors import ConfigurationError
from hydraspec.study.compare import compared
from hydraspec.study.decision import Decision, decide
from hydraspec.study.jobs import Job
from hydraspec.study.next_command import sweep_command
from hydraspec.study.sweep import read

K = "method.num_speculative_tokens"


@pytest.fixture
def open_sweep(studied: Path) -> Path:
    """Two jobs with drafts, of which it cannot be told whether the better one is worth it."""
    pace(studied / "0", 1.1, spread=0.4)
    pace(studied / "1", 0.9, spread=0.4)
    return studied


def decided(sweep: Path) -> Decision:
    (group,) = read(sweep).groups
    found = decide(group)
    assert found is not None
    return found


def values(command: str) -> dict[str, str]:
    """The overrides of a command by key; no key may come twice."""
    pairs = [word.partition("=") for word in shlex.split(command) if "=" in word]
    found = {key: value for key, _, value in pairs}
    assert len(found) == len(pairs)
    return found


def jobs_of(sweep: Path) -> dict[str, Job]:
    return {each.job.name: each.job for group in read(sweep).groups for each in group.jobs}


def test_a_workload_without_more_prompts_is_not_asked_for_more(open_sweep: Path) -> None:
    """Catches a command that measures the same prompts again, and says the same again."""
    for job in "01":
        sized(open_sweep / job, most=6)
    found = decided(open_sweep)
    assert found.num_more
    record = found.record()
    assert "more prompts would settle that; the workload has no more." in record["sentence"]
    assert "workload.limit" not in record["next"]
    assert "-m" not in shlex.split(record["next"])[3:]


def test_as_many_prompts_are_asked_for_as_the_workload_has(open_sweep: Path) -> None:
    for job in "01":
        sized(open_sweep / job, most=9)
    found = decided(open_sweep)
    assert found.num_more
    assert found.num_more > 3
    assert "more prompts would settle that; the workload has 3 more." in found.record()["sentence"]
    assert values(found.next_command())["workload.limit"] == "9"


@pytest.mark.parametrize("key", ["workload.num_requests", "workload.num_conversations"])
def test_a_made_workload_is_made_larger(open_sweep: Path, key: str) -> None:
    """Catches workload.limit raised where another key says how many prompts are made."""
    for job in "01":
        sized(open_sweep / job, key)
        typed = f"- method=eagle3\n- {K}=3\n- {key}=6\n- workload.limit=160\n"
        (open_sweep / job / "overrides.yaml").write_text(typed, encoding="utf-8")
    found = decided(open_sweep)
    assert found.num_more
    assert "the workload has" not in found.record()["sentence"]
    typed_again = values(found.next_command())
    assert typed_again[key] == str(6 + found.num_more)
    assert "workload.limit" not in typed_again


def test_requests_that_share_a_prompt_are_not_asked_for_as_prompts(open_sweep: Path) -> None:
    """Catches requests taken for lines of the file, with several samples or turns of each."""
    for job in "01":
        size = {"key": "workload.limit", "value": 3, "most": None}
        edit(open_sweep / job, workload_size=size)
    found = decided(open_sweep)
    assert found.num_more
    assert values(found.next_command())["workload.limit"] == str(3 + -(-found.num_more // 2))


def test_runs_of_earlier_versions_have_their_limit_raised(open_sweep: Path) -> None:
    for job in "01":
        summary = summary_of(open_sweep / job)
        del summary["workload_size"]
        (open_sweep / job / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    found = decided(open_sweep)
    assert found.num_more
    assert "the workload has" not in found.record()["sentence"]
    assert values(found.next_command())["workload.limit"] == str(6 + found.num_more)
    edit(open_sweep / "0", workload_size={"key": "workload.limit", "value": "6", "most": None})
    with pytest.raises(ConfigurationError, match=r"workload_size\.value is '6'"):
        compared([open_sweep / "0", open_sweep / "1"])


def test_k_is_sorted_as_numbers_and_auto_comes_last(studied: Path) -> None:
    """Catches "20,8"."""
    of_drafts(studied / "0", 8, 1.8)
    of_drafts(studied / "1", 20, 1.7)
    auto = of_drafts(copied(studied / "0", "3"), 6, 1.6)
    edit(auto, num_speculative_tokens_used={"mean": 3.0, "histogram": [0, 0, 0, 1]})
    jobs = jobs_of(studied)
    command = sweep_command(jobs["3"], [jobs["1"], jobs["0"]], beyond=9, more=None)
    assert values(command)[K] == "8,9,20,auto"


def test_open_rivals_are_measured_beside_the_k_that_is_predicted(studied: Path) -> None:
    """Catches rivals and more prompts dropped for a prediction."""
    of_drafts(studied / "0", 1, 1.3)
    of_drafts(studied / "1", 3, 1.8)
    rival = sized(copied(studied / "1", "3"))
    edit(configure(rival, method__name="eagle3"), method="eagle3")
    pace(rival, 1.6, spread=0.35)
    sized(studied / "1")
    found = decided(studied)
    assert found.predicted is not None
    assert found.num_more
    assert "3" in [each.job.name for each in found.maybe]
    typed = values(found.next_command())
    assert typed["method"] == "none,gemma4_mtp,eagle3"
    assert typed[K].split(",")[-1] == str(found.predicted.num_drafts)
    assert "3" in typed[K].split(",")
    assert typed["workload.limit"] == str(6 + found.num_more)


def test_no_drafter_is_asked_for_a_k_that_it_does_not_hold(studied: Path) -> None:
    """Catches a sweep that ends with exit status 2: methods and K are crossed."""
    of_drafts(studied / "0", 6, 1.8)
    edit(of_drafts(studied / "1", 3, 1.7), method="dflash")
    jobs = jobs_of(studied)

    def crossed(rows: int) -> dict[str, str]:
        jobs["1"].summary["draft_spec"] = {"block_size": rows, "samples_anchor": False}
        return values(sweep_command(jobs["0"], [jobs["1"]], beyond=9, more=None))

    assert (crossed(10)["method"], crossed(10)[K]) == ("none,gemma4_mtp,dflash", "3,6,9")
    assert (crossed(8)["method"], crossed(8)[K]) == ("none,gemma4_mtp,dflash", "3,6")
    assert (crossed(6)["method"], crossed(6)[K]) == ("none,gemma4_mtp", "6,9")


def test_auto_is_crossed_only_with_methods_that_ran_with_it(studied: Path) -> None:
    """Catches method=suffix with K=auto, which is refused."""
    auto = of_drafts(studied / "0", 6, 1.8)
    edit(auto, num_speculative_tokens_used={"mean": 3.0, "histogram": [0, 0, 0, 1]})
    edit(of_drafts(studied / "1", 3, 1.7), method="suffix")
    jobs = jobs_of(studied)
    typed = values(sweep_command(jobs["0"], [jobs["1"]], beyond=None, more=None))
    assert (typed["method"], typed[K]) == ("none,gemma4_mtp", "auto")


def test_prompts_that_did_not_run_are_left(open_sweep: Path) -> None:
    """Catches an interrupted run that is told that its workload has no more."""
    for job in "01":
        edit(sized(open_sweep / job, most=24), num_requests_in_workload=24)
        edit(open_sweep / job, workload_size={"key": "workload.limit", "value": 24, "most": 24})
    found = decided(open_sweep)
    assert found.num_more
    assert found.num_more > 18
    assert "settle that; the workload has 18 more." in found.record()["sentence"]
    assert values(found.next_command())["workload.limit"] == "24"


def typed(run: Path, *settings: str) -> Path:
    lines = [f"- {one}\n" for one in settings]
    (run / "overrides.yaml").write_text("".join(lines), encoding="utf-8")
    return run


def test_settings_that_tell_no_jobs_apart_are_not_crossed(studied: Path) -> None:
    """Catches four times the jobs for two seeds and two kinds of metrics."""
    for job, seed, steps in (("0", 0, "true"), ("1", 1, "false")):
        own = (f"{K}=3", f"seed={seed}", f"metrics.steps={steps}")
        typed(of_drafts(studied / job, 3, 1.8), "method=gemma4_mtp", *own)
    edit(configure(studied / "1", method__name="eagle3"), method="eagle3")
    jobs = jobs_of(studied)
    found = values(sweep_command(jobs["0"], [jobs["1"]], beyond=None, more=None))
    assert (found["method"], found["seed"]) == ("none,gemma4_mtp,eagle3", "0")
    assert found["metrics.steps"] == "true"


def test_every_seed_of_a_job_is_run_again(studied: Path) -> None:
    """Catches runs of other seeds, which are one job, dropped."""
    for job, seed in (("0", 0), ("1", 1)):
        run = configure(of_drafts(studied / job, 3, 1.8), seed=seed)
        typed(run, "method=gemma4_mtp", f"{K}=3", f"seed={seed}")
    (job,) = [each for each in jobs_of(studied).values() if len(each.runs) == 2]
    assert values(sweep_command(job, [], beyond=4, more=None))["seed"] == "0,1"


@pytest.mark.parametrize("own", ["method.checkpoint=a/b", "method.options.min_survival=0.5"])
def test_what_one_method_was_given_is_not_crossed_with_another(studied: Path, own: str) -> None:
    """Catches a drafter of one method that the next command gives to the others."""
    typed(of_drafts(studied / "0", 3, 1.8), "method=gemma4_mtp", f"{K}=3", own)
    rival = configure(of_drafts(studied / "1", 3, 1.7), method__name="eagle3")
    edit(rival, method="eagle3")
    jobs = jobs_of(studied)
    found = values(sweep_command(jobs["0"], [jobs["1"]], beyond=None, more=None))
    assert found["method"] == "none,gemma4_mtp"


def test_settings_in_which_rivals_differ_are_crossed(studied: Path) -> None:
    """Catches a rival that is measured again with the best job's settings."""
    for job, sampling in (("0", "greedy"), ("1", "probabilistic")):
        of_drafts(configure(studied / job, method__draft_sampling=sampling), 3, 1.8)
        typed = f"- method=gemma4_mtp\n- {K}=3\n- method.draft_sampling={sampling}\n- seed=1\n"
        (studied / job / "overrides.yaml").write_text(typed, encoding="utf-8")
    jobs = jobs_of(studied)
    command = sweep_command(jobs["0"], [jobs["1"]], beyond=None, more=None)
    assert values(command)["method.draft_sampling"] == "greedy,probabilistic"
    assert values(command)["seed"] == "1"

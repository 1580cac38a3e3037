"""What a run says of figures that are no good news: the likely cause, and what to try."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Behaviour, FakeEngine
from records import completion, request

from hydraspec.cli.compose import plan
from hydraspec.cli.flags import read_keys
from hydraspec.cli.overrides import with_config_dir
from hydraspec.config.schema import RunConfig, Verification, Weights
from hydraspec.lab.run_warnings import (
    ENOUGH_DRAFTS,
    accuracy_warnings,
    doctor_command,
    figure_warnings,
)
from hydraspec.types import Completion

Use = Callable[[FakeEngine], FakeEngine]
Run = Callable[[], dict[str, Any]]


def figures(**changes: Any) -> dict[str, Any]:
    return {
        "method": "eagle3",
        "num_speculative_tokens": 3,
        "num_drafts": ENOUGH_DRAFTS,
        "acceptance_rate_per_position": [0.008, 0.0, 0.0],
        "acceptance_length": {"mean": 1.008},
        "speedup": None,
        "device": "cpu",
        **changes,
    }


IDLE = {"mean": 0.03, "histogram": [98, 1, 1, 0]}
GOOD = {"acceptance_rate_per_position": [0.7, 0.5, 0.3], "acceptance_length": {"mean": 2.5}}


def test_drafts_that_are_hardly_ever_accepted_are_named(config: RunConfig) -> None:
    """Catches a dropped lm_head: a run that ends ok with an acceptance length of 1.008."""
    (said,) = figure_warnings(config, figures())
    assert "hardly ever accepted: 0.8% of first drafts, acceptance length 1.01 of at most 4" in said
    assert "likely cause: the drafter was trained for another target" in said
    assert "to try: the drafter made for this target as method.checkpoint" in said
    config.method.weights = Weights.random
    assert "method.weights=random" in figure_warnings(config, figures())[0]
    config.method.verification = Verification.synthetic
    assert figure_warnings(config, figures()) == []


@pytest.mark.parametrize(
    "changes", [GOOD, {"num_drafts": ENOUGH_DRAFTS - 1}, {"num_drafts": 0}], ids=str
)
def test_good_or_few_drafts_are_not(config: RunConfig, changes: dict[str, Any]) -> None:
    assert figure_warnings(config, figures(**changes)) == []


@pytest.mark.parametrize(
    ("length", "ci95", "points"),
    [(1.29, (1.1, 1.2), True), (1.31, (0.9, 1.1), False), (2.5, (0.5, 0.99), True)],
)
def test_a_low_acceptance_or_speedup_points_to_the_doctor(
    config: RunConfig, length: float, ci95: tuple[float, float], points: bool
) -> None:
    """Catches a green page beside a drafter that is read in another way than it was trained."""
    changes = {**GOOD, "acceptance_length": {"mean": length}}
    speedup = {"mean": sum(ci95) / 2, "ci95": ci95}
    found = figure_warnings(config, figures(**changes, speedup=speedup))
    assert any("python -m hydraspec.doctor" in said for said in found) == points
    assert len(found) == (speedup["mean"] < 1 or points)
    config.method.weights = Weights.random
    found = figure_warnings(config, figures(**changes, speedup=speedup))
    assert not any("doctor" in said for said in found)


def test_where_k_was_chosen_the_measured_steps_say_what_the_run_does_not(config: RunConfig) -> None:
    """Catches a head with negated weights: K=0 in 98 % of steps, so too few drafts to judge by, and
    the advice to lower a K that the engine chose."""
    slow = {"mean": 0.81, "ci95": (0.8, 0.82)}
    seldom = figures(num_drafts=30, num_speculative_tokens_used=IDLE, speedup=slow)
    hardly, slower = figure_warnings(config, seldom, rates=(0.01, 0.0, 0.0))
    assert (
        "hardly ever accepted: 1.0% of first drafts, acceptance length 1.01 of at most 4" in hardly
    )
    assert "in the steps whose costs were measured, and the engine chose K=0 in 98% of s" in hardly
    assert "as said above; whether" in slower
    assert "python -m hydraspec.doctor" in slower
    never = {**seldom, "num_drafts": 0, "speedup": None, "acceptance_length": {"mean": None}}
    assert len(figure_warnings(config, never, rates=(0.01, 0.0, 0.0))) == 1
    (unknown,) = figure_warnings(config, never)
    assert unknown.startswith("the engine chose K=0 in 98% of steps; whether the drafter")
    assert figure_warnings(config, never, rates=(0.8, 0.7, 0.6)) == []
    (costly,) = figure_warnings(config, seldom, rates=(0.8, 0.7, 0.6))
    assert "drafts save less than they cost here, so the engine chose K=0 in 98%" in costly
    assert "a lower workload.concurrency, or method=none" in costly
    busy = {**seldom, "num_speculative_tokens_used": {"mean": 1.5, "histogram": [1, 1, 1, 1]}}
    (said,) = figure_warnings(config, {**busy, **GOOD}, rates=(0.8, 0.7, 0.6))
    assert "to try: a lower method.max_speculative_tokens or workload.concurrency" in said


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ([], "target=tiny_qwen3 method=eagle3"),
        (["target=tiny_qwen3", "method=eagle3", "seed=1", "workload.limit=8"], " seed=1"),
        (["method.num_speculative_tokens=auto", "method.max_speculative_tokens=4"], ""),
        (["method.num_speculative_tokens=2"], " method.num_speculative_tokens=2"),
        (["method.checkpoint=/a/my head"], " 'method.checkpoint=/a/my head'"),
        (["method.checkpoint='/a/b=c'"], """ "method.checkpoint='/a/b=c'\""""),
        (
            ["target.dtype=float64", "workload=gsm8k", "workload.path=p"],
            " target.dtype=float64 workload=gsm8k workload.path=p",
        ),
        (["hydra.run.dir=x", "tracker=none", "method.costs=c.json"], ""),
        (
            ["engine.device=cpu", "sampling.max_tokens=9"],
            " engine.device=cpu sampling.max_tokens=9",
        ),
    ],
    ids=str,
)
def test_the_command_of_the_doctor_can_be_pasted(typed: list[str], says: str) -> None:
    (job,) = plan(["target=tiny_qwen3", "method=eagle3"]).jobs
    command = doctor_command(job.config, typed)
    start = "python -m hydraspec.doctor target=tiny_qwen3 method=eagle3"
    assert command == start + says.removeprefix("target=tiny_qwen3 method=eagle3")
    plan(shlex.split(command)[3:] if "gsm8k" not in says else [])


def test_the_command_of_the_doctor_repeats_the_folder_of_choices(tmp_path: Path) -> None:
    (job,) = plan(with_config_dir(str(tmp_path), ["target=tiny_qwen3", "method=eagle3"])).jobs
    command = doctor_command(job.config, job.overrides)
    start, *keys = command.split(" --config-dir=")
    assert (start, keys) == (
        "python -m hydraspec.doctor",
        [f"{tmp_path} target=tiny_qwen3 method=eagle3"],
    )
    assert read_keys(shlex.split(command)[3:], "").overrides[0] == job.overrides[0]


def test_the_command_of_the_doctor_names_folders_that_were_not_typed() -> None:
    """As an experiment's YAML may give them; a folder that is no choice is target=custom."""
    typed = ["target=custom", "target.checkpoint=zoo:tiny_qwen3", "method=eagle3"]
    (job,) = plan([*typed, "method.checkpoint=zoo:tiny_qwen3-eagle3"]).jobs
    job.config.target.name = "elsewhere"
    command = doctor_command(job.config, [])
    assert command.endswith(
        "target=custom target.checkpoint=zoo:tiny_qwen3 method=eagle3 "
        "method.checkpoint=zoo:tiny_qwen3-eagle3"
    )
    assert doctor_command(job.config, typed).endswith(command.partition("doctor ")[2])


@pytest.mark.parametrize(
    ("ci95", "device", "cause"),
    [
        ((0.58, 0.66), "cpu", "on a CPU the rows that verify drafts"),
        ((0.58, 0.66), "cuda:0", "cost more than the accepted drafts save"),
        ((0.5, 1.1), "cpu", "on a CPU the rows that verify drafts"),
        (None, "cpu", "on a CPU the rows that verify drafts"),
    ],
)
def test_a_run_that_is_slower_says_why(
    config: RunConfig, ci95: tuple[float, float] | None, device: str, cause: str
) -> None:
    """And says whether that is certain: the interval lies below 1, includes it, or is missing."""
    speedup = {"mean": 0.62, "ci95": ci95}
    (said,) = figure_warnings(config, figures(**GOOD, speedup=speedup, device=device))
    is_certain = ci95 is not None and ci95[1] < 1
    verb = "is" if is_certain else "may be"
    assert f" {verb} slower than method=none here: speedup 0.62x" in said
    assert cause in said
    assert "method.num_speculative_tokens" in said


def test_a_run_that_is_faster_says_nothing(config: RunConfig) -> None:
    speedup = {"mean": 1.02, "ci95": (0.9, 1.1)}
    assert figure_warnings(config, figures(**GOOD, speedup=speedup)) == []


def test_random_text_is_no_measure_of_acceptance(config: RunConfig) -> None:
    config.workload.name = "random"
    random, hardly = figure_warnings(config, figures())
    assert "method.verification=synthetic" in random
    assert "likely cause: workload=random" in hardly
    config.method.verification = Verification.synthetic
    assert figure_warnings(config, figures()) == []


def test_a_run_prints_and_saves_them(
    use_engine: Use, run_config: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use_engine(FakeEngine(Behaviour(accepted=(0,), ms_per_step=8.0)))
    summary = run_config()
    assert summary["acceptance_length"] == {
        "mean": 1.0,
        "ci95": [1.0, 1.0],
        "mean_over_requests": 1.0,
    }
    printed = capsys.readouterr().out
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    for said in summary["warnings"]:
        assert said in printed
    assert any("slower than method=none" in said for said in summary["warnings"])
    assert "slower than method=none" in page
    assert "(n=" in page  # few drafts


# ------------------------------------------------------------------ answers


def answered(rights: str) -> dict[int, Completion]:
    """Completions by index: x is right, . is wrong, e an error."""
    return {
        i: completion(
            i,
            text="5" if mark == "x" else "6",
            finish_reason="error" if mark == "e" else "stop",
        )
        for i, mark in enumerate(rights)
    }


@pytest.mark.parametrize(
    ("method", "baseline", "says"),
    [
        ("x" * 9, "." * 9, "9 are right with the method only and 0 with the baseline only"),
        ("." * 9, "x" * 9, "9 are right with the baseline only and 0 with the method only"),
        ("x" * 8 + "e", "." * 9, "of 8 answers 8 are right with the method only"),
        ("x" * 7, "." * 7, None),  # 2 / 2**7 is above 1 %
        ("x" * 20 + "..", "x" * 20 + "xx", None),
        ("x" * 40, "x" * 40, None),
    ],
)
def test_answers_that_differ_beyond_noise_are_said_loudly(
    method: str, baseline: str, says: str | None
) -> None:
    """Catches a baseline that answers garbage beside a method that is right: exit 0, speedup 1.4.
    Paired: what both sides get right or wrong says nothing."""
    requests = [request(i, answer="5") for i in range(len(method))]
    said = accuracy_warnings(requests, answered(method), answered(baseline))
    assert len(said) == (says is not None)
    if says is not None:
        assert "EXACT MATCH DIFFERS" in said[0]
        assert says in said[0]
    assert accuracy_warnings(requests, answered(method), {}) == []

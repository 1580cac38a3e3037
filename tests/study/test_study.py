"""`python -m hydraspec.report`: what the page of several runs says, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from checked_pages import check_page
from fake_engine import FakeEngine
from studied_runs import (
    change_prompts,
    configure,
    copied,
    damage,
    diverge,
    edit,
    slow_down,
    summary_of,
)

from hydraspec.cli import report
from hydraspec.cli import run as command_line
from hydraspec.cli.compose import plan
from hydraspec.config.schema import RunConfig, TrackerConfig, TrackerMode
from hydraspec.lab import run as run_module
from hydraspec.lab import tracking
from hydraspec.report import main
from hydraspec.study import wandb_report
from hydraspec.study.blocks import Study
from hydraspec.study.contents import study
from hydraspec.study.families import Point, front_of
from hydraspec.study.groups import read
from hydraspec.study.html import study_page

Use = Callable[[FakeEngine], FakeEngine]


def made_of(folders: list[Path], *, asked: str | None = None) -> Study:
    return study(read(folders), asked=asked)


def test_the_page_of_a_sweep(studied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for job in ("0", "1"):
        edit(studied / job, time_per_output_token_ms=4.0, output_tokens_per_second=900.0)
    slow_down(studied / "1", 0.5)
    slow_down(studied / "0", 1.5)
    (studied / "3").mkdir()
    assert main([str(studied)]) == 0
    printed = capsys.readouterr().out
    assert "Which drafter for tiny_fake on workload jsonl?" in printed
    assert "Use gemma4_mtp with K=3: " in printed
    assert "As good within 3 %: nothing. Slower than none: eagle3 K=3. Why: " in printed
    assert f"Report: {studied}/study.html" in printed
    found = check_page((studied / "study.html").read_text(encoding="utf-8"))
    assert found.links == ["1/report.html", "2/report.html", "0/report.html"], "best first"
    for text in (
        "Throughput of one user and of all",
        "Speedup over decoding without drafts",
        "Accepted drafts by position",
        "Speedup / acceptance length by category",
        "identical: all 6 outputs equal",
        "Where a step's time goes",
        "method.num_speculative_tokens",
        "Left out: 3: no result.",
    ):
        assert text in found.text
    assert "svg" in found.tags


def test_what_the_verdict_says(studied: Path) -> None:
    """Worth it, slower, cannot tell, not usable, and without a baseline."""

    def says(folder: Path) -> tuple[str, str]:
        (verdict,) = made_of([folder]).verdicts
        return verdict.kind, verdict.sentence

    slow_down(studied / "1", 0.5)
    slow_down(studied / "0", 0.5)
    kind, sentence = says(studied)
    assert kind == "good"
    assert sentence.startswith("Use ")
    assert "As good within 3 %: gemma4_mtp K=3." in sentence
    slow_down(studied / "1", 1.5)
    slow_down(studied / "0", 2.0)
    assert says(studied)[1].startswith(
        "Use no drafts: the fastest job, gemma4_mtp with K=3, has 0.6"
    )
    slow_down(studied / "0", 0.4)
    diverge(studied / "0")
    kind, sentence = says(studied)
    assert kind == "bad"
    assert "Outputs of eagle3, K=3 (job 0) differ from the target's" in sentence
    assessed = {"says": "slower", "sentence": "slower: 0.66x; slower in math 0.66x"}
    edit(studied / "0", assessment=assessed)
    assert says(studied / "0") == ("bad", "Slower: 0.66x; slower in math 0.66x.")
    assert says(studied / "2")[1] == "All runs decode without drafts."
    edit(studied / "1", baseline=None, speedup=None, by_category={}, assessment=None)
    assert says(studied / "1")[1] == "The speedup is not known: no job has a baseline."
    assert "Not ranked: 1 ran without a baseline" in made_of([studied]).notes


def test_repeats_of_a_sweep_are_named_with_their_folders(studied: Path) -> None:
    """Catches "job 1+1"."""
    shutil.copytree(studied, studied.with_name("again"))
    names = {job.name for job in read([studied, studied.with_name("again")]).jobs}
    assert f"{studied.name}/1+again/1" in names


def test_groups_by_target_and_load(studied: Path) -> None:
    """A drafter at two loads, and another target: ranked apart, in one report."""
    copied(studied / "1", "4", workload__concurrency=8)
    other = edit(copied(studied / "1", "5"), target="tiny_other")
    configure(other, target__name="tiny_other", target__checkpoint="zoo:other")
    runs = read([studied])
    assert [family.title for family in runs.families] == [
        "target tiny_fake",
        "target tiny_other",
    ]
    assert [group.title for group in runs.groups] == [
        "target tiny_fake, concurrency 2",
        "target tiny_fake, concurrency 8",
        "target tiny_other",
    ]
    made = made_of([studied])
    assert made.question == "Which drafter for tiny_fake and tiny_other on workload jsonl?"
    assert len(made.verdicts) == 3
    check_page(study_page(made, studied))


def test_jobs_of_two_folders_are_told_apart(studied: Path) -> None:
    """Two targets in two sweeps, with the same numbers of jobs: each row says whose it is."""
    other = copied(studied, "other")
    for job in ("0", "1", "2"):
        configure(edit(other / job, target="tiny_other"), target__name="tiny_other")
    made = made_of([studied, other])
    blocks = {block.title: block for section in made.sections for block in section.blocks}
    table = blocks["Settings that differ"].table
    assert table
    names = [line.cells[0] for line in table.lines]
    assert sorted(names) == [f"{folder}/{job}" for folder in ("other", "sweep") for job in "012"]
    assert not [key for key in table.header if "drafters" in key]


def test_curves_of_all_jobs_in_the_colours_of_their_drafters(studied: Path) -> None:
    """More jobs than colours: catches curves that are left out, and K that takes a colour."""
    for number in range(4, 14):
        job = copied(studied / "1", str(number))
        edit(configure(job, method__num_speculative_tokens=number), num_speculative_tokens=number)
    blocks = {b.title: b for section in made_of([studied]).sections for b in section.blocks}
    chart = blocks["Accepted drafts by position"].chart
    assert chart
    paths = [mark.attributes["stroke"] for mark in chart.marks if mark.tag == "path"]
    assert len(paths) == 12
    assert dict(chart.legend).keys() == {"gemma4_mtp", "eagle3"}
    assert set(paths) == {color for _, color in chart.legend}
    assert blocks["Lossless"].sentences[0].startswith("All 12 jobs with drafts: identical: ")


def test_text_from_files_is_escaped(studied: Path) -> None:
    name = "<script>alert(1)</script>"
    edit(studied / "1", target=name, warnings=[name])
    configure(studied / "1", target__name=name, engine__device=name)
    made = made_of([studied], asked=f"{name}?")
    assert check_page(study_page(made, studied)).text.count(name) > 2


def test_links_from_another_folder(studied: Path) -> None:
    """Relative, with signs that a browser reads otherwise written as it wants them."""
    odd = studied.rename(studied.parent / "a #b")
    assert main([str(odd / "0"), str(odd / "1"), "--write", str(odd.parent / "out" / "in")]) == 0
    found = check_page((odd.parent / "out" / "in" / "study.html").read_text(encoding="utf-8"))
    assert set(found.links) == {
        "../../a%20%23b/0/report.html",
        "../../a%20%23b/1/report.html",
    }


def test_one_run(studied: Path) -> None:
    made = made_of([studied / "1"])
    assert made.question.startswith("Is gemma4_mtp with 3 draft tokens worth it for tiny_fake")
    assert check_page(study_page(made, studied)).links == ["1/report.html"]


def test_accuracy_of_an_earlier_version(studied: Path) -> None:
    """It has no `scoring`: the report calls it an exact match, as that version did."""
    accuracy = {"exact_match": 0.5, "num_scored": 2, "by_category": {}}
    text = check_page(study_page(made_of([edit(studied / "1", accuracy=accuracy)]), studied)).text
    assert "exact match" in text
    assert "0.500" in text


def test_the_front_holds_what_no_other_point_beats() -> None:
    values = [(1.0, 5.0), (2.0, 4.0), (1.5, 3.0), (3.0, 1.0), (2.0, 4.5)]
    points = [
        Point(name=str(i), label="", method="m", settings="s", per_user=x, total=y)
        for i, (x, y) in enumerate(values)
    ]
    assert [point.name for point in front_of(points)] == ["0", "4", "3"]


REFUSED: dict[str, tuple[Callable[[Path], list[Path]], str]] = {
    "nothing finished": (lambda studied: [_without_rows(studied / "0")], "no request finished"),
    "nothing in common": (
        lambda studied: [
            studied / "0",
            configure(edit(studied / "1", target="b", workload="random"), target__name="b"),
        ],
        "have nothing in common: target ",
    ),
    "a summary without a key": (
        lambda studied: [edit(studied / "0", lossless={"verdict": "identical"})],
        "summary.json: lossless.reason is missing: damaged, or of an older hydraspec",
    ),
    "damaged figures of drafts": (
        lambda studied: [edit(studied / "0", teacher_forced=3)],
        "summary.json: teacher_forced is 3: damaged",
    ),
    "other prompts": (
        lambda studied: [change_prompts(studied / "0").parent],
        "other prompts: request",
    ),
}


def _without_rows(run: Path) -> Path:
    (run / "requests.jsonl").write_text("", encoding="utf-8")
    return run


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(150))
def test_damaged_files_are_one_message_or_do_no_harm(
    seed: int, studied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys dropped, values of other types, files cut anywhere: never a traceback."""
    damage(studied, seed)
    status = main([str(studied)])
    said = capsys.readouterr().err.splitlines()
    if status == 0:
        assert not said or "study.json is not written" in said[0]  # without its package
    else:
        assert (status, len(said)) == (2, 3), said


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_report_is_one_message(
    case: str, studied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders, says = REFUSED[case]
    assert main([*map(str, folders(studied)), "--write", str(studied / "out")]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert [line.split(":")[0] for line in said.splitlines()] == [
        "hydraspec.report",
        "  allowed",
        "  to do",
    ]
    assert not (studied / "out").exists()


def test_help_and_a_folder_that_cannot_be_written(
    studied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    said = capsys.readouterr().out
    assert "--question" in said
    assert "W&B does not take the report." in " ".join(said.split())
    assert "2 if arguments are wrong" in " ".join(said.split())
    assert "no API key is configured" in " ".join(said.split())
    (studied / "file").write_text("")
    assert main([str(studied), "--write", str(studied / "file")]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_a_run_ends_with_its_report(
    config: RunConfig, use_engine: Use, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """tracker.report=true; a run without figures gets a warning in place of it."""
    use_engine(FakeEngine())
    run_module.run(config, run_dir=tmp_path / "run", overrides=[], quiet=True)
    config.tracker.report = True
    report.close_run(config, tmp_path / "run")
    assert "Is gemma4_mtp with 3 draft tokens worth it" in capsys.readouterr().out
    assert (tmp_path / "run" / "study.html").is_file()
    (tmp_path / "empty").mkdir()
    report.close_run(config, tmp_path / "empty")
    assert not (tmp_path / "empty" / "study.html").exists()


def test_a_sweep_ends_with_a_summary_run_and_a_report(
    studied: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: dict[str, Any] = {}

    class Sink:
        def __init__(self, options: Any, run_dir: Path, config: Any) -> None:
            logged.update(options=options, run_dir=run_dir)

        def wait_until_ready(self) -> None: ...

        def close(self) -> None: ...

        def on_sweep(self, jobs: Any, figures: Any) -> list[str]:
            logged.update(jobs=jobs, figures=figures)
            return []

    monkeypatch.setattr(tracking, "WandbSink", Sink)
    config.tracker = TrackerConfig(name="wandb", report=True, tags=["night"])
    report.close_sweep([config, config], studied, group="today/sweep")
    options = logged["options"]
    assert (options.group, options.job_type) == ("today/sweep", "summary")
    assert (options.name, options.tags) == ("summary of today/sweep", ("night",))
    assert [row[0] for row in logged["jobs"].rows] == ["1", "2", "0"]
    assert all(len(row) == len(logged["jobs"].columns) for row in logged["jobs"].rows)
    assert logged["figures"]["best/all/job"] == "gemma4_mtp, K=3 (job 1)"
    assert (studied / "study.html").is_file()


def test_an_online_report_that_cannot_be_published_is_a_warning(
    studied: Path,
    config: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config.tracker = TrackerConfig(name="wandb", report=True, mode=TrackerMode.online)
    monkeypatch.setattr(wandb_report, "is_installed", lambda: False)
    report.close_run(config, studied / "1", quiet=True)
    assert (studied / "1" / "study.html").is_file()
    assert "wandb-workspaces is not installed" in caplog.text


def test_a_drifting_machine_does_not_move_the_points(studied: Path) -> None:
    """Equal jobs, one on a machine that was twice as fast for a while: one place, and no job
    beats the other."""

    def chart() -> tuple[set[str], str]:
        made = made_of([studied])
        blocks = [block for section in made.sections for block in section.blocks]
        (block,) = (each for each in blocks if each.title == "Throughput of one user and of all")
        assert block.chart
        circles = [mark for mark in block.chart.marks if mark.tag == "circle"]
        return {mark.title.partition(": ")[2] for mark in circles}, block.note

    for job, factor in (("0", 1.0), ("1", 2.0)):
        speeds = {"output_tokens_per_second": 300.0, "time_per_output_token_ms": 5.0}
        own = summary_of(studied / job)["baseline"]
        scaled = {
            "output_tokens_per_second": 300 * factor,
            "time_per_output_token_ms": 5 / factor,
        }
        edit(studied / job, **scaled, baseline={**own, **_halved(speeds, factor)})
    edit(studied / "2", output_tokens_per_second=225.0, time_per_output_token_ms=1000 / 150)
    found, note = chart()
    assert len(found) == 2, found
    assert "its own baseline" in note
    edit(studied / "0", baseline=None)
    found, note = chart()
    assert {"200 and 300 tokens/s", "400 and 600 tokens/s"} <= found
    assert "not every job has a baseline" in note


def _halved(speeds: dict[str, float], factor: float) -> dict[str, float]:
    """A baseline at half the speed, on a machine that is `factor` times as fast."""
    return {
        "output_tokens_per_second": speeds["output_tokens_per_second"] * factor / 2,
        "time_per_output_token_ms": speeds["time_per_output_token_ms"] * 2 / factor,
    }


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_sweep_that_is_cut_short_is_not_closed(
    interrupted: bool, studied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is resumed later: Ctrl-C waits for no tracker, and W&B gets one summary run."""
    planned = plan(["seed=1", f"hydra.sweep.dir={studied}"], multirun=True)
    closed: list[bool] = []

    def run_job(job: Any) -> dict[str, Any]:
        if interrupted:
            raise KeyboardInterrupt
        return summary_of(studied / "1")

    monkeypatch.setattr(command_line, "run_job", run_job)
    monkeypatch.setattr(report, "close_sweep", lambda *args, **kwargs: closed.append(True))
    with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
        command_line._run_jobs(planned)
    assert closed == ([] if interrupted else [True])

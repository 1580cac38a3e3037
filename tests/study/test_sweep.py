"""The comparison of a sweep: table, compare.json and compare.html."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checked_pages import check_page
from fake_engine import FakeEngine
from rich.console import Console
from studied_runs import configure, edit

from hydraspec.config.schema import GoodputConfig, MethodConfig, RunConfig
from hydraspec.lab import run as run_module
from hydraspec.study import groups
from hydraspec.study.sweep import compare, read

Use = Callable[[FakeEngine], FakeEngine]


@pytest.fixture
def sweep(
    config: RunConfig, use_engine: Use, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Jobs 0 to 3: K=1 and K=3 of a method, plain decoding, and an equal job that took it over. Run
    once, and copied for each test."""
    kept = tmp_path_factory.getbasetemp() / "sweep_of_fake_runs"
    if not kept.exists():
        _run_sweep(kept, config, use_engine)
    return Path(shutil.copytree(kept, tmp_path / "sweep"))


def _run_sweep(folder: Path, config: RunConfig, use_engine: Use) -> None:
    for job, (method, drafts) in enumerate([("gemma4_mtp", 1), ("gemma4_mtp", 3), ("none", 0)]):
        config.method = MethodConfig(name=method, num_speculative_tokens=drafts)
        use_engine(FakeEngine(method=method, num_speculative_tokens=drafts))
        overrides = [f"method={method}", f"method.num_speculative_tokens={max(drafts, 1)}"]
        run_module.run(config, run_dir=folder / str(job), overrides=overrides, quiet=True)
    copied = json.loads((folder / "2" / "summary.json").read_text(encoding="utf-8"))
    (folder / "3").mkdir()
    text = json.dumps(copied | {"reused_from": "2"})
    (folder / "3" / "summary.json").write_text(text, encoding="utf-8")
    (folder / "4").mkdir()


def test_a_comparison_that_goes_to_a_file_is_not_cut(
    sweep: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches the 80 columns that stand for a terminal's where there is none."""
    monkeypatch.delenv("COLUMNS", raising=False)
    overrides = ["a_setting_with_a_long_name=of_a_long_value", "one_more=long_enough_as_well"]
    for job, name in enumerate(("first", "second")):
        typed = [f"- {override}_{name}\n" for override in overrides]
        (sweep / str(job) / "overrides.yaml").write_text("".join(typed), encoding="utf-8")
    compare(sweep)
    line = next(line for line in capsys.readouterr().out.splitlines() if "value_first" in line)
    assert "long_enough_as_well_first" in line
    assert line.split()[-2:] == ["identical", "0.667"]


def test_the_distribution_of_sampled_outputs_stands_in_the_verdicts_column(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [("not_checked", "same"), ("identical", "different"), ("not_checked", "cannot_tell")]
    for job, (verdict, says) in enumerate(cases):
        path = sweep / str(job) / "summary.json"
        summary = json.loads(path.read_text(encoding="utf-8"))
        summary["lossless"] |= {"verdict": verdict, "distribution": {"says": says}}
        path.write_text(json.dumps(summary), encoding="utf-8")
    compare(sweep)
    printed = capsys.readouterr().out
    assert "same distribution" in printed
    assert "identical, ANOTHER DISTRIBUTION" in printed
    assert "distribution cannot be told" in printed


def test_a_sweep_over_request_rates_has_columns_of_latencies(
    config: RunConfig, use_engine: Use, tmp_path: Path
) -> None:
    """The setting that was typed, p99 of each latency, and goodput; a closed load has dashes."""
    config.workload.goodput = GoodputConfig(ttft_ms=60000.0)
    for job, rate in enumerate((None, 50.0)):
        config.workload.request_rate = rate
        use_engine(FakeEngine())
        overrides = [f"workload.request_rate={'null' if rate is None else rate}"]
        run_module.run(config, run_dir=tmp_path / str(job), overrides=overrides, quiet=True)
    console = Console(record=True, width=200)
    compare(tmp_path, console=console)
    printed = console.export_text()
    for part in ("requests/s", "ttft p99, ms", "inter-token p99, ms", "goodput", "100.0 %", "50.0"):
        assert part in printed
    rows = json.loads((tmp_path / "compare.json").read_text(encoding="utf-8"))["rows"]
    assert [row["request_rate"] for row in rows] == [None, 50.0]
    assert rows[1]["latency_ms"]["ttft"]["p99"] > 0
    assert rows[1]["goodput"]["share"] == 1.0


def test_compare(sweep: Path) -> None:
    console = Console(record=True, width=160)
    compare(sweep, console=console)
    printed = console.export_text()
    assert "gemma4_mtp" in printed
    assert "without a result: job 4" in printed.lower()
    result = json.loads((sweep / "compare.json").read_text(encoding="utf-8"))
    assert result["columns"] == ["method", "num_speculative_tokens"]
    assert [(row["job"], row["num_speculative_tokens"]) for row in result["rows"]] == [
        ("0", 1),
        ("1", 3),
        ("2", 0),
    ]
    assert [row["is_best"] for row in result["rows"]].count(True) == 1
    assert result["rows"][2]["speedup"] is None
    page = check_page((sweep / "compare.html").read_text(encoding="utf-8"))
    assert sorted(page.links) == ["0/report.html", "1/report.html", "2/report.html"], "once each"


def test_graphs_that_did_not_run_are_no_setup(sweep: Path) -> None:
    """Catches a ranking of repeats as if they were setups, as on a CPU, which has no graphs."""
    for job, name in (("0", "full"), ("1", "none")):
        configure(sweep / job, cudagraph__name=name, method__num_speculative_tokens=3)
        type_in(sweep / job, "method=gemma4_mtp", f"cudagraph={name}")
        ran = {"requested": name, "target": "none", "draft": "none", "reason": "device is cpu"}
        edit(sweep / job, num_speculative_tokens=3, cudagraph=ran)
    console = Console(record=True, width=160)
    compare(sweep, console=console)
    assert "Jobs 0, 1, 2 ran without graphs, whatever cudagraph" in console.export_text()
    (group,) = read(sweep).groups
    assert sorted(len(one.job.runs) for one in group.jobs) == [1, 2]
    configure(sweep / "2", cudagraph__name="none")
    edit(sweep / "0", cudagraph={"requested": "full", "target": "full", "draft": "full"})
    (group,) = read(sweep).groups
    assert {one.job.name for one in group.jobs} == {"1", "2"}, "graphs that ran are another setup"


def test_a_skipped_job_has_a_row_that_says_so(sweep: Path) -> None:
    """In its place among the others, with its settings; it is not without a result."""
    (sweep / "4" / "skipped.json").write_text('{"reason": "the target names no <drafter>"}')
    (sweep / "10").mkdir()
    type_in(sweep / "4", "method=eagle", "method.num_speculative_tokens=3")
    console = Console(record=True, width=160)
    compare(sweep, console=console)
    printed = console.export_text()
    assert re.search(r"^ +\S? *2 +none.*\n +4 +eagle +3 .* skipped ", printed, re.MULTILINE)
    assert read(sweep).columns == ["method", "num_speculative_tokens"]
    assert "Job 4 was skipped: the target names no <drafter>." in printed
    assert "Without a result: job 10." in printed
    shutil.copytree(sweep / "4", sweep / "5")
    compare(sweep, console=console)
    assert "Jobs 4, 5 were skipped: the target names no <drafter>." in console.export_text()
    result = json.loads((sweep / "compare.json").read_text(encoding="utf-8"))
    assert result["skipped_jobs"][0].items() >= {"job": "4", "method": "eagle"}.items()
    page = check_page((sweep / "compare.html").read_text(encoding="utf-8"))
    assert "the target names no <drafter>" in page.text
    assert groups.without_result([sweep])[0] == "4: skipped: the target names no <drafter>"


def test_k_that_was_chosen_is_not_shown_as_the_most(sweep: Path) -> None:
    """Catches K=auto up to 3 and K=3 as equal jobs, pooled in one rank."""
    used = {"mean": 1.5, "histogram": [0, 9, 9, 0]}
    for job, drafts in (("0", "auto"), ("1", "3")):
        type_in(sweep / job, "method=gemma4_mtp", f"method.num_speculative_tokens={drafts}")
    edit(sweep / "0", num_speculative_tokens=3, num_speculative_tokens_used=used)
    comparison = read(sweep)
    assert [row.settings["num_speculative_tokens"] for row in comparison.rows] == ["auto", 3, 0]
    (group,) = comparison.groups
    labels = {each.job.label for each in group.jobs}
    assert labels == {"gemma4_mtp, K=auto", "gemma4_mtp, K=3", "none"}


def type_in(folder: Path, *overrides: str) -> None:
    text = "".join(f"- {override}\n" for override in overrides)
    (folder / "overrides.yaml").write_text(text, encoding="utf-8")


def test_jobs_are_ranked_within_each_setting_around_the_method(sweep: Path) -> None:
    """Catches one ranking for a sweep over concurrency, where the largest is always the fastest."""
    for job, concurrency in (("0", 1), ("1", 4), ("2", 1)):
        configure(edit(sweep / job, concurrency=concurrency), workload__concurrency=concurrency)
        type_in(sweep / job, "method=x", f"workload.concurrency={concurrency}")
    comparison = read(sweep)
    assert comparison.columns == ["method", "num_speculative_tokens", "concurrency"]
    assert [row.settings["concurrency"] for row in comparison.rows] == [1, 4, 1]
    assert [row.rank for row in comparison.rows] == [2, None, 1]
    assert [group.title for group in comparison.groups] == ["concurrency 1"]


def test_what_was_typed_stands_in_its_column(sweep: Path) -> None:
    """Catches the summary's own "cudagraph" and "baseline", which are dictionaries of figures, in
    their place: a column of a screen's width, and no job ranked, as no two are alike."""
    for job, mode in (("0", "none"), ("1", "full"), ("2", "none")):
        type_in(sweep / job, "method=x", f"cudagraph={mode}", "baseline=true")
        configure(sweep / job, cudagraph__name=mode)
        edit(sweep / job, cudagraph={"requested": mode, "target": mode, "draft": "full"})
    comparison = read(sweep)
    assert comparison.columns == ["method", "num_speculative_tokens", "cudagraph"]
    assert [row.settings["cudagraph"] for row in comparison.rows] == ["none", "full", "none"]
    assert [group.title for group in comparison.groups] == ["cudagraph none"]


def scale(folder: Path, *, method: float, both: float) -> None:
    """The run as on another machine: the method's times and all times multiplied."""
    path = folder / "requests.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for i, row in enumerate(rows):
        row["decode_ms"] *= method * both * (0.99 + 0.01 * (i % 3))
        if row["baseline"]:
            row["baseline"]["decode_ms"] *= both
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    edit(folder, output_tokens_per_second=summary["output_tokens_per_second"] / both)


def test_a_drifting_machine_does_not_change_the_rank(sweep: Path) -> None:
    """Job 0 is slower against its own baseline, but ran while the machine was three times as fast:
    catches the mark that follows tokens per second."""
    scale(sweep / "0", method=1.5, both=1 / 3)
    comparison = read(sweep)
    first, second, plain = comparison.rows
    speeds = [row.summary["output_tokens_per_second"] or 0 for row in (first, second)]
    assert speeds[0] > speeds[1]
    assert (first.rank, second.rank, plain.rank) == (3, 1, 2)
    assert (first.mark, second.mark) == ("", "*")
    console = Console(record=True, width=200)
    compare(sweep, console=console)
    assert "The same baseline ran at" in console.export_text()


def test_what_cannot_be_told_from_the_best_is_marked_too(sweep: Path) -> None:
    for job in ("0", "1"):
        rows = (sweep / "1" / "requests.jsonl").read_text(encoding="utf-8")
        (sweep / job / "requests.jsonl").write_text(rows, encoding="utf-8")
    scale(sweep / "0", method=1.001, both=1.0)
    marks = {row.folder.name: row.mark for row in read(sweep).rows}
    assert sorted((marks["0"], marks["1"])) == ["*", "="]


def test_seeds_are_pooled(sweep: Path) -> None:
    for job, k, seed in (("0", 1, 0), ("1", 1, 1), ("2", 3, 0)):
        configure(sweep / job, seed=seed, method__num_speculative_tokens=k, method__name="eagle3")
        edit(sweep / job, num_speculative_tokens=k, seed=seed)
        type_in(sweep / job, f"method.num_speculative_tokens={k}", f"seed={seed}")
    (group,) = read(sweep).groups
    assert sorted(len(each.job.runs) for each in group.jobs) == [1, 2]
    assert {each.job.name for each in group.jobs} == {"0+1", "2"}


def test_jobs_that_cannot_be_ranked_say_why(sweep: Path) -> None:
    edit(sweep / "0", baseline=None)
    comparison = read(sweep)
    assert comparison.groups == []
    assert {row.mark for row in comparison.rows} == {""}
    (why,) = comparison.unranked
    assert "0 ran without a baseline" in why


def test_the_tables_of_a_sweep_are_written(sweep: Path) -> None:
    compare(sweep, console=Console(record=True, width=160))
    lines = (sweep / "compare.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("rank,job,label,runs,category,measure,value")
    assert len(lines) == 1 + 3 * 3 + 2 * 3, "speedup of all, acceptance where there are drafts"
    text = (sweep / "compare.md").read_text(encoding="utf-8")
    assert text.startswith("| rank | job |")
    assert "\n- " in text


def test_compare_of_nothing(tmp_path: Path) -> None:
    console = Console(record=True, width=160)
    compare(tmp_path, console=console)
    assert "nothing to compare" in console.export_text()
    assert list(tmp_path.iterdir()) == []

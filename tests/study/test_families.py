"""Reports over several splits: groups, the fastest setup, the chart, and what tables call them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from checked_pages import check_page
from studied_runs import configure, copied, diverge, divide, edit, slow_down, summary_of

from hydraspec.report import main
from hydraspec.study.answers import answers
from hydraspec.study.blocks import Block
from hydraspec.study.contents import study
from hydraspec.study.groups import read
from hydraspec.study.sweep import compare
from hydraspec.study.sweep import read as read_sweep


@pytest.fixture
def splits(studied: Path) -> Path:
    """Jobs 0 (a device: 800 tokens/s, speedup near 1.3) and 1 (pp2: 300 tokens/s, near 2)."""
    for job in ("0", "2"):
        shutil.rmtree(studied / job)
    copied(studied / "1", "0")
    for job, factor, speed in (("0", 0.75, 800.0), ("1", 0.5, 3000.0)):
        slow_down(studied / job, factor)
        own = {"output_tokens_per_second": speed * factor, "time_per_output_token_ms": 2.0}
        edit(
            studied / job,
            output_tokens_per_second=speed,
            time_per_output_token_ms=2.0 * factor,
            baseline=summary_of(studied / job)["baseline"] | own,
        )
    divide(studied / "1", "pp2", time=10.0, pipeline=2)
    for job, name in (("0", "single"), ("1", "pp2")):
        (studied / job / "overrides.yaml").write_text(f"- parallelism={name}\n", encoding="utf-8")
    return studied


def block(folder: Path, title: str) -> Block:
    made = study(read([folder]))
    (found,) = (one for section in made.sections for one in section.blocks if one.title == title)
    return found


def test_the_answer_names_the_split_with_most_tokens_per_second(
    splits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches "pp2 is worth it: 2.11x … cannot be told from it: single", which is faster."""
    assert main([str(splits)]) == 0
    printed = capsys.readouterr().out
    assert "Which split for tiny_fake on workload jsonl?" in printed
    first, *others = study(read([splits])).verdicts
    assert first.sentence == (
        "Most tokens/s, as measured: single with gemma4_mtp, K=3 (job 0): 800; "
        "pp2: 300 (150 per device)."
    )
    assert [verdict.about for verdict in others] == ["single", "pp2"]
    assert not [verdict for verdict in others if "be told from it" in verdict.sentence]
    page = check_page((splits / "study.html").read_text(encoding="utf-8"))
    assert "Tokens per second by setup" in page.text
    assert "The same baseline ran at" not in page.text


def test_a_run_that_does_not_say_its_split_asks_for_none(splits: Path) -> None:
    """Catches "Which split" of one device now and in an earlier version, which has no such key."""
    divide(splits / "1", "single", time=1.0)
    summary = summary_of(splits / "0")
    del summary["parallelism"]
    (splits / "0" / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    assert study(read([splits])).question == "Which settings for tiny_fake on workload jsonl?"


def test_the_table_of_setups_has_tokens_per_second_per_device(splits: Path) -> None:
    table = block(splits, "Tokens per second by setup").table
    assert table
    cells = [[*line.cells[:2], *line.cells[3:6]] for line in table.lines]
    assert cells == [["single", "1", "800", "800", "600"], ["pp2", "2", "300", "150", "150"]]
    assert [line.is_best for line in table.lines] == [True, False]
    divide(splits / "0", "pp2", time=1.0, pipeline=2)
    made = study(read([splits]))
    titles = [one.title for section in made.sections for one in section.blocks]
    assert "Tokens per second by setup" not in titles
    assert len(made.verdicts) == 1


def test_the_chart_leaves_the_speeds_of_two_splits_as_measured(splits: Path) -> None:
    """Catches speeds over each job's own baseline, times the mean of two different baselines."""
    chart = block(splits, "Throughput of one user and of all").chart
    assert chart
    shown = {mark.title for mark in chart.marks if mark.tag == "circle"}
    assert shown == {
        "gemma4_mtp, K=3 (job 0), single: 667 and 800 tokens/s",
        "without drafts, single: 500 and 600 tokens/s",
        "gemma4_mtp, K=3 (job 1), pp2: 100 and 300 tokens/s",
        "without drafts, pp2: 50 and 150 tokens/s",
    }


def test_outputs_that_diverged_are_not_the_fastest(splits: Path) -> None:
    faster = configure(diverge(copied(splits / "0", "2")), method__name="odd")
    edit(faster, method="odd", output_tokens_per_second=9000.0)
    assert "(job 0): 800; pp2" in study(read([splits])).verdicts[0].sentence


def test_the_tracker_gets_the_fastest_job(splits: Path) -> None:
    found = answers(read([splits]))
    assert found["fastest/all/job"] == "single with gemma4_mtp, K=3 (job 0)"
    assert found["fastest/all/output_tokens_per_second"] == 800.0
    assert {"best/single/job", "best/pp2/job"} <= set(found)


def test_a_split_is_one_column_of_the_settings_that_differ(splits: Path) -> None:
    table = block(splits, "Settings that differ").table
    assert table
    assert list(table.header) == ["run", "parallelism"]
    assert [line.cells[1] for line in table.lines] == ["single", "pp2"]


def test_a_sweep_over_splits_names_them(splits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches {'tensor': 1, 'pipeline': 2, …} in the table and on the page."""
    for job, like in (("2", "0"), ("3", "1")):
        made = copied(splits / like, job, method__num_speculative_tokens=2)
        edit(made, num_speculative_tokens=2)
        for each, drafts in ((like, 3), (job, 2)):
            path = splits / each / "overrides.yaml"
            typed = f"- method.num_speculative_tokens={drafts}\n"
            path.write_text(path.read_text(encoding="utf-8") + typed, encoding="utf-8")
    compare(splits)
    printed = capsys.readouterr().out
    page = check_page((splits / "compare.html").read_text(encoding="utf-8"))
    for text in (printed, page.text):
        assert "'tensor'" not in text
        assert "Jobs by paired speedup, pp2" in text
    assert [group.title for group in read_sweep(splits).groups] == ["single", "pp2"]
    kept = json.loads((splits / "compare.json").read_text(encoding="utf-8"))
    assert kept["rows"][1]["parallelism"]["pipeline"] == 2, "files keep the ranks as numbers"

"""`python -m hydraspec.compare` and `hydraspec.compare`: what is told, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checked_pages import check_page
from studied_runs import change_prompts, copied, edit, edit_rows

import hydraspec
from hydraspec.compare import main
from hydraspec.errors import ConfigurationError
from hydraspec.study.compare import section
from hydraspec.study.group_blocks import by_category
from hydraspec.study.groups import read


@pytest.fixture
def runs(studied: Path) -> Path:
    """A folder with the runs `good` (K=3), `bad` (K=3, no draft accepted) and `none`."""
    for job, name in enumerate(("bad", "good", "none")):
        (studied / str(job)).rename(studied / name)
    return studied


def overall(found: dict[str, Any], measure: str) -> dict[str, Any]:
    """The figure over all requests of the one job beside the reference."""
    (job,) = (job for job in found["jobs"] if job["versus"])
    (figure,) = (f for f in job["versus"] if (f["measure"], f["category"]) == (measure, None))
    return dict(figure)


def test_what_is_told_of_two_runs(runs: Path) -> None:
    """The first folder is the reference, whichever is faster."""
    found = hydraspec.compare([runs / "good", runs / "bad"])
    assert found["reference"] == "good"
    speed = overall(found, "speedup")
    assert speed["says"] == "worse"
    assert speed["ratio"] == pytest.approx(speed["value"] / speed["reference_value"])
    assert overall(found, "acceptance_length")["says"] == "worse"
    assert overall(found, "accuracy")["says"] == "cannot_tell"
    assert [job["rank"] for job in found["jobs"]] == [1, 2]
    assert "bad" in found["verdicts"][0]
    hydraspec.compare([runs / "good", runs / "bad"], write=runs / "out")
    page = (runs / "out" / "compare.html").read_text(encoding="utf-8")
    assert '<div class="card answer bad">' in page
    text = check_page(page).text
    assert "Against the reference, gemma4_mtp, K=3 (job good)" in text
    assert "eagle3, K=3 (job bad) is slower: ratio 0." in text
    assert found["answer"]["sentence"].split(" As good")[0] in text
    assert "Use gemma4_mtp with K=3: " in text
    turned = hydraspec.compare([runs / "bad", runs / "good"])
    assert turned["reference"] == "bad"
    assert overall(turned, "speedup")["says"] == "better"
    assert overall(turned, "speedup")["ratio"] == pytest.approx(1 / speed["ratio"])


def test_the_requests_that_lost_most_come_first(runs: Path) -> None:
    def slow_down(row: dict[str, Any]) -> None:
        row["decode_ms"] *= 3 if row["id"] == "task-2" else 1

    edit_rows(copied(runs / "good", "slow", engine__max_num_seqs=7), slow_down)
    found = hydraspec.compare([runs / "good", runs / "slow"], write=runs / "out")
    (slow,) = (job for job in found["jobs"] if job["job"] == "slow")
    assert slow["label"] == "gemma4_mtp, K=3, max_num_seqs=7"
    first, second, *_ = slow["slowest_requests"]
    assert first["id"] == "task-2"
    assert first["speedup_ratio"] == pytest.approx(1 / 3)
    assert second["speedup_ratio"] == pytest.approx(1)
    page = check_page((runs / "out" / "compare.html").read_text(encoding="utf-8"))
    assert "Requests that lost most" in page.text


def test_method_none_is_its_own_baseline(runs: Path) -> None:
    found = hydraspec.compare([runs / "none", runs / "good"])
    (none,) = (job for job in found["jobs"] if job["job"] == "none")
    assert none["speedup"]["mean"] == 1.0
    assert none["acceptance_length"] is None


def test_a_run_and_its_repeat_are_the_same(runs: Path) -> None:
    """Two runs that differ in nothing are compared; beside a third job they are pooled."""
    again = copied(runs / "good", "again", seed=7)
    found = hydraspec.compare([runs / "good", again])
    assert len(found["jobs"]) == 2
    assert overall(found, "speedup")["says"] == "cannot_tell"
    assert "the same" in overall(found, "speedup")["sentence"]
    pooled = hydraspec.compare([runs / "good", again, runs / "bad"])
    assert sorted(len(job["folders"]) for job in pooled["jobs"]) == [1, 2]


def test_repeats_do_not_stand_for_prompts(runs: Path) -> None:
    """Catches an acceptance interval that narrows with each repeat of the same outputs."""
    repeats = [copied(runs / "good", f"again{i}", seed=i + 1) for i in range(3)]
    for run in (runs / "good", *repeats):
        edit_rows(
            run, lambda row: row.update(num_drafts=row["num_drafts"] + int(row["id"][-1]) % 2)
        )
    once = hydraspec.compare([runs / "good", runs / "bad"])
    pooled = hydraspec.compare([runs / "good", *repeats, runs / "bad"])
    for measure in ("acceptance_length", "speedup"):
        first, second = overall(once, measure), overall(pooled, measure)
        assert second["num_requests"] == first["num_requests"]
        assert second["ci95"] == pytest.approx(first["ci95"])


def test_a_folder_of_runs_stands_for_all_and_files_are_written(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_rows(runs / "bad", lambda row: row.update(category="<i>odd</i>|"))
    edit_rows(runs / "good", lambda row: row.update(category="<i>odd</i>|"))
    assert main([str(runs), "--write", str(runs / "out")]) == 0
    printed = capsys.readouterr().out
    assert "against the reference" in printed
    assert "Speedup / acceptance length by category" in printed
    page = check_page((runs / "out" / "compare.html").read_text(encoding="utf-8"))
    assert "<i>odd</i>|" in page.text
    assert sorted(page.links) == [f"../{name}/report.html" for name in ("bad", "good", "none")]
    names = {path.name for path in (runs / "out").iterdir()}
    assert names == {"compare.json", "compare.csv", "compare.md", "compare.html"}
    table = (runs / "out" / "compare.md").read_text(encoding="utf-8")
    assert "\\<i>odd\\</i>\\|" in table


REFUSED = {
    "no such folder": (lambda runs: [runs / "nowhere"], "nowhere: does not exist"),
    "a file": (lambda runs: [runs / "good" / "env.json"], "env.json: is no folder"),
    "an empty folder": (lambda runs: [_made(runs / "empty")], "empty: holds no summary.json"),
    "a benchmark": (lambda runs: [_benchmark(runs / "b")], "b: holds a benchmark, whose parts"),
    "a benchmark's command": (lambda runs: [_benchmark(runs / "a b")], "/a b'\n"),
    "one run": (lambda runs: [runs / "good"], "is one run"),
    "the same run twice": (lambda runs: [runs / "good", runs / "good"], "is one run"),
    "without a baseline": (
        lambda runs: [runs / "bad", edit(runs / "good", baseline=None)],
        "good: has no baseline",
    ),
    "another target": (
        lambda runs: [runs / "bad", edit(runs / "good", target="other")],
        "other target: tiny_fake and other",
    ),
    "another temperature": (
        lambda runs: [runs / "bad", copied(runs / "good", "warm", sampling__temperature=0.7)],
        "other sampling: sampling.temperature=0.0 and sampling.temperature=0.7",
    ),
    "other prompts": (
        lambda runs: [runs / "bad", change_prompts(runs / "good")],
        "other prompts: request 'task-",
    ),
    "a cut summary": (
        lambda runs: [runs / "bad", _cut(runs / "good" / "summary.json")],
        "summary.json cannot be read",
    ),
    "cut requests": (
        lambda runs: [runs / "bad", _cut(runs / "good" / "requests.jsonl", 2)],
        "cannot be read: requests.jsonl, line 3, column ",
    ),
    "a number as method": (
        lambda runs: [runs / "bad", edit(runs / "good", method=5)],
        "good: summary.json: method is 5: damaged",
    ),
    "damaged step costs": (
        lambda runs: [runs / "bad", _cut(runs / "good" / "step_costs.json")],
        "step_costs.json cannot be read",
    ),
    "of an older version": (
        lambda runs: [runs / "bad", _older(runs / "good")],
        "decode_ms is missing: damaged, or of an older hydraspec",
    ),
}


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _benchmark(folder: Path) -> Path:
    _made(folder)
    (folder / "bench.json").write_text("{}")
    return folder


def _older(run: Path) -> Path:
    return edit_rows(run, lambda row: row.pop("decode_ms"))


def _cut(file: Path, num_lines: int = 0) -> Path:
    """Keep 50 characters after so many lines."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    rest = "".join(lines[num_lines:])[:50]
    file.write_text("".join(lines[:num_lines]) + rest, encoding="utf-8")
    return file.parent


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compared_is_one_message(
    case: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders, says = REFUSED[case]
    assert main([str(folder) for folder in folders(runs)]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert [line.split(":")[0] for line in said.splitlines()] == [
        "hydraspec.compare",
        "  allowed",
        "  to do",
    ]


def test_an_interrupted_run_is_compared_where_both_finished(runs: Path) -> None:
    path = runs / "good" / "requests.jsonl"
    path.write_text("".join(path.read_text(encoding="utf-8").splitlines(True)[:5]), "utf-8")
    edit(runs / "good", num_requests=5, status="interrupted")
    assert overall(hydraspec.compare([runs / "bad", runs / "good"]), "speedup")["num_requests"] == 5


def test_help_and_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "request by request" in capsys.readouterr().out
    assert main([]) == 2
    assert "arguments are required: FOLDER\n  allowed: " in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="a list of folders"):
        hydraspec.compare("outputs")


def test_the_module_of_the_command_can_be_called(runs: Path) -> None:
    """Catches `hydraspec.compare(...)` that fails once `hydraspec.compare` was imported."""
    import importlib

    function = hydraspec.compare
    module: Any = importlib.import_module("hydraspec.compare")
    try:
        assert module([runs / "good", runs / "bad"])["reference"] == "good"
        assert hydraspec.compare([runs / "good", runs / "bad"])["reference"] == "good"
    finally:
        hydraspec.compare = function


def test_each_category_says_which_job_is_fastest_in_it(runs: Path) -> None:
    """Catches marks of the fastest job over all requests in every category, and charts of several
    loads on one page that do not say whose they are."""
    even = {"task-0": "a", "task-1": "b"}
    for name in ("good", "bad"):
        edit_rows(runs / name, lambda row: row.update(category=even.get(row["id"], "a")))

    def halve(row: dict[str, Any]) -> None:
        row["decode_ms"] /= 1 if row["category"] == "a" else 100

    edit_rows(runs / "bad", halve)
    groups = read([runs / "good", runs / "bad"]).groups
    found = by_category(groups[0])
    assert found is not None
    assert found.table is not None
    header, *lines = found.table.cells
    marked = {
        scope: [line[0].split(" (")[1][:-1] for line in lines if line[place].startswith("* ")]
        for place, scope in enumerate(header)
        if place
    }
    assert marked["b"] == ["job bad"]
    assert [len(jobs) for jobs in marked.values()] == [1, 1, 1]
    assert marked["a"] == ["job good"]
    titles = [b.title for b in section(replace(groups[0], load="concurrency 4"), "Jobs").blocks]
    assert titles[1] == "Jobs"
    assert all(title.endswith(", concurrency 4") for title in titles if title != "Jobs")

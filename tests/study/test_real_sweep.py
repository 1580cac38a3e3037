"""A real sweep through every path: its page, its W&B report, and what W&B's own reader finds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checked_pages import check_page
from wandb_reader import inspected

SWEEP = [
    *("-m", "target=tiny_gemma4,tiny_qwen3", "method=none,eagle3,peagle"),
    *("method.num_speculative_tokens=2,4", "workload.limit=6", "sampling.max_tokens=16"),
    *("tracker.report=true", "tracker.tags=[night]"),
]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "sweep"
    command = [sys.executable, "-m", "hydraspec", *SWEEP, f"hydra.sweep.dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    asked = (
        "Which drafter and number of draft tokens for tiny_gemma4 and tiny_qwen3 on workload tiny?"
    )
    assert asked in done.stdout
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_the_page(sweep: Path) -> None:
    page = check_page((sweep / "study.html").read_text(encoding="utf-8"))
    assert len(page.links) == 10, "two equal jobs of method=none ran once on each target"
    assert all((sweep / link).is_file() for link in page.links)
    said = "All 4 jobs with drafts: identical: all 6 outputs equal the baseline's"
    assert page.text.count(said) == 2


@pytest.mark.slow
def test_the_report_is_over_the_runs_that_were_recorded(sweep: Path) -> None:
    wr: Any = pytest.importorskip("wandb_workspaces.reports.v2")
    made = json.loads((sweep / "study.json").read_text(encoding="utf-8"))
    report = wr.Report._from_model(wr.internal.ReportViewspec.model_validate(made))
    assert report.project == "hydraspec"
    ids: dict[str, set[str]] = {}
    for folder in sweep.glob("[0-9]*/wandb"):
        target = json.loads((folder.parent / "summary.json").read_text(encoding="utf-8"))["target"]
        ids.setdefault(target, set()).add(inspected(folder)["run_id"])
    assert [len(of) for of in ids.values()] == [5, 5]
    sections: dict[str, list[str]] = {}
    title = ""
    for block in report.blocks:
        title = block.text if isinstance(block, wr.H1) else title
        if isinstance(block, wr.PanelGrid):
            sections.setdefault(title, []).append(str(block.runsets[0].filters))
    assert set(sections) == {*(f"target {name}" for name in ids), "All runs"}
    for section, filters in sections.items():
        for target, of in ids.items():
            belongs = section in (f"target {target}", "All runs")
            assert all((run_id in each) == belongs for run_id in of for each in filters)


@pytest.mark.slow
def test_the_offline_runs(sweep: Path) -> None:
    """Names, tags, notes, the environment, and every figure of the files under its own name."""
    names = []
    for folder in sorted(sweep.glob("[0-9]*/wandb")):
        found = inspected(folder)
        names.append(found["name"])
        summary = json.loads((folder.parent / "summary.json").read_text(encoding="utf-8"))
        logged = found["summary"]
        assert found["state"] == "finished"
        own_tags = {summary[key] for key in ("target", "method", "engine")}
        assert set(found["tags"]) == {"night", *own_tags}
        assert found["config"]["environment"]["device"] == "cpu"
        assert "bench" not in found["config"]
        assert logged["requests"]["nrows"] == 6
        assert logged["lossless/verdict"] == summary["lossless"]["verdict"]
        if summary["method"] == "none":
            continue
        assert found["notes"] == summary["assessment"]["sentence"]
        rates = summary["acceptance_rate_per_position"]
        for i, rate in enumerate(rates):
            assert logged[f"acceptance_rate_per_position/{i}"] == pytest.approx(rate)
        own = summary["baseline"]["output_tokens_per_second"]
        assert logged["baseline/output_tokens_per_second"] == pytest.approx(own)
    assert len(set(names)) == len(names)
    assert "tiny_qwen3, peagle, K=4" in names
    last = inspected(sweep / "wandb")
    assert last["name"] == f"summary of {'/'.join(sweep.parts[-2:])}"
    assert last["summary"]["jobs"]["nrows"] == 10

"""The comparison of a sweep: table, compare.json and compare.html."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from checked_pages import check_page
from fake_engine import FakeEngine
from rich.console import Console

from hydraspec.config.schema import MethodConfig, RunConfig
from hydraspec.lab import run as run_module
from hydraspec.report.compare import compare, read

Use = Callable[[FakeEngine], FakeEngine]


@pytest.fixture
def sweep(config: RunConfig, use_engine: Use, tmp_path: Path) -> Path:
    """Jobs 0 to 3: K=1 and K=3 of a method, plain decoding, and an equal job that took it over."""
    folder = tmp_path / "sweep"
    for job, (method, drafts) in enumerate([("gemma4_mtp", 1), ("gemma4_mtp", 3), ("none", 0)]):
        config.method = MethodConfig(name=method, num_speculative_tokens=drafts)
        use_engine(FakeEngine(method=method, num_speculative_tokens=drafts))
        overrides = [f"method={method}", f"method.num_speculative_tokens={max(drafts, 1)}"]
        run_module.run(config, run_dir=folder / str(job), overrides=overrides)
    copied = json.loads((folder / "2" / "summary.json").read_text(encoding="utf-8"))
    (folder / "3").mkdir()
    text = json.dumps(copied | {"reused_from": "2"})
    (folder / "3" / "summary.json").write_text(text, encoding="utf-8")
    (folder / "4").mkdir()
    return folder


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
    assert page.links == ["0/report.html", "1/report.html", "2/report.html"]


def test_best_is_marked_for_each_setting_around_the_method(sweep: Path) -> None:
    """Catches one mark for a sweep over concurrency, where the largest is always the fastest."""
    for job, concurrency in (("0", 1), ("1", 4), ("2", 1)):
        path = sweep / job / "summary.json"
        summary = json.loads(path.read_text(encoding="utf-8")) | {"concurrency": concurrency}
        path.write_text(json.dumps(summary), encoding="utf-8")
        typed = f"- method=x\n- workload.concurrency={concurrency}\n"
        (sweep / job / "overrides.yaml").write_text(typed, encoding="utf-8")
    comparison = read(sweep)
    assert comparison.columns == ["method", "num_speculative_tokens", "concurrency"]
    assert [row.settings["concurrency"] for row in comparison.rows] == [1, 4, 1]
    assert [row.is_best for row in comparison.rows].count(True) == 1
    assert not comparison.rows[1].is_best


def test_compare_of_nothing(tmp_path: Path) -> None:
    console = Console(record=True, width=160)
    compare(tmp_path, console=console)
    assert "nothing to compare" in console.export_text()
    assert list(tmp_path.iterdir()) == []

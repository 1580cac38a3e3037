"""report.html and compare.html: whole, self-contained, and safe from what users write."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Behaviour, FakeEngine
from rich.console import Console

from hydraspec.config.schema import MethodConfig, RunConfig
from hydraspec.lab import run as run_module
from hydraspec.report.compare import compare, read

Use = Callable[[FakeEngine], FakeEngine]
Run = Callable[[], dict[str, Any]]
VOID = {"meta", "line", "rect", "path", "br"}


class Checker(HTMLParser):
    """Collects text, and notes tags that are not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.problems: list[str] = []
        self.text = ""
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID and (not self.open or self.open.pop() != tag):
            self.problems.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def check_page(page: str) -> Checker:
    checked = Checker(page)
    assert checked.problems == []
    assert checked.open == []
    assert not checked.tags & {"script", "link", "img", "iframe"}
    assert not re.search(r"https?://|@import|url\(", page)
    assert "nan" not in re.findall(r'="([^"]*)"', page)
    return checked


def report(tmp_path: Path) -> Checker:
    return check_page((tmp_path / "run" / "report.html").read_text(encoding="utf-8"))


def test_the_report_shows_the_verdict_and_escapes_prompts(
    use_engine: Use, run_config: Run, tmp_path: Path
) -> None:
    """Catches a prompt that becomes markup: the workload's prompts hold <b>."""
    use_engine(FakeEngine(warnings=["beware of <i>this</i>"]))
    run_config()
    page = report(tmp_path)
    for text in (
        "Identical",
        "Speedup",
        "1.33",
        "Acceptance length by category",
        "Exact match",
        "rows that verify drafts are not free",
        "beware of <i>this</i>",
        "2 + 3 = <b>?</b>",
        "device is cpu",
    ):
        assert text in page.text


def test_accepted_drafts_are_marked(use_engine: Use, run_config: Run, tmp_path: Path) -> None:
    """The fake drafter has 3, 0 and 2 of its drafts accepted in each of six requests."""
    use_engine(FakeEngine())
    run_config()
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert page.count("class=accepted") == 6 * (3 + 0 + 2)
    assert page.count('<b title="token') == 6 * 9


def test_reports_of_runs_with_little_to_show(
    config: RunConfig, use_engine: Use, run_config: Run, tmp_path: Path
) -> None:
    use_engine(FakeEngine(Behaviour(error_indices=set(range(6)))))
    run_config()
    assert "failed" in report(tmp_path).text
    config.method = MethodConfig(name="none", num_speculative_tokens=0)
    use_engine(FakeEngine(method="none", num_speculative_tokens=0))
    run_config()
    assert "no speculation" in report(tmp_path).text
    config.method = MethodConfig(name="gemma4_mtp", num_speculative_tokens=3)
    use_engine(FakeEngine(Behaviour(raise_at_step={2: KeyboardInterrupt()})))
    with pytest.raises(KeyboardInterrupt):
        run_config()
    assert "interrupted" in report(tmp_path).text


def test_a_report_of_a_divergence(use_engine: Use, run_config: Run, tmp_path: Path) -> None:
    use_engine(FakeEngine(Behaviour(wrong_from={2: 1})))
    run_config()
    text = report(tmp_path).text
    assert "Diverged" in text
    assert "task-2, 1" in text


# ---------------------------------------------------------------- sweeps


@pytest.fixture
def sweep(config: RunConfig, use_engine: Use, tmp_path: Path) -> Path:
    """Jobs 0 to 3: K=1 and K=3 of a method, plain decoding, and an equal job that took it over."""
    folder = tmp_path / "sweep"
    for job, (method, drafts) in enumerate([("gemma4_mtp", 1), ("gemma4_mtp", 3), ("none", 0)]):
        config.method = MethodConfig(name=method, num_speculative_tokens=drafts)
        use_engine(FakeEngine(method=method, num_speculative_tokens=drafts))
        overrides = [f"method={method}", f"method.num_speculative_tokens={max(drafts, 1)}"]
        run_module.run(config, run_dir=folder / str(job), overrides=overrides, resolved={})
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

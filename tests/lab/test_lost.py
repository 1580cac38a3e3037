"""Requests as they are written while a run lasts, and what is saved of a run whose process is
lost."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Behaviour, FakeEngine
from records import json_lines

import hydraspec
from hydraspec.config.schema import GoodputConfig, RunConfig
from hydraspec.lab.folder import RunFolder
from hydraspec.lab.lost import save_finished
from hydraspec.metrics.run_files import UNSAVED
from hydraspec.types import ConfigurationError, PrefixCaching

Use = Callable[[FakeEngine], FakeEngine]
Run = Callable[[], dict[str, Any]]
NOT_KEPT = ("run_s", "memory_bytes")
GROWN = "grown.jsonl"


class Lost(Exception):
    """What the run ends with, as another process names it."""


LOST = Lost("rank 0 is gone")


@pytest.fixture
def folder(
    config: RunConfig, use_engine: Use, run_config: Run, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Of a run that ended early in its second part, right after a completion; what it had written
    by then is kept."""
    config.workload.goodput = GoodputConfig(ttft_ms=5.0)
    engine = FakeEngine(
        Behaviour(error_indices={2}, num_cached=4, raise_at_step={12: LOST}),
        prefix_caching=PrefixCaching(block_size=4, has_draft_kv=True),
    )
    use_engine(engine)
    write_requests = RunFolder.write_requests

    def keep_grown(self: RunFolder, rows: Sequence[Any]) -> None:
        shutil.copy(self.path / "requests.jsonl", self.path / GROWN)
        write_requests(self, rows)

    with monkeypatch.context() as lost:
        lost.setattr(RunFolder, "remove_unsaved", lambda self: None)
        lost.setattr(RunFolder, "write_requests", keep_grown)
        with pytest.raises(Lost):
            run_config()
    return Path(config.workload.path or "").parent / "run"


def save(config: RunConfig, folder: Path, since_s: float = 0.0) -> None:
    save_finished(
        config,
        run_dir=folder,
        overrides=["method=gemma4_mtp"],
        error=LOST,
        since_s=since_s,
        quiet=True,
    )


def read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summary, json_lines(folder / "requests.jsonl")


def forget(folder: Path) -> None:
    """Leave what a killed process would."""
    for name in ("summary.json", "report.html"):
        (folder / name).unlink()
    (folder / GROWN).rename(folder / "requests.jsonl")


def test_what_is_saved_are_the_figures_that_the_run_itself_would_have(
    config: RunConfig, folder: Path
) -> None:
    """Catches a count, a time or a cache hit that the growing file leaves out."""
    itself, rows = read(folder)
    assert 0 < len(rows) < 6
    assert rows[0]["baseline"]
    assert itself["num_drafts"] > 0
    assert itself["prefix_cache"]["hit_tokens"] > 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    forget(folder)
    save(config, folder)
    saved, saved_rows = read(folder)
    assert saved_rows == rows
    for key in NOT_KEPT:
        itself.pop(key), saved.pop(key)
    for side in (itself, saved, itself["baseline"], saved["baseline"]):
        assert side["goodput"].pop("requests_per_second") > 0
    assert saved == itself
    assert saved["warnings"][-2] == "the run ended early: Lost: rank 0 is gone"
    count = page.count('class="sample"')
    assert (folder / "report.html").read_text(encoding="utf-8").count('class="sample"') == count
    assert not (folder / UNSAVED).exists()


def test_the_time_of_the_run_is_that_of_its_last_event(config: RunConfig, folder: Path) -> None:
    itself, _ = read(folder)
    forget(folder)
    time.sleep(0.3)
    save(config, folder)
    assert 0 < read(folder)[0]["run_s"] <= itself["run_s"]


def test_a_line_that_was_cut_is_left_out(config: RunConfig, folder: Path) -> None:
    _, rows = read(folder)
    forget(folder)
    file = folder / "requests.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    assert json.loads(lines[-1])["side"] == "method"
    file.write_text("".join(lines)[:-20], encoding="utf-8")
    save(config, folder)
    assert read(folder)[1] == rows[:-1]


def test_a_run_that_was_lost_before_its_first_step_says_so(config: RunConfig, folder: Path) -> None:
    forget(folder)
    (folder / "requests.jsonl").unlink()
    save(config, folder)
    summary, rows = read(folder)
    assert (summary["status"], rows) == ("failed", [])
    assert 0 <= summary["run_s"] < 10


@pytest.mark.parametrize("what", ["not begun", "an older run", "saved already"])
def test_nothing_is_saved_where_nothing_is_known(
    config: RunConfig, folder: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches the results of another run in this one's folder, and a whole run's being lost."""
    since_s = 0.0
    if what != "saved already":
        forget(folder)
    if what == "not begun":
        (folder / UNSAVED).unlink()
    elif what == "an older run":
        since_s = time.time() + 60
    before = {file: file.read_bytes() for file in folder.iterdir() if file.name != UNSAVED}
    save(config, folder, since_s)
    after = {file: file.read_bytes() for file in folder.iterdir() if file.name != UNSAVED}
    assert after == before
    assert not caplog.records


def test_what_cannot_be_read_is_no_error(
    config: RunConfig, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The failure of the rank is what must be told."""
    forget(folder)
    Path(config.workload.path or "").unlink()
    save(config, folder)
    assert "what had finished could not be saved" in caplog.text
    assert (folder / UNSAVED).exists()


def test_a_disk_that_is_full_for_a_while_is_no_error(
    config: RunConfig, use_engine: Use, run_config: Run, tmp_path: Path
) -> None:
    """The rows are written anew when the run ends."""
    use_engine(FakeEngine())
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "requests.jsonl").symlink_to("/dev/full")
    assert run_config()["status"] == "ok"
    assert len(read(tmp_path / "run")[1]) == 6


def test_a_killed_run_leaves_every_request_that_ended(config: RunConfig, folder: Path) -> None:
    """Catches rows that a process killed by SIGKILL takes along, and a folder of such a run that
    is read as that of a whole one."""
    _, rows = read(folder)
    forget(folder)
    lines = json_lines(folder / "requests.jsonl")
    grown = {row["id"]: row for row in lines if row["side"] == "method"}
    assert len(lines) > len(grown) == len(rows)
    for row in rows:
        for key in ("prompt_token_ids", "output_token_ids", "text", "error", "num_drafts"):
            assert grown[row["id"]][key] == row[key]
    with pytest.raises(ConfigurationError, match=r"holds no summary\.json"):
        hydraspec.compare([folder])

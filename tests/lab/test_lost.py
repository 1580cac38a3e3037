"""What a run had finished whose process is lost: its journal, and what is saved from it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Behaviour, FakeEngine

from hydraspec.config.schema import ParallelismConfig, RunConfig
from hydraspec.lab.folder import RunFolder
from hydraspec.lab.lost import save_finished
from hydraspec.metrics.run_files import JOURNAL
from hydraspec.types import PrefixCaching

Use = Callable[[FakeEngine], FakeEngine]
Run = Callable[[], dict[str, Any]]
NOT_KEPT = ("run_s", "memory_bytes")


class Lost(Exception):
    """What the run ends with, as another process names it."""


LOST = Lost("rank 0 is gone")


@pytest.fixture
def folder(
    config: RunConfig, use_engine: Use, run_config: Run, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Of a run over two ranks that ended early in its second part, right after a completion, and
    kept its journal."""
    config.parallelism = ParallelismConfig(name="tp2", tensor=2)
    engine = FakeEngine(
        Behaviour(error_indices={2}, num_cached=4, raise_at_step={12: LOST}),
        prefix_caching=PrefixCaching(block_size=4, has_draft_kv=True),
    )
    use_engine(engine)
    with monkeypatch.context() as lost:
        lost.setattr(RunFolder, "remove_journal", lambda self: None)
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
    lines = (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    return summary, [json.loads(line) for line in lines]


def forget(folder: Path) -> None:
    for name in ("summary.json", "requests.jsonl", "report.html"):
        (folder / name).unlink()


def test_the_journal_gives_the_figures_that_the_run_itself_would_have(
    config: RunConfig, folder: Path
) -> None:
    """Catches a count, a time or a cache hit that the journal leaves out."""
    itself, rows = read(folder)
    assert 0 < len(rows) < 6
    assert rows[0]["baseline"]
    assert itself["num_drafts"] > 0
    assert itself["prefix_cache"]["hit_tokens"] > 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    forget(folder)
    save(config, folder)
    from_journal, from_journal_rows = read(folder)
    assert from_journal_rows == rows
    for key in NOT_KEPT:
        itself.pop(key), from_journal.pop(key)
    assert from_journal == itself
    assert from_journal["warnings"][-2] == "the run ended early: Lost: rank 0 is gone"
    count = page.count('class="sample"')
    assert (folder / "report.html").read_text(encoding="utf-8").count('class="sample"') == count
    assert not (folder / JOURNAL).exists()


def test_the_time_of_the_run_is_that_of_its_last_event(config: RunConfig, folder: Path) -> None:
    itself, _ = read(folder)
    forget(folder)
    time.sleep(0.3)
    save(config, folder)
    assert 0 < read(folder)[0]["run_s"] <= itself["run_s"]


def test_a_line_that_was_cut_is_left_out(config: RunConfig, folder: Path) -> None:
    _, rows = read(folder)
    forget(folder)
    text = (folder / JOURNAL).read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if "so the answer" in line)
    (folder / JOURNAL).write_text("".join(lines[: last + 1])[:-20], encoding="utf-8")
    save(config, folder)
    assert read(folder)[1] == rows[:-1]


def test_a_run_that_was_lost_before_its_first_step_says_so(config: RunConfig, folder: Path) -> None:
    forget(folder)
    first, *_ = (folder / JOURNAL).read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / JOURNAL).write_text(first, encoding="utf-8")
    save(config, folder)
    summary, rows = read(folder)
    assert (summary["status"], rows) == ("failed", [])
    assert 0 <= summary["run_s"] < 10


@pytest.mark.parametrize("what", ["no journal", "an older journal", "saved already", "empty"])
def test_nothing_is_saved_where_nothing_is_known(
    config: RunConfig, folder: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches the results of another run in this one's folder, and a whole run's being lost."""
    since_s = 0.0
    if what != "saved already":
        forget(folder)
    if what == "no journal":
        (folder / JOURNAL).unlink()
    elif what == "an older journal":
        since_s = time.time() + 60
    elif what == "empty":
        (folder / JOURNAL).write_text("", encoding="utf-8")
    before = {file: file.read_bytes() for file in folder.iterdir() if file.name != JOURNAL}
    save(config, folder, since_s)
    after = {file: file.read_bytes() for file in folder.iterdir() if file.name != JOURNAL}
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
    assert (folder / JOURNAL).exists()


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_run_that_ends_well_leaves_no_journal(
    config: RunConfig, use_engine: Use, run_config: Run, tmp_path: Path, tensor: int
) -> None:
    config.parallelism = ParallelismConfig(name="tp2", tensor=tensor)
    use_engine(FakeEngine())
    assert run_config()["status"] == "ok"
    assert not (tmp_path / "run" / JOURNAL).exists()


def test_a_disk_that_is_full_ends_the_journal_alone(
    config: RunConfig, use_engine: Use, run_config: Run, tmp_path: Path
) -> None:
    config.parallelism = ParallelismConfig(name="tp2", tensor=2)
    use_engine(FakeEngine())
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / JOURNAL).symlink_to("/dev/full")
    assert run_config()["status"] == "ok"

"""Runs recorded at commit 3b51836, an earlier version: what is read after runs still reads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hydraspec.cli.main import main

RECORDED = (
    Path(__file__).parent / "recorded_runs"
)  # eagle3 with K=2, method=none, and their baseline
COMMANDS = {
    "compare": (["."], "none (job 1) against eagle3, K=2 (job 0), speedup"),
    "report": (["."], "for tiny_gemma4 on workload tiny?"),
    "gate": (["gate.json", "0", "1"], "No regression"),
    "replay": (["0"], "acceptance"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_run_folder_of_an_earlier_version_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a key that only this version's folders have, read as if all had it."""
    monkeypatch.chdir(shutil.copytree(RECORDED, tmp_path / "sweep"))
    arguments, says = COMMANDS[name]
    assert main(arguments, verb=name) == 0
    assert says in capsys.readouterr().out


def test_a_baseline_is_written_as_the_earlier_version_wrote_it(tmp_path: Path) -> None:
    """Catches keys that are dropped, and lines that all change when a baseline is written again."""
    written = tmp_path / "gate.json"
    assert main(["gate", "--write", str(written), str(RECORDED)]) == 0
    assert written.read_text(encoding="utf-8") == (RECORDED / "gate.json").read_text("utf-8")
    assert json.loads(written.read_text(encoding="utf-8"))["schema_version"] == 1

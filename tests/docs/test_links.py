"""Links of the documents, and the exit statuses that the README lists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hydraspec.errors import CheckpointError, ConfigurationError, WorkloadError
from hydraspec.lab import outcome

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_the_readme_lists_every_exit_status() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = {int(found) for found in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    of_runs = {outcome.OK, outcome.FAILED, outcome.DIVERGED, outcome.INTERRUPTED}
    refusals = (ConfigurationError, CheckpointError, WorkloadError)
    assert listed == of_runs | {refusal.exit_code for refusal in refusals}

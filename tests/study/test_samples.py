"""The requests that the page shows: accepted drafts by their place in the output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine

Use = Callable[[FakeEngine], FakeEngine]
Run = Callable[[], dict[str, Any]]


def test_accepted_drafts_are_marked(use_engine: Use, run_config: Run, tmp_path: Path) -> None:
    """The fake drafter has 3, 0 and 2 of its drafts accepted in each of six requests."""
    use_engine(FakeEngine())
    run_config()
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert page.count("class=accepted") == 6 * (3 + 0 + 2)
    assert page.count('<b title="token') == 6 * 9

"""The notes of a run's engines: logged as they are loaded, kept in the summary, printed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_engine import FakeEngine, NotingEngine

from hydraspec.engine import notes


def test_every_note_of_a_run_is_said_once(
    use_engine: Callable[[FakeEngine], FakeEngine],
    run_config: Callable[[], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches notes that the summary repeats after the log, a later run in this process that says
    nothing of them, and notes that come too late for the log."""
    monkeypatch.setattr(notes, "_logged", set())
    expected = ["a note of both", "a late note", "baseline: a baseline's note"]
    for is_first in (True, False):
        use_engine(NotingEngine())
        summary = run_config()
        assert [text for text in summary["warnings"] if "note" in text] == expected
        seen = capsys.readouterr()
        for text in expected:
            logged = caplog.messages.count(text)
            assert logged == (is_first and text != "a late note")
            assert logged + (seen.out + seen.err).count(f"Warning: {text}") == 1
        caplog.clear()

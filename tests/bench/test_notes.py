"""The notes of a benchmark's engine: its table has none, so that they are all logged."""

from __future__ import annotations

import pytest
from bench_runs import planned
from fake_engine import NotingEngine

from hydraspec.bench import measure as bench_measure
from hydraspec.engine import notes


def test_every_note_of_a_part_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches notes that are in bench.json alone, and those that came while it measured."""
    monkeypatch.setattr(notes, "_logged", set())
    monkeypatch.setattr(bench_measure.factory, "build_engine", lambda config: NotingEngine())
    part = bench_measure.measure(planned())
    assert part["warnings"] == ["a note of both", "a late note"]
    assert [text for text in caplog.messages if "note" in text] == part["warnings"]

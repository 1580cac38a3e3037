"""Notes of engines: callers log them, once."""

from __future__ import annotations

import ast
import logging

import pytest
from fake_engine import FakeEngine, make_info
from source_tree import SOURCES, parsed

from hydraspec import factory
from hydraspec.engine import notes
from hydraspec.engine.base import notes_of


@pytest.fixture(autouse=True)
def logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "_logged", set())


def test_notes_of_a_baseline_alone_are_marked() -> None:
    info, baseline = make_info(warnings=["a", "b", "a"]), make_info(warnings=["b", "c"])
    assert notes_of(info) == ["a", "b"]
    assert notes_of(info, baseline) == ["a", "b", "baseline: c"]


def test_a_note_is_logged_once_in_a_process(caplog: pytest.LogCaptureFixture) -> None:
    """Catches a caller that repeats what an earlier engine's caller logged."""
    engine = FakeEngine(warnings=["a"])
    assert factory.log_notes(engine) == ["a"]
    assert factory.log_notes(engine) == []
    engine.info.warnings.append("b % of a step")
    other = FakeEngine(warnings=["c"])
    assert factory.log_notes(engine, other) == ["b % of a step", "baseline: c"]
    assert caplog.messages == ["a", "b % of a step", "baseline: c"]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_a_note_that_a_quiet_caller_dropped_is_logged_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    info = make_info(warnings=["a"])
    with caplog.at_level(logging.ERROR, "hydraspec"):
        assert notes.log_notes(info) == []
    assert notes.log_notes(info) == ["a"]
    assert caplog.messages == ["a"]


def calls_of(path: str) -> set[str]:
    """The functions of the factory that a file calls."""
    return {
        node.func.attr
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "factory"
    }


def test_who_builds_an_engine_logs_its_notes() -> None:
    """Catches a new command that loses the notes of the engines that it builds."""
    builders = {path for path in SOURCES if "build_engine" in calls_of(path)}
    assert "hydraspec/lab/run.py" in builders
    # This one hands its engine to OwnEngine, which logs.
    (through,) = {path for path in builders if "log_notes" not in calls_of(path)}
    assert through == "hydraspec/cli/from_python.py"
    assert "log_notes" in calls_of("hydraspec/cli/own_engine.py")

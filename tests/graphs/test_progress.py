"""A bar while graphs are captured: on a terminal below the log's lines, elsewhere none."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hydraspec.graphs.progress import progress_bar

log = logging.getLogger("hydraspec.graphs.test")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def logged_to(stream: io.StringIO) -> Iterator[logging.StreamHandler]:  # type: ignore[type-arg]
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    try:
        yield handler
    finally:
        logging.getLogger().removeHandler(handler)


def captured_to(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with logged_to(stream) as handler:
        with progress_bar("step graphs", 2) as advance:
            for number in (1, 2):
                log.warning("graph %d", number)
                advance()
        assert handler.stream is stream
        assert sys.stderr is stream


def test_a_terminal_has_a_bar_and_whole_log_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    captured_to(terminal, monkeypatch)
    shown = terminal.getvalue()
    assert "2/2" in shown
    lines = [line.split("\x1b[2K")[-1].strip() for line in shown.splitlines()]
    assert "graph 1" in lines
    assert "graph 2" in lines


def test_a_file_has_the_log_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    captured_to(file, monkeypatch)
    assert file.getvalue() == "graph 1\ngraph 2\n"


def test_an_error_leaves_the_terminal_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)

    def fail() -> None:
        with progress_bar("step graphs", 2):
            raise ZeroDivisionError

    with logged_to(terminal) as handler:
        with pytest.raises(ZeroDivisionError):
            fail()
        assert handler.stream is terminal
    assert sys.stderr is terminal

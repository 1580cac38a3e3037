"""A progress bar below the log's lines, where stderr is a terminal; elsewhere the lines alone."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

log = logging.getLogger(__name__)


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar during the block, on a terminal; yields a call that counts one more of `total`."""
    console = Console(stderr=True)
    if not console.is_terminal or not log.isEnabledFor(logging.WARNING):  # a quiet run
        yield lambda: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    # Drawn on request only: no second thread during a capture.
    bar = Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, auto_refresh=False
    )
    task = bar.add_task(what, total=total)
    terminal = sys.stderr
    with bar, _logged_above(terminal):
        yield lambda: bar.update(task, advance=1, refresh=True)


@contextmanager
def _logged_above(terminal: object) -> Iterator[None]:
    """Send log lines to the present sys.stderr: above the bar, which they would else break up."""
    moved = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is terminal
    ]
    for handler in moved:
        handler.setStream(sys.stderr)
    try:
        yield
    finally:
        for handler in moved:
            handler.setStream(terminal)

"""Texts of engines that are logged once in a process."""

from __future__ import annotations

import logging

from hydraspec.engine.base import EngineInfo, notes_of

log = logging.getLogger(__name__)
_logged = set[str]()  # in this process


def log_once(text: str, level: int = logging.INFO) -> bool:
    """Log a text once in this process, even if each of its engines (of a baseline, of a sweep's
    jobs) has reason to. Returns whether this call logged it."""
    if text in _logged or not log.isEnabledFor(level):  # a quiet run's may be logged later
        return False
    _logged.add(text)
    log.log(level, "%s", text)
    return True


def log_notes(info: EngineInfo, baseline: EngineInfo | None = None) -> list[str]:
    """Log the notes of an engine, and of its baseline; returns those that this call logged."""
    return [note for note in notes_of(info, baseline) if log_once(note, logging.WARNING)]

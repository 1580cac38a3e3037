"""The run folder: the names of its files, and how each is written."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from hydraspec.metrics.files import (
    Json,
    cannot_write,
    plain,
    pretty_json,
    write_json_lines,
    write_whole,
)

SUMMARY = "summary.json"
REQUESTS = "requests.jsonl"
STEPS = "steps.jsonl"
TRACE = "trace.jsonl"
ENVIRONMENT = "env.json"
REPORT = "report.html"
CONFIG = "config.yaml"
OVERRIDES = "overrides.yaml"
BENCH = "bench.json"
BENCH_REPORT = "bench.html"
TRACKER = "wandb"
OF_A_RUN = (
    *(STEPS, TRACE, REQUESTS, SUMMARY, REPORT, BENCH, BENCH_REPORT, TRACKER),
    ENVIRONMENT,  # the mark goes last
)


class RunFolder:
    """A folder of one run. Every file is written whole or not at all.

    What an older run left in it is removed first, by name, and only where config.yaml and env.json
    show that it is a run folder.

    Raises:
        OSError: with the path and a remedy, from every method, if it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            if _is_of_a_run(path):
                _clear(path)
        except OSError as error:
            raise cannot_write(path, error) from error

    def write_config(self, resolved: Mapping[str, object], overrides: Sequence[str]) -> None:
        """config.yaml and overrides.yaml."""
        write_whole(self.path / CONFIG, _yaml(resolved))
        write_whole(self.path / OVERRIDES, _yaml(list(overrides)))

    def write_environment(self, environment: Json) -> None:
        """env.json."""
        write_whole(self.path / ENVIRONMENT, pretty_json(environment))

    def write_requests(self, rows: Sequence[Json]) -> None:
        """requests.jsonl."""
        write_json_lines(self.path / REQUESTS, rows)

    def write_summary(self, summary: Json) -> None:
        """summary.json."""
        write_whole(self.path / SUMMARY, pretty_json(summary))

    def write_report(self, page: str) -> None:
        """report.html."""
        write_whole(self.path / REPORT, page)

    def write_bench(self, result: Json, page: str) -> None:
        """bench.json and bench.html."""
        write_whole(self.path / BENCH, pretty_json(result))
        write_whole(self.path / BENCH_REPORT, page)


def _is_of_a_run(path: Path) -> bool:
    """Whether a run wrote its configuration and the versions it ran with here."""
    try:
        environment = json.loads((path / ENVIRONMENT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    versions = environment.get("versions") if isinstance(environment, dict) else None
    ours = isinstance(versions, dict) and "hydraspec" in versions
    return ours and (path / CONFIG).is_file()


def _clear(path: Path) -> None:
    for name in OF_A_RUN:
        entry = path / name
        if entry.is_dir() and not entry.is_symlink():
            if name == TRACKER:
                shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)


def _yaml(value: object) -> str:
    text: str = yaml.safe_dump(plain(value), sort_keys=False, allow_unicode=True)
    return text


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Let a Ctrl-C wait until the files are written; it is raised at the end."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or not callable(signal.getsignal(signal.SIGINT)):  # or ignored already
        yield
        return
    received: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if received:
            raise KeyboardInterrupt

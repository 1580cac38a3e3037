"""The run folder: how each of its files is written. metrics.run_files names the files."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from hydraspec.metrics.files import (
    Json,
    cannot_write,
    json_line,
    plain,
    pretty_json,
    write_json_lines,
    write_whole,
)
from hydraspec.metrics.run_files import (
    BENCH,
    BENCH_REPORT,
    CONFIG,
    COSTS,
    ENVIRONMENT,
    OF_A_RUN,
    OVERRIDES,
    REPORT,
    REQUESTS,
    STEP_COSTS,
    SUMMARY,
    TRACKER,
    UNSAVED,
    read_object,
)

log = logging.getLogger(__name__)


class RunFolder:
    """The folder of one run. Every file is written whole or not at all.

    config.yaml and overrides.yaml are written at once, unless the folder holds an older run: its
    files stay until `replace_older_run`, so that a run which is refused takes nothing away.

    Attributes:
        resolved: the configuration as plain values.
        holds_older_run: whether the folder holds config.yaml and env.json, or bench.json.

    Raises:
        CannotWriteError: with the path and a remedy, from every method, if it cannot be written.
    """

    def __init__(
        self, path: Path, resolved: Mapping[str, object], overrides: Sequence[str]
    ) -> None:
        self.path, self.resolved, self._overrides = path, resolved, overrides
        self._opened = time.time()
        try:
            path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()  # fail before anything is loaded
        except OSError as error:
            raise cannot_write(path, error) from error
        self.holds_older_run = _is_of_a_run(path)
        if not self.holds_older_run:
            self._write_configuration()

    def replace_older_run(self) -> None:
        """Remove the files that an older run left, if one did, and write the configuration."""
        if not self.holds_older_run:
            return
        log.info("%s: the files of an older run are replaced", self.path)
        try:
            _clear(self.path)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        self._write_configuration()
        self.holds_older_run = False

    def _write_configuration(self) -> None:
        write_whole(self.path / CONFIG, _yaml(self.resolved))
        # The file is as old as the run, which reads its workload and checkpoints afterwards.
        os.utime(self.path / CONFIG, (self._opened, self._opened))
        write_whole(self.path / OVERRIDES, _yaml(list(self._overrides)))

    def write_environment(self, environment: Json) -> None:
        """Write env.json."""
        write_whole(self.path / ENVIRONMENT, pretty_json(environment))

    def write_costs(self, costs: Json) -> None:
        """Write costs.json."""
        write_whole(self.path / COSTS, pretty_json(costs))

    def write_step_costs(self, costs: Json) -> None:
        """Write step_costs.json."""
        write_whole(self.path / STEP_COSTS, json_line(costs))

    def write_unsaved(self, beginning: Json) -> None:
        """Write .unsaved.json; see lab.lost."""
        write_whole(self.path / UNSAVED, pretty_json(beginning))

    def remove_unsaved(self) -> None:
        """Remove .unsaved.json, once the run is saved or cannot be saved."""
        with suppress(OSError):
            (self.path / UNSAVED).unlink(missing_ok=True)

    def write_requests(self, rows: Sequence[Json]) -> None:
        """Write requests.jsonl."""
        write_json_lines(self.path / REQUESTS, rows)

    def write_summary(self, summary: Json) -> None:
        """Write summary.json."""
        write_whole(self.path / SUMMARY, pretty_json(summary))

    def write_report(self, page: str) -> None:
        """Write report.html."""
        write_whole(self.path / REPORT, page)

    def write_bench(self, result: Json, page: str) -> None:
        """Write bench.json and bench.html."""
        write_whole(self.path / BENCH, pretty_json(result))
        write_whole(self.path / BENCH_REPORT, page)


def _is_of_a_run(path: Path) -> bool:
    """Returns whether a run wrote its configuration to this folder, and its versions or the figures
    of a benchmark."""
    versions = (read_object(path / ENVIRONMENT) or {}).get("versions")
    is_run = isinstance(versions, dict) and "hydraspec" in versions
    is_bench = (read_object(path / BENCH) or {}).keys() >= {"schema_version", "parts", "ratios"}
    return (is_run or is_bench) and (path / CONFIG).is_file()


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

"""A job as its ranks get it, and the functions of the caller that they need for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydraspec.config import RunConfig, from_dict, to_dict
from hydraspec.parallel.faults import Fault, LostRankError
from hydraspec.parallel.layout import Layout


@dataclass(slots=True, kw_only=True)
class RankJob:
    """A run or benchmark, composed and resolved.

    Attributes:
        overrides: the command line's overrides for the job.
        logging: the configuration of the ranks' log; None where the process that asked for the run
            has its own log.
        verbose: names of loggers, or true, for more of the log.
    """

    config: RunConfig
    folder: Path
    overrides: list[str]
    quiet: bool
    logging: dict[str, Any] | None
    verbose: bool | str | list[str]

    def to_text(self) -> str:
        """The job as JSON."""
        plain = {field: getattr(self, field) for field in self.__slots__}
        folder, config = str(self.folder), to_dict(self.config)
        told = {"config": config, "warnings": self.config.warnings, "folder": folder}
        return json.dumps(plain | told)

    @classmethod
    def of_text(cls, text: str | bytes) -> RankJob:
        """The job of `to_text`."""
        plain = json.loads(text)
        config = from_dict(plain.pop("config"), plain.pop("warnings"))
        return cls(config=config, folder=Path(plain.pop("folder")), **plain)

    @property
    def layout(self) -> Layout:
        """The layout of the job's ranks."""
        axes = self.config.parallelism
        return Layout(tensor=axes.tensor, pipeline=axes.pipeline, data=axes.data)


@dataclass(slots=True, frozen=True, kw_only=True)
class Program:
    """Functions of the command, which ranks call.

    Attributes:
        run: runs a job in this process and returns its summary.
        logged: configures the log while a job runs.
        quietly: logs errors alone during a block.
        save: saves what the first rank had finished of a job, given its fault and start time.
        lost: the error of a job, given its fault and start time.
        tell: writes a message to the terminal.
    """

    run: Callable[[RankJob], dict[str, Any]]
    logged: Callable[[RankJob], AbstractContextManager[None]]
    quietly: Callable[[], AbstractContextManager[None]]
    save: Callable[[RankJob, Fault, float], None]
    lost: Callable[[RankJob, Fault, float], LostRankError]
    tell: Callable[[object], None]

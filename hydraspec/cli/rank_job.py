"""A job as its ranks get it: composed and resolved, as JSON; and what runs it in a process."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.utils import configure_log
from omegaconf import OmegaConf

from hydraspec.cli.compose import Job
from hydraspec.config import RunConfig, from_dict, to_dict
from hydraspec.config.benches import is_bench
from hydraspec.parallel.layout import Layout


@dataclass(slots=True, kw_only=True)
class RankJob:
    """See cli.compose.Job; `logging` and `verbose` are Hydra's, null where a process that called
    `hydraspec.run` has its own log."""

    config: RunConfig
    folder: Path
    overrides: list[str]
    quiet: bool
    logging: dict[str, Any] | None
    verbose: bool | str | list[str]

    @staticmethod
    def text_of(job: Job, *, quiet: bool, logs: bool) -> str:
        """A job as text."""
        hydra, verbose = job.composed.hydra, job.composed.hydra.verbose
        plain = {
            "config": to_dict(job.config),
            "warnings": job.config.warnings,
            "overrides": job.overrides,
            "folder": str(job.folder),
            "quiet": quiet,
            "logging": OmegaConf.to_container(hydra.job_logging, resolve=True) if logs else None,
            "verbose": list(verbose) if OmegaConf.is_list(verbose) else verbose,
        }
        return json.dumps(plain)

    @classmethod
    def of_text(cls, text: str | bytes) -> RankJob:
        """The job of `text_of`."""
        plain = json.loads(text)
        config = from_dict(plain.pop("config"), plain.pop("warnings"))
        return cls(config=config, folder=Path(plain.pop("folder")), **plain)

    def run(self) -> dict[str, Any]:
        """Run it in this process, and return its summary."""
        return runner(self.config)(
            self.config, run_dir=self.folder, overrides=self.overrides, quiet=self.quiet
        )

    def logged(self) -> AbstractContextManager[None]:
        """Configure the log; with `quiet` errors alone are logged for a while."""
        if self.logging is not None:
            configure_log(OmegaConf.create(self.logging), self.verbose)
        return errors_alone_logged() if self.quiet else nullcontext()


def layout_of(config: RunConfig) -> Layout:
    """The layout of a run's ranks."""
    axes = config.parallelism
    return Layout(tensor=axes.tensor, pipeline=axes.pipeline, data=axes.data)


def runner(config: RunConfig) -> Callable[..., dict[str, Any]]:
    """What runs a resolved configuration in this process: a run, or a benchmark."""
    if is_bench(config):
        from hydraspec.bench.run import run
    else:
        from hydraspec.lab.run import run

    return run


@contextmanager
def errors_alone_logged() -> Iterator[None]:
    """The package's log without warnings for a while: they are in the summary too."""
    logger = logging.getLogger("hydraspec")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

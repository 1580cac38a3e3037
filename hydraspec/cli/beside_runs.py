"""What commands share that load what a run loads: how they end, and their job's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from hydraspec.cli.complain import complain
from hydraspec.cli.compose import Job
from hydraspec.cli.folders import RUN_DIR, claimed, folder_message
from hydraspec.cli.jobs import bind_threads, hydra_settings
from hydraspec.cli.translate import translate
from hydraspec.errors import CannotWriteError, ConfigurationError, UserError
from hydraspec.lab.outcome import INTERRUPTED
from hydraspec.lab.resolution import resolve


def status_of(action: Callable[[], None], *, command: str) -> int:
    """The exit status of a command, which is a run's."""
    try:
        action()
    except UserError as error:
        return complain(error, error.exit_code, command=command)
    except (HydraException, OmegaConfBaseException) as error:
        return complain(translate(error), ConfigurationError.exit_code, command=command)
    except KeyboardInterrupt:
        return complain("interrupted: nothing is saved", INTERRUPTED, command=command)
    except CannotWriteError as error:
        return complain(folder_message(error), 1, command=command)
    return 0


@contextmanager
def prepared(job: Job) -> Iterator[Path]:
    """The job's folder, claimed; its configuration is resolved."""
    with claimed(job.folder, RUN_DIR), hydra_settings(job):
        bind_threads(job.config)
        resolve(job.config)
        yield job.folder.absolute()

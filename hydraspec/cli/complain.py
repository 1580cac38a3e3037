"""Messages of a command on standard error, and the exit status that follows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hydraspec.errors import CannotWriteError, UserError, printable
from hydraspec.signals import ignore_interrupts, interrupts_stay_interrupts

INTERRUPTED = 130


class Ending:
    """The end of a command: its exit status."""

    status = 0


def tell(message: object, *, command: str = "hydraspec") -> None:
    """Write a message to standard error, after the command's name, and flush it."""
    sys.stderr.write(f"{command}: {printable(str(message))}\n")
    sys.stderr.flush()


def complain(message: object, status: int, *, command: str = "hydraspec") -> int:
    """Write a message about a failure to standard error; returns `status`, the exit status."""
    tell(message, command=command)
    return status


@contextmanager
def errors_told(command: str = "hydraspec") -> Iterator[Ending]:
    """Context that reports a user's mistake or an interrupt in one message, and sets the status of
    the Ending that it yields. Other exceptions are raised. After an interrupt the process must end:
    further interrupts are ignored."""
    ending = Ending()
    try:
        with interrupts_stay_interrupts():
            yield ending
    except KeyboardInterrupt as interrupt:
        ignore_interrupts()
        message = f"interrupted: {str(interrupt) or 'nothing was finished'}"
        ending.status = complain(message, INTERRUPTED, command=command)
    except Exception as error:
        mistake = _mistake(error)
        if mistake is None:
            raise
        ending.status = complain(mistake, mistake.exit_code, command=command)


def _mistake(error: Exception) -> UserError | None:
    """The error as a UserError; None for an unexpected error."""
    if isinstance(error, UserError):
        return error
    # Imported here: one error to report is that these packages are not installed.
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from hydraspec.cli.folders import folder_message
    from hydraspec.cli.translate import translate

    if isinstance(error, CannotWriteError):
        return UserError(folder_message(error))
    is_hydras = isinstance(error, HydraException | OmegaConfBaseException)
    return translate(error) if is_hydras else None

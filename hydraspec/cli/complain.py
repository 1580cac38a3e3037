"""What a command says on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable

from hydraspec.errors import UserError, printable
from hydraspec.signals import output_may_be_cut


def tell(message: object, *, command: str = "hydraspec") -> None:
    """Write a message after the command's name, at once."""
    sys.stderr.write(f"{command}: {printable(str(message))}\n")
    sys.stderr.flush()


def complain(message: object, status: int, *, command: str = "hydraspec") -> int:
    """Tell what failed; returns the exit status."""
    tell(message, command=command)
    return status


def status_over_folders(action: Callable[[], None], *, command: str, writes: object) -> int:
    """The exit status of a command that reads folders and writes to `writes`."""
    with output_may_be_cut():
        try:
            action()
        except UserError as error:
            return complain(error, error.exit_code, command=command)
        except OSError as error:
            return complain(f"cannot write {writes}: {error.strerror or error}", 1, command=command)
    return 0

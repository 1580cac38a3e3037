"""What a command says on standard error."""

from __future__ import annotations

import sys

from hydraspec.errors import printable


def tell(message: object, *, command: str = "hydraspec") -> None:
    """Write a message after the command's name, at once."""
    sys.stderr.write(f"{command}: {printable(str(message))}\n")
    sys.stderr.flush()


def complain(message: object, status: int, *, command: str = "hydraspec") -> int:
    """Tell what failed; returns the exit status."""
    tell(message, command=command)
    return status

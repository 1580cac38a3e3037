"""The errors a user can cause, each with its exit status, and how text is printed.

Imports nothing, so that the command line starts without torch.
"""

from __future__ import annotations

_CONTROLS = (*range(32), *range(127, 160))
_ESCAPES = {code: f"\\x{code:02x}" for code in _CONTROLS if chr(code) not in "\n\t"}


class UserError(ValueError):
    """A mistake the user can mend; the message names key, value, what is allowed and the remedy."""

    exit_code = 1


class NotFiniteError(UserError):
    """The target's logits are NaN or infinite: no token of this run can be trusted (exit status
    1)."""

    def __init__(self, request: str, position: int, dtype: str) -> None:
        """request: id; position: the output token, counted from 0, that these logits gave."""
        self.request, self.position = request, position
        self.finding = (
            f"the target's logits for output token {position} of request {request!r} are not "
            "finite (NaN, +inf, or no token above -inf)"
        )
        super().__init__(
            f"{self.finding}: the run has failed\n  to do: check the checkpoint's weights and its "
            f"config.json; if {dtype} overflows, try another target.dtype"
        )


class ConfigurationError(UserError):
    """The configuration is wrong (exit status 2)."""

    exit_code = 2


class CheckpointError(UserError):
    """A checkpoint cannot be used (exit status 3)."""

    exit_code = 3


class WorkloadError(UserError):
    """A workload cannot be used (exit status 3). `request_id` is that of the request it is about,
    where the message does not say yet in which line it stands.
    """

    exit_code = 3

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


class CannotWriteError(OSError):
    """A file of the run folder cannot be written: its errno, a message with a remedy, its path."""


def printable(text: str) -> str:
    """Text for a page or a terminal: control characters but line breaks and tabs as their escapes,
    since those of a workload or a checkpoint could clear a screen or hide what stands there.
    """
    return text.translate(_ESCAPES)

"""Errors that a user can cause, each with its exit status, and text made safe to print.

The module imports nothing, so that the command line starts without torch.
"""

from __future__ import annotations

_CONTROLS = (*range(32), *range(127, 160))
_ESCAPES = {code: f"\\x{code:02x}" for code in _CONTROLS if chr(code) not in "\n\t"}


class UserError(ValueError):
    """A mistake that the user can mend.

    The message names key, value given, what is allowed and the remedy. `key` is the configuration
    key it is about and `request_id` the workload's request, where it is about one: callers read
    these fields, never the text.
    """

    exit_code = 1

    def __init__(
        self, message: str, *, key: str | None = None, request_id: str | None = None
    ) -> None:
        super().__init__(message)
        self.key, self.request_id = key, request_id


class NotFiniteError(UserError):
    """The target's logits are NaN or infinite: no token of this run can be trusted (exit status
    1)."""

    def __init__(self, request_id: str, position: int, dtype: str) -> None:
        """position: the output token, counted from 0, that these logits gave."""
        self.position = position
        self.finding = (
            f"the target's logits for output token {position} of request {request_id!r} are not "
            "finite (NaN, +inf, or no token above -inf)"
        )
        super().__init__(
            f"{self.finding}: the run has failed\n  to do: check the checkpoint's weights and its "
            f"config.json; if {dtype} overflows, try another target.dtype",
            request_id=request_id,
        )


class DraftError(UserError):
    """A speculator proposed a draft that cannot be verified (exit status 1)."""


class ConfigurationError(UserError):
    """The configuration is wrong (exit status 2)."""

    exit_code = 2


class NoDrafterError(ConfigurationError):
    """A method needs a drafter, and the target names none for it: a sweep leaves that pair out."""


class CheckpointError(UserError):
    """A checkpoint cannot be used (exit status 3)."""

    exit_code = 3


class WorkloadError(UserError):
    """A workload, or the request that `request_id` names, cannot be used (exit status 3)."""

    exit_code = 3


class CannotWriteError(OSError):
    """A file of the run folder cannot be written: its errno, a message with a remedy, its path."""


def printable(text: str) -> str:
    """The text with control characters other than line breaks and tabs escaped: those of a workload
    or a checkpoint could clear a terminal or hide other text.
    """
    return text.translate(_ESCAPES)

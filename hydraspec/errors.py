"""The errors a user can cause, each with its exit status.

Imports nothing, so that the command line starts without torch.
"""

from __future__ import annotations


class UserError(ValueError):
    """A mistake the user can mend; the message names key, value, what is allowed and the remedy."""

    exit_code = 1


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

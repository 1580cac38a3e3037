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
    """A workload cannot be used (exit status 3)."""

    exit_code = 3

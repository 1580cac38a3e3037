"""A Hydra-configured speculative decoding engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__version__ = "0.1.0"


def run(
    overrides: Sequence[str] = (), *, config_dir: str | None = None, quiet: bool = False
) -> dict[str, Any]:
    """One run, as `python -m hydraspec` with these overrides; its folder goes under outputs/.

    A run whose outputs are not the target's raises nothing: look at
    `result["lossless"]["verdict"]`, which is then "diverged" (the command exits with 4).

    Args:
        config_dir: a folder with further choices, as --config-dir.
        quiet: print and log nothing but errors.

    Returns:
        The summary, as summary.json holds it, and "run_dir", the folder's absolute path.

    Raises:
        UserError: ConfigurationError, CheckpointError or WorkloadError, with the message the
        command line prints.
        KeyboardInterrupt: after the finished requests were saved.
    """
    from hydraspec.cli.main import run as run_from_overrides

    return run_from_overrides(overrides, config_dir=config_dir, quiet=quiet)

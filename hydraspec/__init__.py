"""A Hydra-configured speculative decoding engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from hydraspec.version import __version__ as __version__

if TYPE_CHECKING:
    from hydraspec.engine.base import Engine


def run(
    overrides: Sequence[str] = (), *, config_dir: str | None = None, quiet: bool = False
) -> dict[str, Any]:
    """Run once, as `hydraspec` with these overrides; its folder goes under outputs/.

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
    called = _called("hydraspec.cli.from_python:run")
    summary: dict[str, Any] = called(overrides, config_dir=config_dir, quiet=quiet)
    return summary


def build_engine(overrides: Sequence[str] = (), *, config_dir: str | None = None) -> Engine:
    """The loaded engine of such a run, for Python code that drives it itself.

    `tokenize` requests (`hydraspec.types.Request`), iterate over `run`, which yields the record of
    each step and the completions it brought, and `close` the engine at the end. Between two events,
    or from another thread, `cancel` ends a request.

    Args:
        overrides: as typed after `hydraspec`; the workload and the baseline are not used.
        config_dir: a folder with further choices, as --config-dir.

    Raises:
        UserError: as `run`; also where parallelism asks for several devices.
    """
    called = _called("hydraspec.cli.from_python:build_engine")
    engine: Engine = called(overrides, config_dir=config_dir)
    return engine


def compare(
    folders: Sequence[str | PathLike[str]], *, write: str | PathLike[str] | None = None
) -> dict[str, Any]:
    """Paired comparison of runs over the same prompts, as `hydraspec compare` makes it.

    Args:
        folders: of runs, or of sweeps, whose jobs they stand for. Of two jobs the first is the
            reference; of more, the one with the highest speedup.
        write: a folder for compare.json, compare.csv, compare.md and compare.html.

    Returns:
        What compare.json holds (docs/outputs/compare.md): jobs by rank, what is told of each
        against the reference, and sentences.

    Raises:
        ConfigurationError: the runs cannot be compared; the message names the difference.
        OSError: with the path, if `write` cannot be written.
    """
    compared: dict[str, Any] = _called("hydraspec.cli.compare:compare")(folders, write=write)
    return compared


def _called(place: str) -> Callable[..., Any]:
    """The function at "module:function"; nothing heavy is imported before it is needed."""
    from hydraspec.cli.main import check_installed, load

    check_installed()
    return load(place)

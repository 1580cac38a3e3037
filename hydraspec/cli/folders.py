"""Folders of runs and sweeps: naming, creation, and locks that admit one process at a time; and
arguments that are numbers."""

from __future__ import annotations

import argparse
import errno
import fcntl
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hydraspec.config.messages import refusal
from hydraspec.errors import ConfigurationError, UserError
from hydraspec.metrics.run_files import RESULTS

log = logging.getLogger(__name__)

RUN_DIR, SWEEP_DIR = "hydra.run.dir", "hydra.sweep.dir"
LOCK = ".lock"  # file in a folder in use, which says which process uses it
REASONS = {  # of errors whose text from the system is unclear
    errno.ENOSPC: "there is no space left",
    errno.EDQUOT: "the disk quota is used up",
    errno.ENOTDIR: "a part of the path is a file",
    errno.EEXIST: "it is a file",
}

_held: set[int] = set()  # descriptors of locks


def fresh(folder: Path) -> Path:
    """Create `folder`, with a number added to its name if it exists, as two runs may start in one
    second; returns its path.

    Raises:
        ConfigurationError: the folder cannot be made.
    """
    candidate, number = folder, 1
    while True:
        try:
            candidate.mkdir(parents=True)
        except FileExistsError:
            candidate, number = folder.with_name(f"{folder.name}-{number}"), number + 1
        except OSError as error:
            raise ConfigurationError(folder_message(error, folder)) from error
        else:
            return candidate


@contextmanager
def claimed(folder: Path, key: str) -> Iterator[None]:
    """Context that creates a folder and locks it against other processes, and runs of this one.

    The lock is on a file in the folder; the system releases the lock when the process ends, however
    it ends. If the file system has no locks a warning is logged. `key` is the folder's in messages.

    Raises:
        ConfigurationError: another run holds the lock, or the folder cannot be made or written.
    """
    path = folder.absolute() / LOCK
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
        held = _lock(path)
    except OSError as error:
        raise ConfigurationError(folder_message(error, folder)) from error
    if held is None:
        raise refusal(
            key,
            str(folder),
            f"is in use by {_holder(path)}",
            allowed="a folder that no other run writes to",
            remedy="wait until that run has ended, or choose another folder",
        )
    _held.add(held)
    try:
        yield
    finally:
        _held.discard(held)
        with suppress(OSError):
            path.unlink()
        os.close(held)


def _lock(path: Path) -> int | None:
    """The descriptor of the locked file; None if another run holds the lock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            log.warning("%s: cannot be locked (%s): keep other runs out of it", path, error)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                break
        os.close(descriptor)  # its holder has removed it since
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    who = {"pid": os.getpid(), "host": platform.node(), "since": since}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(who).encode(), 0)
    return descriptor


def _holder(path: Path) -> str:
    try:
        who = json.loads(path.read_bytes())
        return f"process {who['pid']} on {who['host']} since {who['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it is being written, or just removed
        return "another run"


def _drop_locks() -> None:
    """Close the locks in a forked process, which may outlive this one."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_drop_locks)


def results(folder: Path) -> dict[Path, int]:
    """Times of writing [ns] of the result files in the folder of a run, benchmark or sweep."""
    folder = folder.absolute()
    files = [file for name in RESULTS for file in (folder / name, *folder.glob(f"*/{name}"))]
    return {file: file.stat().st_mtime_ns for file in files if file.is_file()}


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Context that raises an OSError as a UserError, which says that `place` cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {place}: {_reason(error)}\n"
            "  allowed: a place with room that can be written\n"
            "  to do: make room, or choose another"
        ) from error


def is_of(folder: Path, error: OSError) -> bool:
    """Returns whether an error is about a folder: a part of its path, or a file inside it."""
    if not isinstance(error.filename, str):
        return False
    path, folder = Path(error.filename).absolute(), folder.absolute()
    return path.is_relative_to(folder) or folder.is_relative_to(path)


def folder_message(error: OSError, folder: object = "the run folder") -> str:
    """Message for an error with a run folder or a file in it, with the remedy."""
    named = error.filename if isinstance(error.filename, str) else folder
    return (
        f"{named}: {_reason(error)}\n"
        "  allowed: a folder with room, whose files can be read and written\n"
        "  to do: make room, or choose another: hydra.run.dir=<folder> (sweeps: hydra.sweep.dir)"
    )


def _reason(error: OSError) -> str:
    number = error.errno or 0
    return REASONS.get(number, os.strerror(number) if number else str(error))


def between(kind: type[int] | type[float], least: float, most: float) -> Callable[[str], float]:
    """Reader of an argument, for argparse, that takes numbers from `least` to `most`."""

    def read(text: str) -> float:
        with suppress(ValueError):
            if least <= (value := kind(text)) <= most:
                return value
        numbers = "whole numbers" if kind is int else "numbers"
        raise argparse.ArgumentTypeError(f"{text}: allowed are {numbers} from {least} to {most}")

    return read

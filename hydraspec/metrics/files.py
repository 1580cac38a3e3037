"""JSON files with finite numbers only, written whole or not at all, or line by line during a run.

The files of a run folder are named in run_files.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

from hydraspec.errors import CannotWriteError

# what json.dumps takes: dicts with string keys, lists, strings, finite numbers, booleans, None
Json = Any


def plain(value: object) -> Json:
    """`value` in JSON's own types; numbers that are not finite become null, so that no NaN is
    ever written.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Enum):
        return plain(value.value)
    if hasattr(value, "tolist"):  # a NumPy scalar or array
        return plain(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    return str(value)


def json_line(value: object) -> str:
    """`value` as a line of JSON, newline included."""
    return json.dumps(plain(value), ensure_ascii=False, allow_nan=False) + "\n"


def pretty_json(value: object) -> str:
    """`value` as indented JSON, newline included."""
    return json.dumps(plain(value), ensure_ascii=False, allow_nan=False, indent=2) + "\n"


def write_whole(path: Path, text: str) -> None:
    """Write a file under another name and rename it, so that no half-written file is ever seen.

    Raises:
        CannotWriteError: the disk is full or the folder cannot be written; the message has the
            path and a remedy.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:  # also after an interrupt
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def write_json_lines(path: Path, rows: Iterable[object]) -> None:
    """Write a JSON-lines file whole, see `write_whole`."""
    write_whole(path, "".join(json_line(row) for row in rows))


def read_json_lines(path: Path) -> list[Json]:
    """The rows of a JSON-lines file.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line, which is named, is no JSON, as where the file was cut short.
    """
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                where = f"{path.name}, line {number}, column {error.colno}"
                raise ValueError(f"{where}: {error.msg}") from None
    return rows


def cannot_write(path: Path, error: OSError) -> CannotWriteError:
    """The CannotWriteError for a system error, with the path and a remedy."""
    reason = error.strerror or str(error)
    message = (
        f"cannot write the run folder: {reason}; free some space, "
        "or choose another folder with hydra.run.dir=..."
    )
    return CannotWriteError(error.errno, message, str(path))


class JsonLinesFile:
    """A JSON-lines file that a run appends to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: TextIO = path.open("w", encoding="utf-8")
        except OSError as error:
            raise cannot_write(path, error) from error

    def write(self, value: object) -> None:
        """Append `value` as a line; raises CannotWriteError."""
        try:
            self._file.write(json_line(value))
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def close(self) -> None:
        """Flush and close; raises CannotWriteError."""
        try:
            self._file.close()
        except OSError as error:
            raise cannot_write(self.path, error) from error

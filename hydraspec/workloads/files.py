"""The bytes of a workload: of a file, the zoo, or a package that is read and never imported."""

from __future__ import annotations

import gzip
import importlib.resources
import io
import stat
import zlib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from hydraspec.config.schema import WorkloadConfig
from hydraspec.config.workloads import PACKAGES, SOURCES
from hydraspec.shipped import ZOO_PREFIX
from hydraspec.types import WorkloadError

FILE_TYPES = {
    stat.S_IFIFO: "FIFO",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFSOCK: "socket",
    stat.S_IFDIR: "folder",
}
MAX_UNPACKED = 1 << 30


def of_workload(config: WorkloadConfig) -> tuple[str, bytes]:
    """The name for messages, and the bytes, of a workload's file, zoo entry or package.

    Raises:
        WorkloadError: the workload cannot be read; the message says how to get the file.
    """
    if config.path is None and config.name in PACKAGES:
        return _read_package(config.name)
    if config.path is None:
        raise WorkloadError(
            f"workload.path is null; workload={config.name} needs a file of JSON lines: "
            "workload.path=/path/to/file.jsonl"
        )
    if config.path.startswith(ZOO_PREFIX):
        return config.path, _read_zoo(config.path)
    return _read_file("workload.path", config.path, SOURCES.get(config.name))


def folder_of(config: WorkloadConfig) -> Path | None:
    """The folder of a workload's own file; None if it has none, or one of the package's."""
    if config.path is None or config.path.startswith(ZOO_PREFIX):
        return None
    return Path(config.path).expanduser().parent


def of_shots(path: str) -> tuple[str, bytes]:
    """The name for messages, and the bytes, of a file of examples."""
    return _read_file("workload.shots_path", path, None)


def _read_file(key: str, given: str, source: str | None) -> tuple[str, bytes]:
    """The name for messages, and the bytes, of a file; `source` says how to get the file."""
    path = Path(given).expanduser()
    had = "" if source is None else f"; the file: {source}"
    try:
        kind = FILE_TYPES.get(stat.S_IFMT(path.stat().st_mode))
        content = path.read_bytes() if kind is None else b""
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = getattr(error, "strerror", None) or str(error)
        raise WorkloadError(
            f"{key}={given} cannot be read: {reason} (seen from {Path.cwd()}); "
            f"give the path of a file of JSON lines{had}"
        ) from error
    if kind is not None:  # reading it could block, or never end
        raise WorkloadError(
            f"{key}={given} is a {kind}; give the path of a file of JSON lines that "
            f"is written whole{had}"
        )
    return str(path), _unpacked(str(path), content)


def _read_package(workload: str) -> tuple[str, bytes]:
    """The name for messages, and the bytes, of a file of an installed package, whose code is not
    imported."""
    package, place = PACKAGES[workload]
    try:
        path = str(distribution(package).locate_file(place))
    except PackageNotFoundError:
        raise WorkloadError(
            f"workload={workload}: the package {package} is not installed, and workload.path is "
            f"null; the file: {SOURCES[workload]}"
        ) from None
    return _read_file("workload.path", path, SOURCES[workload])


def _unpacked(name: str, content: bytes) -> bytes:
    """The content of a file, decompressed if it is in gzip format."""
    if not content.startswith(b"\x1f\x8b"):
        return content
    try:
        with gzip.open(io.BytesIO(content)) as packed:
            text = packed.read(MAX_UNPACKED + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise WorkloadError(f"{name}: cannot be unpacked: {error}; get the file again") from None
    if len(text) > MAX_UNPACKED:
        raise WorkloadError(f"{name}: unpacks to more than {MAX_UNPACKED} bytes; unpack it first")
    return text


def _read_zoo(path: str) -> bytes:
    files = {
        entry.name.removesuffix(".jsonl"): entry
        for entry in (importlib.resources.files("hydraspec.zoo") / "data").iterdir()
        if entry.name.endswith(".jsonl")
    }
    name = path.removeprefix(ZOO_PREFIX)
    if name not in files:
        known = ", ".join(f"{ZOO_PREFIX}{n}" for n in sorted(files)) or "nothing"
        raise WorkloadError(f"workload.path={path}: the package ships {known}; choose one of them")
    return files[name].read_bytes()

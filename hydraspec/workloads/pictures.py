"""Files of pictures that messages name: beside the workload's file, or written into the message."""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from pathlib import Path, PurePosixPath, PureWindowsPath

from hydraspec.pictures import MAX_PICTURE_BYTES, Picture
from hydraspec.workloads.files import FILE_TYPES

MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp")
DATA_URL = re.compile(r"data:([^;,]*)(;base64)?,", re.IGNORECASE)
URL = re.compile(r"[a-z][a-z0-9+.-]+:", re.IGNORECASE)  # two letters at least: C: is a drive
BESIDE = "give a path that begins in the folder of the workload's file"
MAX_NAME = 80  # characters of a path in a message


class PictureError(Exception):
    """The reason why a picture cannot be read, for the error of its request."""


def read_picture(source: str, folder: Path | None) -> Picture:
    """The picture at a path in `folder`, that of the workload's file (None: there is no file), or
    in a data URL. What cannot be read has its `error` set, and nothing outside the folder is read.
    """
    name = source if len(source) <= MAX_NAME else source[: MAX_NAME - 3] + "..."
    try:
        if source[:5].lower() == "data:":
            name = "data URL"
            return Picture(name=name, content=_of_data_url(source))
        return Picture(name=name, content=_read(_inside(source, folder)))
    except PictureError as error:
        return Picture(name=name, error=str(error))


def _of_data_url(source: str) -> bytes:
    head = DATA_URL.match(source)
    if head is None or head[1].lower() not in MEDIA_TYPES or not head[2]:
        raise PictureError(f"write it as data:<type>;base64,…, of type {' or '.join(MEDIA_TYPES)}")
    if len(source) - head.end() > (MAX_PICTURE_BYTES + 2) // 3 * 4:
        raise PictureError(f"more than {MAX_PICTURE_BYTES} bytes; make the picture smaller")
    try:
        return base64.b64decode(source[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError(f"not base64: {error}") from None


def _inside(source: str, folder: Path | None) -> Path:
    """The file's path without links, in the folder."""
    if not source.strip() or "\0" in source:
        raise PictureError(f"the path is empty or has a null character; {BESIDE}")
    parts = {*PurePosixPath(source).parts, *PureWindowsPath(source).parts}
    if PurePosixPath(source).is_absolute() or PureWindowsPath(source).anchor or "~" in source[:1]:
        raise PictureError(f"an absolute path is not read; {BESIDE}")
    if URL.match(source):
        raise PictureError("a URL is not read; save the picture beside the workload's file")
    if ".." in parts:
        raise PictureError(f'a path with ".." is not read; {BESIDE}')
    if folder is None:
        raise PictureError("this workload is no file with a folder of pictures; give a data URL")
    try:
        root = folder.resolve(strict=True)
        found = (root / source).resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle
        raise PictureError(f"cannot be read: {_reason(error)}; {BESIDE}") from None
    if not found.is_relative_to(root):
        raise PictureError(f"a link that leaves the workload's folder is not followed; {BESIDE}")
    return found


def _read(path: Path) -> bytes:
    """The bytes of a regular file of at most MAX_PICTURE_BYTES; others are not read at all."""
    try:
        # Without waiting for a writer, should the file be a FIFO.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            mode = os.fstat(file).st_mode
            if not stat.S_ISREG(mode):
                kind = FILE_TYPES.get(stat.S_IFMT(mode), "special file")
                raise PictureError(f"a {kind} is no picture")
            with open(file, "rb", closefd=False) as opened:
                content = opened.read(MAX_PICTURE_BYTES + 1)
        finally:
            os.close(file)
    except OSError as error:
        raise PictureError(f"cannot be read: {_reason(error)}") from None
    if len(content) > MAX_PICTURE_BYTES:
        raise PictureError(f"more than {MAX_PICTURE_BYTES} bytes; make the picture smaller")
    return content


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)

"""Files of pictures that travel in messages and pages. The module imports no other room."""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if (
    TYPE_CHECKING
):  # the configuration reads a constant of this module, and is composed without numpy
    import numpy as np

MAX_PICTURE_BYTES = 1 << 25  # of an encoded picture
MAX_SOFT_TOKENS = (70, 140, 280, 560, 1120)  # numbers of tokens that Gemma 4 may make of a picture


@dataclass(slots=True, frozen=True, kw_only=True)
class Picture:
    """The file of a picture in a message, or the reason why it cannot be read."""

    name: str  # for messages: its path as the message gives it, or "data URL"
    content: bytes = b""
    error: str | None = None


def png(pixels: np.ndarray) -> bytes:
    """A PNG file (ISO/IEC 15948) of pixels [height, width, 3] uint8."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # each begins with its filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(rows, 9)
    chunks = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in chunks)


def png_url(pixels: np.ndarray) -> str:
    """The data URL of a PNG file of pixels [height, width, 3] uint8."""
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode("ascii")


def _chunk(kind: bytes, content: bytes) -> bytes:
    checked = kind + content
    return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))

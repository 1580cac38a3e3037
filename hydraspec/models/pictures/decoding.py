"""Decoding of PNG, JPEG and WebP files to RGB pixels, of sizes that are bounded beforehand."""

from __future__ import annotations

import importlib.util
import warnings
from io import BytesIO
from typing import Any, TypeAlias

import numpy as np

from hydraspec.errors import ConfigurationError, WorkloadError
from hydraspec.pictures import MAX_PICTURE_BYTES

Opened: TypeAlias = Any  # PIL.Image.Image

FORMATS = ("PNG", "JPEG", "WEBP")
ALLOWED = "PNG, JPEG or WebP"
MAX_PIXELS = 1 << 26
GRAY_OR_RGB = ("1", "L", "P", "RGB")
WITH_ALPHA = ("LA", "PA", "RGBA")
NOT_INSTALLED = (
    "a message has a picture, and Pillow, which decodes it, is not installed\n"
    "  allowed: messages of text alone\n  to do: pip install pillow"
)


def check_installed() -> None:
    """Raises ConfigurationError unless Pillow is installed."""
    if importlib.util.find_spec("PIL") is None:
        raise ConfigurationError(NOT_INSTALLED)


def decode(content: bytes) -> np.ndarray:
    """The pixels [height, width, 3] uint8 of a file in one of FORMATS, upright as its orientation
    tag says.

    Raises:
        WorkloadError: no such file, damaged or cut short, no pixels or more than MAX_PIXELS, more
            than one frame, transparent pixels, or colours other than gray and RGB of 8 bits.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    if not content:
        raise WorkloadError("the file is empty; give a picture in " + ALLOWED)
    if len(content) > MAX_PICTURE_BYTES:
        raise WorkloadError(
            f"the file has {len(content)} bytes; at most {MAX_PICTURE_BYTES} are read: make it "
            "smaller"
        )
    _check_size(*(_webp_size(content) or (1, 1)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged metadata
            with Image.open(BytesIO(content), formats=FORMATS) as opened:
                _check_size(*opened.size)
                _check_frames(opened)
                opened.load()
                return np.asarray(_rgb(ImageOps.exif_transpose(opened)))
    except WorkloadError:
        raise
    except UnidentifiedImageError:
        raise WorkloadError(f"the file is no picture in {ALLOWED}; convert it to PNG") from None
    except Image.DecompressionBombError:
        raise _too_large() from None
    except Exception as error:  # decoders raise many kinds for damaged files
        why = str(error) or type(error).__name__
        raise WorkloadError(f"the file is damaged or cut short ({why}); save it again") from None


def to_pillow(pixels: np.ndarray) -> Opened:
    """The picture of pixels [height, width, 3] uint8 as an image of Pillow."""
    from PIL import Image

    return Image.fromarray(pixels)


def _check_size(width: int, height: int) -> None:
    if not width or not height:
        raise WorkloadError(f"the picture has {width} x {height} pixels; it must have some")
    if width * height > MAX_PIXELS:
        raise _too_large(f"{width} x {height} pixels")


def _too_large(size: str = "too many pixels") -> WorkloadError:
    return WorkloadError(f"the picture has {size}; at most {MAX_PIXELS} are decoded: scale it down")


def _check_frames(opened: Opened) -> None:
    count = getattr(opened, "n_frames", 1)
    if count > 1 or getattr(opened, "is_animated", False):
        raise WorkloadError(f"the file has {count} pictures or frames; save one of them alone")


def _rgb(picture: Opened) -> Opened:
    """The picture in RGB; its alpha channel, if there is one, must be opaque everywhere."""
    if picture.mode not in (*GRAY_OR_RGB, *WITH_ALPHA):
        raise WorkloadError(
            f"the picture's pixels are of mode {picture.mode!r}; it must be gray or RGB with 8 "
            "bits a channel: convert it"
        )
    if picture.mode in WITH_ALPHA or "transparency" in picture.info:
        least_opaque, _ = picture.convert("RGBA").getchannel("A").getextrema()
        if least_opaque != 255:
            raise WorkloadError(
                "the picture has transparent pixels, whose colour is not defined: put it on a "
                "background and save it without transparency"
            )
    return picture.convert("RGB")


def _webp_size(content: bytes) -> tuple[int, int] | None:
    """Width and height in the header of a WebP file (RFC 9649), None of another file. Pillow's
    decoder takes memory for them as it opens the file."""
    if content[:4] != b"RIFF" or content[8:12] != b"WEBP":
        return None
    kind, data = content[12:16], content[20:30]
    if len(data) < 10:
        raise WorkloadError("the file is damaged or cut short (no header); save it again")
    if kind == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (4, 7))
    elif kind == b"VP8L":
        bits = int.from_bytes(data[1:5], "little")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    else:
        width, height = (int.from_bytes(data[at : at + 2], "little") & 0x3FFF for at in (6, 8))
    return width, height

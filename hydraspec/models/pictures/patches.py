"""Pixels as an image encoder reads them: resized to whole tokens, then cut into patches.

The arithmetic is that of transformers' Gemma4ImageProcessor, whose resampling is torch's.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch.nn.functional import interpolate

from hydraspec.errors import WorkloadError
from hydraspec.models.pictures.format import PictureFormat
from hydraspec.types import Image


def fitted_size(height: int, width: int, form: PictureFormat) -> tuple[int, int]:
    """Height and width in tokens of a picture of these pixels: the largest of the same aspect with
    at most `max_tokens`, sides rounded down, but to 1 at least."""
    side = form.pooling * form.patch_size
    # The order of these operations decides which way a size falls that is an exact multiple.
    most_pixels = form.max_tokens * form.pooling**2 * form.patch_size**2
    factor = math.sqrt(most_pixels / (height * width))
    rows, columns = (math.floor(factor * length / side) for length in (height, width))
    if rows == 0:
        return 1, min(width // height, form.max_tokens)
    if columns == 0:
        return min(height // width, form.max_tokens), 1
    return rows, columns


def to_image(pixels: np.ndarray, form: PictureFormat) -> Image:
    """The patches of pixels [height, width, 3] uint8.

    Raises:
        WorkloadError: a side has more patches than the encoder has positions.
    """
    height, width, _ = pixels.shape
    size, patch = fitted_size(height, width, form), form.patch_size
    rows, columns = (length * form.pooling for length in size)
    if max(rows, columns) > form.max_positions:
        raise WorkloadError(
            f"the picture of {width} x {height} pixels becomes {columns} x {rows} patches, and the "
            f"target's encoder has {form.max_positions} positions a side: cut it to a squarer one"
        )
    fitted = _resized(pixels, rows * patch, columns * patch)
    cut = fitted.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 1, 3, 4)
    patches = cut.reshape(rows * columns, -1).astype(np.float32) * np.float32(1 / 255)
    row, column = np.divmod(np.arange(rows * columns), columns)
    return Image(
        patches=patches, positions=np.stack([column, row], axis=1), num_tokens=math.prod(size)
    )


def _resized(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Pixels [height, width, 3] uint8, bicubic with antialiasing."""
    if pixels.shape[:2] == (height, width):
        return pixels
    channels = torch.from_numpy(np.array(pixels.transpose(2, 0, 1), order="C"))
    found = interpolate(channels[None], (height, width), mode="bicubic", antialias=True)
    return found[0].permute(1, 2, 0).numpy()


def digest(pixels: np.ndarray, form: PictureFormat) -> str:
    """Digest of a picture and of the form in which it is read: equal for equal images."""
    shape = (*pixels.shape, form.patch_size, form.pooling, form.max_tokens)
    found = hashlib.sha256(repr(shape).encode())
    found.update(np.ascontiguousarray(pixels).data)
    return found.hexdigest()

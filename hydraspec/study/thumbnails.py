"""Small pictures of a page, made of the patches that the target read."""

from __future__ import annotations

import math

import numpy as np

from hydraspec.pictures import png_url
from hydraspec.types import Image

MAX_SIDE = 160  # pixels


def thumbnail(image: Image) -> str:
    """The data URL of an image as a PNG file of at most MAX_SIDE pixels a side."""
    columns, rows = (int(last) + 1 for last in image.positions.max(axis=0))
    side = math.isqrt(image.patches.shape[1] // 3)
    grid = image.patches.reshape(rows, columns, side, side, 3).transpose(0, 2, 1, 3, 4)
    pixels = grid.reshape(rows * side, columns * side, 3)
    step = -(-max(pixels.shape) // MAX_SIDE)
    height, width = (max(1, length // step) for length in pixels.shape[:2])
    tall, wide = (min(step, length) for length in pixels.shape[:2])
    blocks = pixels[: height * tall, : width * wide].reshape(height, tall, width, wide, 3)
    return png_url(np.rint(blocks.mean(axis=(1, 3)) * 255).astype(np.uint8))

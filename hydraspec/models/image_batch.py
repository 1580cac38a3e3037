"""Images of one pass of an encoder, padded to equally many patches, on the device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hydraspec.types import Image

MOST_VALUES = 1 << 24  # of a pass, padding included; a larger image has a pass of its own


@dataclass(slots=True, frozen=True)
class ImageBatch:
    """The images of a pass. Letters: n images, N patches of the largest one, M tokens of all."""

    patches: Tensor  # [n * N, values of a patch], zeros for padding
    positions: Tensor  # [n * N, 2] column and row, zeros for padding
    is_padding: Tensor | None  # [n, N] bool; None: no image has padding
    cells: Tensor  # [M, patches of a token] among n * N
    num_tokens: tuple[int, ...]  # of each image


def batches(
    images: Sequence[Image], pool: int, dtype: torch.dtype, device: torch.device
) -> Iterator[ImageBatch]:
    """Batches of all images, in order, uploaded without a wait; a token stands for pool * pool
    patches. dtype: of the patches.
    """
    first = 0
    while first < len(images):
        last, most = first, 0
        each = images[first].patches.shape[1]
        while last < len(images):
            widest = max(most, len(images[last].patches))
            if last > first and widest * (last + 1 - first) * each > MOST_VALUES:
                break
            last, most = last + 1, widest
        yield _batch(images[first:last], most, pool, dtype, device)
        first = last


def largest_image(pool: int, patch_values: int, num_positions: int) -> Image:
    """A black square that takes a whole pass, or as much of one as the encoder knows positions."""
    side = min(num_positions, math.isqrt(MOST_VALUES // patch_values))
    side = max(1, side // pool) * pool
    row, column = np.divmod(np.arange(side * side), side)
    return Image(
        patches=np.zeros((side * side, patch_values), dtype=np.float32),
        positions=np.stack((column, row), 1),
        num_tokens=side * side // pool**2,
    )


def fault(image: Image, pool: int, patch_values: int, num_positions: int) -> str | None:
    """Words for what makes an image unreadable by an encoder; None: it is sound."""
    patches, positions = image.patches, image.positions
    if patches.ndim != 2 or patches.shape[1] != patch_values:
        return f"patches have the shape {list(patches.shape)}; expected [patches, {patch_values}]"
    if positions.shape != (len(patches), 2) or not len(patches):
        return f"positions have the shape {list(positions.shape)}; expected [{len(patches)}, 2]"
    columns, rows = (int(size) + 1 for size in positions.max(0))
    if positions.min() < 0 or max(columns, rows) > num_positions:
        return f"positions are outside 0 to {num_positions - 1}, those that the encoder knows"
    raster = np.stack(np.divmod(np.arange(columns * rows), columns)[::-1], 1)
    if len(raster) != len(patches) or (raster != positions).any() or columns % pool or rows % pool:
        return (
            f"its {len(patches)} patches are no grid in raster order, of multiples of {pool} "
            "columns and rows"
        )
    if image.num_tokens * pool**2 != len(patches):
        return f"num_tokens is {image.num_tokens}; expected {len(patches) // pool**2}"
    return None


def _batch(
    images: Sequence[Image], most: int, pool: int, dtype: torch.dtype, device: torch.device
) -> ImageBatch:
    counts = [len(image.patches) for image in images]
    size = (len(images), most, images[0].patches.shape[1])
    # Pinned where it goes to CUDA: megabytes of each image are written once on the host.
    staged = torch.empty(size, dtype=torch.float32, pin_memory=device.type == "cuda")
    positions = np.zeros((len(images), most, 2), dtype=np.int64)
    for i, image in enumerate(images):
        staged[i, : counts[i]] = torch.from_numpy(np.require(image.patches, np.float32, "W"))
        staged[i, counts[i] :] = 0
        positions[i, : counts[i]] = image.positions
    padding = np.arange(most) >= np.array(counts)[:, None]
    cells = np.concatenate([i * most + _cells(image, pool) for i, image in enumerate(images)])
    return ImageBatch(
        patches=staged.to(device, non_blocking=True).flatten(0, 1).to(dtype),
        positions=sent(positions, device).flatten(0, 1),
        is_padding=sent(padding, device) if padding.any() else None,
        cells=sent(cells, device),
        num_tokens=tuple(image.num_tokens for image in images),
    )


def _cells(image: Image, pool: int) -> np.ndarray:
    """Patches of each token [tokens, pool * pool], tokens in raster order."""
    columns = int(image.positions[:, 0].max()) + 1
    column, row = image.positions.T // pool
    order = np.argsort(column + columns // pool * row, kind="stable")
    return order.reshape(image.num_tokens, pool**2)


def sent(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device, by a copy for which the host does not wait."""
    staged = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        staged = staged.pin_memory()
    return staged.to(device, non_blocking=True)

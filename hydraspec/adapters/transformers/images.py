"""Images of prompts as arguments of transformers' multimodal models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hydraspec.models.pictures.format import PictureFormat
from hydraspec.types import IMAGE, Image, Span


def image_inputs(
    prompts: Sequence[tuple[int, Sequence[Span], Sequence[Image]]],
    num_tokens: int,
    form: PictureFormat,
    device: torch.device,
) -> dict[str, Tensor]:
    """Arguments for a batch of prompts of `num_tokens` each, padding included: of each prompt the
    position of its first token, its spans and its images.

    mm_token_type_ids [B, num_tokens] has 1 for tokens of images. pixel_values [images, patches,
    values] and image_position_ids [images, patches, 2], padded with 0 and -1, are left out without
    images.
    """
    kinds = torch.zeros(len(prompts), num_tokens, dtype=torch.int64)
    for row, (first, spans, _) in enumerate(prompts):
        for span in spans:
            if span.kind == IMAGE:
                kinds[row, first + span.start : first + span.end] = 1
    images = [image for _, _, found in prompts for image in found]
    inputs = {"mm_token_type_ids": kinds}
    if images:
        most, whole = max(len(image.patches) for image in images), form.pooling**2
        size = (len(images), -(-most // whole) * whole)
        values = torch.zeros(*size, images[0].patches.shape[1])
        places = torch.full((*size, 2), -1, dtype=torch.int64)
        for i, image in enumerate(images):
            values[i, : len(image.patches)] = torch.tensor(image.patches)
            places[i, : len(image.patches)] = torch.tensor(image.positions)
        inputs |= {"pixel_values": values, "image_position_ids": places}
    return {name: tensor.to(device) for name, tensor in inputs.items()}

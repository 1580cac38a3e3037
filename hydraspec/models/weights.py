"""Fills a model's empty weights: from a checkpoint, or at random in the same shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hydraspec.errors import ConfigurationError
from hydraspec.models.checkpoint.reader import Checkpoint, load_tensors


def fill(
    tensors: Mapping[str, Tensor],
    checkpoint: Checkpoint,
    *,
    weights: str,
    seed: int,
    canonical: Callable[[str], str | None],
    ignored: Callable[[str], bool],
) -> None:
    """Fill every tensor (name -> view of the checkpoint's shape). weights is "checkpoint" or
    "random".
    """
    if weights == "random":
        randomise(tensors, seed)
    elif weights == "checkpoint":
        load_tensors(checkpoint, tensors, canonical, ignored)
    else:
        raise ConfigurationError(f"weights is {weights!r}; expected 'checkpoint' or 'random'")


def randomise(tensors: Mapping[str, Tensor], seed: int) -> None:
    """Seeded weights that keep activations and attention scores of order one.

    Matrices by fan-in; norms 1, but query and key norms so that scores have a deviation of 2;
    scalars 1.
    """
    for offset, (name, tensor) in enumerate(sorted(tensors.items())):
        generator = torch.Generator(tensor.device).manual_seed(seed * 1_000_003 + offset)
        if name.endswith("token_ordering"):
            tensor.copy_(torch.randperm(len(tensor), generator=generator, device=tensor.device))
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            tensor.fill_(math.sqrt(2.0) * tensor.numel() ** -0.25)
        elif tensor.dim() < 2:
            tensor.fill_(0.0 if name.endswith(".bias") else 1.0)
        else:
            tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)


def memory_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the tensors' storages, each counted once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors.values()
    }
    return sum(storages.values())

"""Fills a model's empty weights: from a checkpoint, or at random in the same shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from hydraspec.errors import ConfigurationError
from hydraspec.models.checkpoint.reader import Checkpoint, load_tensors
from hydraspec.models.moe import one_by_one
from hydraspec.models.parts import Part, Tensors, Weight, Weights, held

_SINGLE_EXPERT = re.compile(r"\.experts\.\d+\.")
EMPTY = "empty"  # for a model that only lends names and shapes, on torch's meta device


def fill(model: Weights, checkpoint: Checkpoint, *, weights: str, seed: int) -> None:
    """Fills every tensor of an empty model. weights is "checkpoint" or "random"."""
    if weights == "random":
        randomise(model.tensors(), seed)
    elif weights == "checkpoint":
        load_tensors(
            checkpoint, _named_as_in(checkpoint, model), model.canonical_name, model.ignores
        )
    else:
        raise ConfigurationError(f"weights is {weights!r}; expected 'checkpoint' or 'random'")


def _named_as_in(checkpoint: Checkpoint, model: Weights) -> Tensors:
    """The model's weights, with a name for each expert where the files have one."""
    tensors = model.tensors()
    is_packed = any(name.endswith("experts.down_proj") for name in tensors)
    if is_packed and any(_SINGLE_EXPERT.search(name) for name in checkpoint.entries()):
        return one_by_one(tensors)
    return tensors


def randomise(tensors: Mapping[str, Weight], seed: int) -> None:
    """Seeded weights that keep activations and attention scores of order one.

    Matrices are scaled by fan-in; norms and scalars are 1, but query and key norms give scores a
    deviation of 2; biases are 0. A part is cut from the whole tensor as a single process draws it,
    one at a time. Tensors of other pipeline stages (without memory) are left out.
    """
    for name, own_seed in _seeds(tensors, seed):
        weight = tensors[name]
        if held(weight).is_meta:
            continue
        if isinstance(weight, Part) and weight.tensor.dim() > 1:
            whole = weight.empty_whole()
            _draw(name, whole, own_seed)
            weight.tensor.copy_(weight.read(whole.__getitem__))
        else:
            _draw(name, held(weight), own_seed)


def drawn_whole(
    tensors: Mapping[str, Tensor], seed: int, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Each weight by name, whole and on `device`, with the numbers that `randomise` fills it with.

    `tensors` only lend shapes and types, so that they may be on torch's meta device. One weight
    exists at a time unless the caller keeps it.
    """
    for name, own_seed in _seeds(tensors, seed):
        whole = torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device=device)
        _draw(name, whole, own_seed)
        yield name, whole


def _seeds(names: Iterable[str], seed: int) -> Iterator[tuple[str, int]]:
    """Names in the order of drawing, each with the seed of its separate generator."""
    return ((name, seed * 1_000_003 + offset) for offset, name in enumerate(sorted(names)))


def _draw(name: str, tensor: Tensor, seed: int) -> None:
    """Fills a whole weight with initial values, drawn in its own order of strides."""
    generator = torch.Generator(tensor.device).manual_seed(seed)
    if name.endswith("token_ordering"):
        tensor.copy_(torch.randperm(len(tensor), generator=generator, device=tensor.device))
    elif name.endswith(("q_norm.weight", "k_norm.weight")):
        tensor.fill_(math.sqrt(2.0) * tensor.numel() ** -0.25)
    elif tensor.dim() < 2:
        tensor.fill_(0.0 if name.endswith(".bias") else 1.0)
    else:
        tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)

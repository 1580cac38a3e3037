"""Weights that tensor-parallel ranks divide: which slice of a checkpoint's tensor a rank holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True, frozen=True)
class Share:
    """What a rank holds of a dimension."""

    size: int  # of the whole dimension
    first: int
    count: int

    def times(self, width: int) -> Share:
        """The same of a dimension in which each entry takes `width` places, such as heads."""
        return Share(self.size * width, self.first * width, self.count * width)


@dataclass(slots=True, frozen=True)
class Part:
    """A rank's slice of a checkpoint's tensor, along one dimension."""

    tensor: Tensor  # what this rank holds, seen as the checkpoint orders it
    dim: int
    share: Share
    repeats: int = 1  # the dimension holds as many blocks of share.size, each cut alike

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        sizes = list(self.tensor.shape)
        sizes[self.dim] = self.share.size * self.repeats
        return tuple(sizes)

    def read(self, whole: Callable[[tuple[slice, ...]], Tensor]) -> Tensor:
        """The slice of a whole tensor, of which `whole` reads a region."""
        share, before = self.share, (slice(None),) * self.dim
        starts = (share.first + share.size * block for block in range(self.repeats))
        found = [whole((*before, slice(start, start + share.count))) for start in starts]
        return found[0] if len(found) == 1 else torch.cat(found, self.dim)

    def empty_whole(self) -> Tensor:
        """An empty whole tensor with dimensions in this one's order of strides, in which random
        numbers are drawn.
        """
        strides = self.tensor.stride()
        order = sorted(range(len(strides)), key=lambda d: -strides[d])
        stored = self.tensor.new_empty([self.shape[d] for d in order])
        return stored.permute([order.index(d) for d in range(len(order))])


Weight = Tensor | Part
Tensors = dict[str, Weight]


def held(weight: Weight) -> Tensor:
    """What this rank holds of a weight."""
    return weight.tensor if isinstance(weight, Part) else weight

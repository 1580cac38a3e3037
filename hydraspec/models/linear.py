"""A linear map with its place in a checkpoint: weight, scales, bias, and what ranks hold of it.

Checkpoints store a matrix per projection. Where several read the same input (queries, keys and
values; gate and up), they are one slab here and one product in a step; each keeps its name in the
checkpoint and its rank's share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy

from hydraspec_kernels.linear import (
    Activation,
    gated_linear,
    linear,
    linear_partials,
    scaled_gelu_linear,
)
from torch import Tensor
from torch.nn.functional import linear as library_linear

from hydraspec.models.parts import Part, Share, Tensors, Weight, undivided
from hydraspec.models.place import Place


class Linear:
    """y = x W + b for x [T, k] -> y [T, n].

    Ranks divide the columns of a map (`outputs`: shares of each projection's outputs), or its rows
    (`inputs`): what each rank returns then adds up to y, and the first rank alone adds the bias.

    Attributes:
        weight: [k, n] of this rank; see `Place.matrix` for its memory.
        scales: factors of a quantised weight; None: the weight is in the place's dtype.
        bias: [n] of this rank, or None.
    """

    def __init__(
        self,
        place: Place,
        inputs: int | Share,
        outputs: Mapping[str, int | Share],
        *,
        bias: bool = False,
    ) -> None:
        """Empty weights. `outputs`: the projections of the slab, in its order, by their names in
        the checkpoint without ".weight"; a number is a dimension that ranks do not divide."""
        self.inputs = undivided(inputs)
        self.outputs = {name: undivided(share) for name, share in outputs.items()}
        columns = sum(share.count for share in self.outputs.values())
        self.weight = place.matrix(self.inputs.count, columns)
        self.scales: Tensor | None = None
        self.bias = place.empty(columns) if bias else None
        self._adds_bias = not self.inputs.is_part or place.group.rank == 0

    def slices(self) -> Iterator[tuple[str, Share, slice]]:
        """Each projection of the slab: its name, its share, its columns."""
        first = 0
        for name, share in self.outputs.items():
            yield name, share, slice(first, first + share.count)
            first += share.count

    def tensors(self) -> Tensors:
        """Weights and biases by their names in the checkpoint, in its layout [n, k]."""
        found: Tensors = {}
        for name, share, columns in self.slices():
            rows = self.weight[:, columns].t()
            if self.inputs.is_part:
                found[f"{name}.weight"] = Part(rows, 1, self.inputs)
            else:
                found[f"{name}.weight"] = _divided(rows, share)
            if self.bias is not None:
                found[f"{name}.bias"] = _divided(self.bias[columns], share)
        return found

    def forward(self, x: Tensor) -> Tensor:
        """x [T, k] -> [T, n]; a rank's addend of it where ranks divide the inputs."""
        return linear(x, self.weight, self.bias if self._adds_bias else None)

    def partial_sums(self, x: Tensor) -> Tensor:
        """The same as [T, n], or as partial sums of it [S, T, n], which whoever reads them adds."""
        if self.bias is not None:
            return self.forward(x)
        return linear_partials(x, self.weight)

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """act(gate(x)) * up(x) [T, n / 2]; the slab holds gate and up."""
        return gated_linear(x, self.weight, self.bias, activation=activation)

    def gelu_times(self, x: Tensor, factor: Tensor) -> Tensor:
        """gelu(x W) * factor, all [T, n]; without a bias."""
        return scaled_gelu_linear(x, self.weight, factor)

    def columns_from(self, x: Tensor, first: int) -> Tensor:
        """Columns `first` and later of `forward`, by the library's product: no kernel is compiled
        for columns that decoding never takes alone."""
        bias = None if self.bias is None else self.bias[first:]
        return library_linear(x, self.weight[:, first:].t(), bias)

    def with_weight(self, weight: Tensor) -> Linear:
        """A map with another weight of the same shape; it shares all else."""
        assert weight.shape == self.weight.shape
        found = copy(self)
        found.weight = weight
        return found

    def reordered(self, name: str, reorder: Callable[[Tensor], Tensor]) -> Linear:
        """A map in which the rows [n, k] of projection `name`, as the checkpoint has them, are
        replaced by `reorder` of them."""
        weight = self.weight.clone()
        for found, _, columns in self.slices():
            if found == name:
                weight[:, columns] = reorder(weight[:, columns].t().contiguous()).t()
        return self.with_weight(weight)

    def swapped(self) -> Linear:
        """A map of two equally wide projections that change places."""
        half = self.weight.shape[1] // 2
        found = self.with_weight(self.weight.roll(half, 1))
        found.bias = None if self.bias is None else self.bias.roll(half)
        return found


def _divided(tensor: Tensor, share: Share) -> Weight:
    """A tensor of which a rank holds `share` of the first dimension."""
    return Part(tensor, 0, share) if share.is_part else tensor

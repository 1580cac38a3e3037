"""Stacked matrices of routed experts, as one gated MLP with a leading dimension of experts."""

from __future__ import annotations

from copy import copy

import torch
from hydraspec_kernels.linear import Activation
from hydraspec_kernels.moe import moe
from torch import Tensor

from hydraspec.models.parts import Tensors
from hydraspec.models.place import Place


class RoutedExperts:
    """E times down(act(gate(x)) * up(x)), of which each row of x takes a few, weighted. Ranks
    divide the inner width of every expert: what each returns adds up to the result.

    Attributes:
        packed: whether `tensors` names two tensors of all experts, or three of every expert.
    """

    def __init__(
        self, count: int, size: int, inner: int, place: Place, *, activation: Activation
    ) -> None:
        self.count, self.columns, self.place = count, place.share(inner), place
        self.activation, self.packed = activation, True
        self.gate_up = place.matrix(count, size, 2 * self.columns.count)
        self.down = place.matrix(count, self.columns.count, size)

    def tensors(self) -> Tensors:
        """Weights by their names below `experts.`."""
        part, columns = self.place.part, self.columns
        if self.packed:
            return {
                "gate_up_proj": part(self.gate_up.transpose(1, 2), 1, columns, repeats=2),
                "down_proj": part(self.down.transpose(1, 2), 2, columns),
            }
        found: Tensors = {}
        inner = columns.count
        for i in range(self.count):
            gate, up = self.gate_up[i, :, :inner].t(), self.gate_up[i, :, inner:].t()
            found[f"{i}.gate_proj.weight"] = part(gate, 0, columns)
            found[f"{i}.up_proj.weight"] = part(up, 0, columns)
            found[f"{i}.down_proj.weight"] = part(self.down[i].t(), 1, columns)
        return found

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [T, D], weights and indices of the chosen experts [T, top_k] -> [T, D]."""
        return moe(x, weights, experts, self.gate_up, self.down, self.activation)

    def swapped(self) -> RoutedExperts:
        """The same experts with gate and up in each other's places."""
        found = copy(self)
        found.gate_up = torch.roll(self.gate_up, self.columns.count, -1)
        return found

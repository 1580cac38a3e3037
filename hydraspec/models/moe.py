"""Stacked matrices of routed experts, as one gated MLP with a leading dimension of experts."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

import torch
from hydraspec_kernels.linear import Activation
from hydraspec_kernels.moe import moe
from torch import Tensor

from hydraspec.models.parts import Part, Tensors, Weight, Weights, divided, held, undivided
from hydraspec.models.place import Place


class RoutedExperts(Weights):
    """E gated MLPs down(act(gate(x)) * up(x)), of which each row of x takes the weighted sum of a
    few. Ranks divide the inner width of every expert; their outputs add up to the result.
    """

    def __init__(
        self, count: int, size: int, inner: int, place: Place, *, activation: Activation
    ) -> None:
        self.count, self.columns = count, place.share(inner)
        self.activation = activation
        self.gate_up = place.matrix(count, size, 2 * self.columns.count)
        self.down = place.matrix(count, self.columns.count, size)

    def tensors(self) -> Tensors:
        """Two tensors of all experts by their names below `experts.`; see `one_by_one`."""
        return {
            "gate_up_proj": divided(self.gate_up.transpose(1, 2), 1, self.columns, repeats=2),
            "down_proj": divided(self.down.transpose(1, 2), 2, self.columns),
        }

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Weighted sum [T, D] of the chosen experts for x [T, D]; weights and indices [T, top_k]
        of the experts.
        """
        return moe(x, weights, experts, self.gate_up, self.down, self.activation)

    def swapped(self) -> RoutedExperts:
        """The same experts with gate and up in each other's places."""
        found = copy(self)
        found.gate_up = torch.roll(self.gate_up, self.columns.count, -1)
        return found


def one_by_one(tensors: Mapping[str, Weight]) -> Tensors:
    """The given weights, with a name for each matrix of each routed expert instead of the stacked
    ones, as most releases have them."""
    found: Tensors = {}
    for name, weight in tensors.items():
        stem, packed, projection = name.rpartition("experts.")
        if not packed or projection not in ("gate_up_proj", "down_proj"):
            found[name] = weight
            continue
        dim = 0 if projection == "gate_up_proj" else 1
        share = weight.share if isinstance(weight, Part) else undivided(held(weight).shape[dim + 1])
        for i, expert in enumerate(held(weight)):
            parts = {"down_proj": expert}
            if projection == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
            for part, matrix in parts.items():
                found[f"{stem}experts.{i}.{part}.weight"] = divided(matrix, dim, share)
    return found

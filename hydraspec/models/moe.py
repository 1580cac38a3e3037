"""Stacked matrices of routed experts, as one gated MLP with a leading dimension of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy

import torch
from hydraspec_kernels.linear import Activation
from hydraspec_kernels.moe import moe, quantised_moe
from torch import Tensor

from hydraspec.errors import CheckpointError
from hydraspec.models.checkpoint.quantization import Scheme
from hydraspec.models.parts import Part, Tensors, Weight, Weights, divided, held, undivided
from hydraspec.models.place import Place
from hydraspec.models.quantised.experts import ExpertSlab, ExpertStack
from hydraspec.models.quantised.projection import Projection
from hydraspec.models.quantised.slab import whole_maxima

STACKS = ("gate_up_proj", "down_proj")  # tensors of all experts of a layer


class RoutedExperts(Weights):
    """E gated MLPs down(act(gate(x)) * up(x)), of which each row of x takes the weighted sum of a
    few. Ranks divide the inner width of every expert; their outputs add up to the result.

    Attributes:
        gate_up: [E, D, 2I] of this rank; without memory where the experts are quantised.
        down: [E, I, D], likewise.
        slabs: the quantised gate, up and down; None: the weights are in a floating-point type.
    """

    def __init__(
        self, count: int, size: int, inner: int, place: Place, *, activation: Activation
    ) -> None:
        self.count, self.size, self.columns = count, size, place.share(inner)
        self.place, self.activation = place, activation
        self.gate_up, self.down = self._empty(place.of_matrices)
        self.slabs: tuple[ExpertSlab, ExpertSlab, ExpertSlab] | None = None
        self.stacks: tuple[ExpertStack, ...] = ()  # where files hold the slabs stacked

    def _empty(self, place: Place) -> tuple[Tensor, Tensor]:
        """Uninitialised memory of gates and ups, and of downs."""
        inner = self.columns.count
        return (
            place.matrix(self.count, self.size, 2 * inner),
            place.matrix(self.count, inner, self.size),
        )

    def matrices(self) -> Iterator[tuple[str, RoutedExperts]]:
        """Yields these experts."""
        yield "", self

    @property
    def projection_names(self) -> list[str]:
        """Names of the modules in a checkpoint that may hold the experts: stacks, or one by one."""
        parts = ("gate_proj", "up_proj", "down_proj")
        return [*STACKS, *(f"{i}.{part}" for i in range(self.count) for part in parts)]

    def projections(self) -> Iterator[Projection]:
        """Yields the quantised projections."""
        for slab in self.slabs or ():
            yield from slab.projections

    def allocate(self, schemes: Mapping[str, Scheme]) -> None:
        """Makes the memory of the experts of a quantised checkpoint, from schemes by the names of
        their projections ("0.gate_proj") or stacks. Raises CheckpointError unless all projections
        have the same.
        """
        if not schemes:
            self.gate_up, self.down = self._empty(self.place)
            return
        device, sizes = self.place.device, (self.count, self.size, self.columns)
        if set(schemes) == set(STACKS):
            gate_up = ExpertStack.of_gates(schemes["gate_up_proj"], *sizes, device)
            down = ExpertStack.of_downs(schemes["down_proj"], *sizes, device)
            gate, up = gate_up.slabs
            self.stacks, self.slabs = (gate_up, down), (gate, up, down.slabs[0])
            return
        wanted = [name for name in self.projection_names if name not in STACKS]
        if missing := [name for name in wanted if name not in schemes]:
            raise CheckpointError(
                f"some experts are quantised and others are not: experts.{missing[0]} and "
                f"{len(missing) - 1} more have no scales; expected all or none of a layer's "
                f"{self.count} experts: download it again"
            )
        if len({schemes[name] for name in wanted}) > 1:
            raise CheckpointError(
                "the experts of a layer are quantised in different ways; expected one scheme for "
                f"all of them ({schemes[wanted[0]]}): convert them alike"
            )
        scheme = schemes[wanted[0]]
        self.slabs = (
            ExpertSlab.empty("gate_proj", scheme, sizes, device),
            ExpertSlab.empty("up_proj", scheme, sizes, device),
            ExpertSlab.empty("down_proj", scheme, (self.count, self.columns, self.size), device),
        )

    def finish_quantised(self, where: str, prefix: str) -> None:
        """Collects scales; call once after a quantised checkpoint's weights are filled. Raises
        CheckpointError, which names the checkpoint and the tensor, for values that cannot be."""
        if self.place.device.type == "meta":
            return
        for stack in self.stacks:
            stack.distribute()
        for each in self.projections():
            each.check(where, prefix)
        for slab in self.slabs or ():
            slab.finish()

    def tensors(self) -> Tensors:
        """Two tensors of all experts by their names below `experts.`, see `one_by_one`; or the
        tensors of each, where they are quantised.
        """
        if self.stacks:
            gate_up, down = (stack.tensors() for stack in self.stacks)
            return gate_up | down
        if self.slabs is not None:
            gate, up, down = (slab.tensors() for slab in self.slabs)
            return gate | up | down
        return {
            "gate_up_proj": divided(self.gate_up.transpose(1, 2), 1, self.columns, repeats=2),
            "down_proj": divided(self.down.transpose(1, 2), 2, self.columns),
        }

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Weighted sum [T, D] of the chosen experts for x [T, D]; weights and indices [T, top_k]
        of the experts.
        """
        if self.slabs is None:
            return moe(x, weights, experts, self.gate_up, self.down, self.activation)
        gate, up, down = (slab.filled for slab in self.slabs)
        maxima = whole_maxima(self.place.group) if self.columns.is_part else None
        return quantised_moe(x, weights, experts, (gate, up, down), self.activation, maxima)

    def swapped(self) -> RoutedExperts:
        """The same experts with gate and up in each other's places."""
        assert self.slabs is None
        found = copy(self)
        found.gate_up = torch.roll(self.gate_up, self.columns.count, -1)
        return found

    def unpack(self) -> None:
        """Turns quantised matrices into float ones, whose rows are not rounded."""
        if self.slabs is not None:
            self.gate_up, self.down = self._empty(self.place)
            gate, up, down = (slab.decoded(self.down.dtype) for slab in self.slabs)
            self.gate_up.copy_(torch.cat((gate, up), 1).transpose(1, 2))
            self.down.copy_(down.transpose(1, 2))
            self.slabs, self.stacks = None, ()


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

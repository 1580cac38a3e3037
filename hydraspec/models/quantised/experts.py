"""Quantised matrices of routed experts: stacked in memory, one by one or stacked in files."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hydraspec_kernels.quantised import QuantisedMatrix, unpacked
from torch import Tensor

from hydraspec.models.checkpoint.quantization import Scheme
from hydraspec.models.parts import Share, Tensors, Weight, divided, undivided
from hydraspec.models.quantised.projection import Projection, check_split, empty_numbers


@dataclass(slots=True)
class ExpertSlab:
    """One projection (gate, up or down) of all routed experts of a layer, quantised alike."""

    data: Tensor  # [E, n, k]
    projections: list[Projection]  # of each expert
    matrix: QuantisedMatrix | None = None  # once the file's scales are known

    @classmethod
    def empty(
        cls,
        name: str,
        scheme: Scheme,
        sizes: tuple[int, int | Share, int | Share],
        device: torch.device,
        data: Tensor | None = None,
    ) -> ExpertSlab:
        """Empty memory (or `data`) for E experts with inputs and outputs of the given sizes. Raises
        ConfigurationError if ranks cut a group of inputs."""
        count, inputs, outputs = sizes[0], undivided(sizes[1]), undivided(sizes[2])
        check_split(scheme, inputs, f"experts.0.{name}")
        if data is None:
            data = empty_numbers(scheme, (count, outputs.count, inputs.count), device)
        projections = [
            Projection.empty(f"{i}.{name}", scheme, inputs, outputs, data[i]) for i in range(count)
        ]
        return cls(data, projections)

    @property
    def filled(self) -> QuantisedMatrix:
        """The stacked matrix, once weights are filled."""
        assert self.matrix is not None, "the weights are not filled yet"
        return self.matrix

    def tensors(self) -> Tensors:
        """Every expert's tensors by their names after `experts.`."""
        found: Tensors = {}
        for each in self.projections:
            found |= each.tensors()
        return found

    def finish(self) -> None:
        """Collects the scales; call once after the weights are filled."""
        first = self.projections[0]
        by_row = not first.is_aligned
        scales = torch.stack([each.scales(by_row=by_row) for each in self.projections])
        rounding = first.rounding()
        if rounding.scale is not None:
            static = [each.rounding().scale for each in self.projections]
            rounding = replace(rounding, scale=torch.stack([s for s in static if s is not None]))
        self.matrix = first.matrix(self.data, scales, rounding, by_row=by_row)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """All matrices [E, n, k] in dtype."""
        return unpacked(self.filled, dtype)


@dataclass(slots=True)
class ExpertStack:
    """Tensors of a file that hold the downs of all experts, or their gates and ups together."""

    name: str  # gate_up_proj or down_proj
    scheme: Scheme
    data: Weight  # this rank's numbers [E, n, k]
    file: dict[str, Tensor]  # scales of all experts, whole, by their names after the module's
    slabs: tuple[ExpertSlab, ...]

    @classmethod
    def of_gates(
        cls, scheme: Scheme, count: int, size: int, inner: Share, device: torch.device
    ) -> ExpertStack:
        """Empty memory for gates and ups of `size` inputs."""
        data = empty_numbers(scheme, (count, 2 * inner.count, size), device)
        divides = scheme.rows is not None and inner.size % scheme.rows == 0
        single = replace(scheme, stacked=False, rows=scheme.rows if divides else 1)
        slabs = tuple(
            ExpertSlab.empty(name, single, (count, size, inner), device, half)
            for name, half in zip(("gate_proj", "up_proj"), data.chunk(2, 1), strict=True)
        )
        weight = divided(data, 1, inner, repeats=2)
        file = _stacked_file(scheme, (2 * inner.size, size), count, device)
        return cls("gate_up_proj", scheme, weight, file, slabs)

    @classmethod
    def of_downs(
        cls, scheme: Scheme, count: int, size: int, inner: Share, device: torch.device
    ) -> ExpertStack:
        """Empty memory for downs of `size` outputs."""
        data = empty_numbers(scheme, (count, size, inner.count), device)
        single = replace(scheme, stacked=False)
        slab = ExpertSlab.empty("down_proj", single, (count, inner, size), device, data)
        file = _stacked_file(scheme, (size, inner.size), count, device)
        return cls("down_proj", scheme, divided(data, 2, inner), file, (slab,))

    def tensors(self) -> Tensors:
        """Every tensor by its name after `experts.`."""
        named = {self.scheme.name(self.name, part): each for part, each in self.file.items()}
        return {self.scheme.name(self.name, self.scheme.data): self.data} | named

    def distribute(self) -> None:
        """Gives every projection its scales; call once after the weights are filled."""
        scales, count = self.file[self.scheme.scale], len(self.slabs)
        single = self.slabs[0].projections[0]
        if single.scheme.rows != self.scheme.rows and self.scheme.rows is not None:
            whole = count * single.outputs.size
            scales = scales.repeat_interleave(self.scheme.rows, 1)[:, :whole]
        for slab, mine in zip(self.slabs, scales.chunk(count, 1), strict=True):
            for i, each in enumerate(slab.projections):
                each.file[self.scheme.scale].copy_(mine[i])
                if self.scheme.input_scale is not None:
                    each.file[self.scheme.input_scale].fill_(self.file[self.scheme.input_scale][i])


def _stacked_file(
    scheme: Scheme, sizes: tuple[int, int], count: int, device: torch.device
) -> dict[str, Tensor]:
    """Empty scales of a stack of matrices [*sizes]."""
    shapes = scheme.shapes(*sizes, count)
    return {
        part: torch.empty(shape, device=device)
        for part, shape in shapes.items()
        if part != scheme.data
    }

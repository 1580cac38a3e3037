"""A named quantised matrix of a checkpoint: memory of a rank's numbers, all scales of its file, and
checks of their values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from hydraspec_kernels.quantised import E4M3, PER_INT32, QuantisedMatrix, Rounding
from torch import Tensor

from hydraspec.errors import CheckpointError, ConfigurationError
from hydraspec.models.checkpoint.quantization import Scheme, encode
from hydraspec.models.parts import Part, Share, Tensors, divided_matrix

# Of inputs, with random weights: up to 9, which normed activations seldom reach.
STATIC_SCALE = 0.02


@dataclass(slots=True)
class Projection:
    """One named matrix as its file has it: this rank's numbers, and all of its scales."""

    name: str
    scheme: Scheme
    inputs: Share
    outputs: Share
    data: Tensor  # this rank's numbers, a view of a slab
    file: dict[str, Tensor]  # the other tensors, whole, by their names after the module's

    @classmethod
    def empty(
        cls, name: str, scheme: Scheme, inputs: Share, outputs: Share, data: Tensor
    ) -> Projection:
        """A projection with empty tensors beside the given memory of its numbers."""
        file = {}
        for suffix, shape in scheme.shapes(outputs.size, inputs.size).items():
            if suffix != scheme.data:
                dtype = torch.int64 if suffix == "weight_shape" else torch.float32
                file[suffix] = torch.empty(shape, dtype=dtype, device=data.device)
        return cls(name, scheme, inputs, outputs, data, file)

    def tensors(self) -> Tensors:
        """Every tensor by its name in the checkpoint."""
        found: Tensors = {f"{self.name}.{suffix}": each for suffix, each in self.file.items()}
        packing = PER_INT32 if self.scheme.kind == "int4" else 1
        size, first = -(-self.inputs.size // packing), self.inputs.first // packing
        stored = Share(size, first, self.data.shape[1])
        name = f"{self.name}.{self.scheme.data}"
        return found | {name: divided_matrix(self.data, stored, self.outputs)}

    @property
    def is_aligned(self) -> bool:
        """Returns whether this rank's rows are whole blocks of scales."""
        block, share = self.scheme.rows, self.outputs
        if block is None:
            return False
        is_last = share.first + share.count == share.size
        return share.first % block == 0 and (share.count % block == 0 or is_last)

    def scales(self, *, by_row: bool) -> Tensor:
        """This rank's scales [R, G] in float32: of each row, or of each block of rows."""
        scheme, rows, columns = self.scheme, self.outputs, self.inputs
        found = self.file[scheme.scale].float()
        found = found.reshape(scheme.grid(rows.size, columns.size))
        if scheme.columns is not None and columns.is_part:
            first = columns.first // scheme.columns
            found = found[:, first : first + -(-columns.count // scheme.columns)]
        block = scheme.rows
        if not by_row and block is not None:
            return found[rows.first // block : -(-(rows.first + rows.count) // block)]
        if block is None:
            return found.expand(rows.count, -1).contiguous()
        found = found.repeat_interleave(block, 0)
        return found[rows.first : rows.first + rows.count].contiguous()

    def rounding(self) -> Rounding:
        """How rows are rounded before this projection."""
        scheme = self.scheme
        scale = None if scheme.input_scale is None else self.file[scheme.input_scale].view(1, 1)
        return Rounding(scheme.inputs, scheme.group or 0, scale)

    def matrix(
        self, data: Tensor, scales: Tensor, rounding: Rounding, *, by_row: bool
    ) -> QuantisedMatrix:
        """The matrix of `data` and `scales`: this projection's, or those of several alike."""
        rows = 1 if by_row else self.scheme.rows or 1
        columns, width = self.scheme.columns or self.inputs.count, self.inputs.count
        return QuantisedMatrix(data, scales, rows, columns, width, rounding)

    def check(self, where: str, prefix: str) -> None:
        """Raises CheckpointError for scales that no number can have, naming the tensor."""
        for suffix, found in self.file.items():
            name = f"{prefix}{self.name}.{suffix}"
            if suffix == "weight_shape":
                expected = [self.outputs.size, self.inputs.size]
                if found.tolist() != expected:
                    raise CheckpointError(
                        f"checkpoint {where!r}: {name} is {found.tolist()}; config.json says "
                        f"{expected}: download it again, or mend config.json"
                    )
            elif not bool((found > 0).all() & found.isfinite().all()):
                bad = found[~((found > 0) & found.isfinite())][0].item()
                raise CheckpointError(
                    f"checkpoint {where!r}: {name} holds {bad:g}; expected finite scales above 0: "
                    "download or convert it again"
                )
        if self.scheme.kind == "fp8" and bool(((self.data.view(torch.uint8) & 0x7F) == 0x7F).any()):
            raise CheckpointError(
                f"checkpoint {where!r} holds NaN: {prefix}{self.name}.{self.scheme.data}; expected "
                "finite numbers: download or convert it again"
            )

    def put(self, read: Mapping[str, Tensor]) -> None:
        """Fills the tensors from whole ones by their names after the module's."""
        for name, weight in self.tensors().items():
            whole = read[name.removeprefix(f"{self.name}.")]
            if isinstance(weight, Part):
                weight.tensor.copy_(weight.read(whole.__getitem__))
            else:
                weight.copy_(whole.reshape(weight.shape))

    def draw(self, whole: Tensor) -> None:
        """Fills the tensors by quantising a matrix in float, as a checkpoint's maker does, who
        stores scales of four-bit integers in bfloat16."""
        is_int4 = self.scheme.kind == "int4"
        read = encode(whole, self.scheme, scale_dtype=torch.bfloat16 if is_int4 else torch.float32)
        if self.scheme.input_scale is not None:
            read[self.scheme.input_scale] = torch.full((1,), STATIC_SCALE, device=whole.device)
        self.put(read)


def empty_numbers(scheme: Scheme, shape: Sequence[int], device: torch.device) -> Tensor:
    """Uninitialised memory of a scheme's numbers for a matrix [..., n, k]."""
    *before, columns = shape
    if scheme.kind == "int4":
        packed = -(-columns // PER_INT32)
        return torch.empty(*before, packed, dtype=torch.int32, device=device)
    return torch.empty(*before, columns, dtype=E4M3, device=device)


def check_split(scheme: Scheme, inputs: Share, name: str) -> None:
    """Raises ConfigurationError if a rank's inputs begin or end inside a group that shares a scale
    or an element of memory."""
    packing = PER_INT32 if scheme.kind == "int4" else 1
    unit = max(scheme.columns or 1, scheme.group or 1, packing)
    if inputs.is_part and (inputs.first % unit or inputs.count % unit):
        ranks = inputs.size // inputs.count
        fitting = (n for n in range(1, ranks) if inputs.size % (n * unit) == 0)
        allowed = ", ".join(str(n) for n in fitting) or "1"
        raise ConfigurationError(
            f"parallelism.tensor={ranks} cuts the {inputs.size} inputs of the quantised module "
            f"{name!r} inside a group of {unit}, which share a scale\n"
            f"  allowed: {allowed} (each rank a multiple of {unit} inputs)\n"
            "  to do: choose one of them, or a release in bfloat16",
            key="parallelism.tensor",
        )

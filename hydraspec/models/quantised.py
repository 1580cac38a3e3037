"""Quantised matrices of linear maps and of experts: memory by scheme, tensors by name, products.

Every projection keeps the numbers and the scales of its file: a slab of several projections is one
matrix where their schemes agree, and each has its own product where they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from hydraspec_kernels.quantised import (
    QuantisedMatrix,
    Rounding,
    quantised_linear,
    row_maxima,
    unpacked,
)
from torch import Tensor
from torch.nn.functional import linear as library_linear

from hydraspec.errors import CheckpointError, ConfigurationError
from hydraspec.models.checkpoint.quantization import E4M3, PER_INT32, Scheme, encode
from hydraspec.models.parts import Part, Share, Tensors, Weight, divided, undivided
from hydraspec.parallel.group import TensorGroup

Read = Mapping[str, Tensor]
STATIC_SCALE = (
    0.02  # of inputs, with random weights: up to 9, which normed activations seldom reach
)


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
        if self.inputs.is_part:
            share = Share(
                -(-self.inputs.size // packing), self.inputs.first // packing, self.data.shape[1]
            )
            found[f"{self.name}.{self.scheme.data}"] = Part(self.data, 1, share)
        else:
            found[f"{self.name}.{self.scheme.data}"] = divided(self.data, 0, self.outputs)
        return found

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

    def put(self, read: Read) -> None:
        """Fills the tensors from whole ones by their names after the module's."""
        for name, weight in self.tensors().items():
            whole = read[name.removeprefix(f"{self.name}.")]
            if isinstance(weight, Part):
                weight.tensor.copy_(weight.read(whole.__getitem__))
            else:
                weight.copy_(whole.reshape(weight.shape))

    def draw(self, whole: Tensor) -> None:
        """Fills the tensors by quantising a matrix in float, as a checkpoint's maker does."""
        read = encode(whole, self.scheme)
        if self.scheme.input_scale is not None:
            read[self.scheme.input_scale] = torch.full((1,), STATIC_SCALE, device=whole.device)
        self.put(read)


@dataclass(slots=True)
class Piece:
    """Neighbouring projections of a slab that one product computes."""

    columns: slice  # of the slab's outputs
    projections: list[Projection]
    data: Tensor  # of all of them
    matrix: QuantisedMatrix | None = None  # once the file's scales are known

    def finish(self) -> None:
        """Collects the scales; call once after the weights are filled."""
        first = self.projections[0]
        by_row = not all(each.is_aligned for each in self.projections[:-1]) or not (
            self.projections[-1].is_aligned
        )
        # A block of rows that ends inside a projection must not go on in the next.
        by_row = by_row or any(
            each.outputs.count % (each.scheme.rows or 1) for each in self.projections[:-1]
        )
        scales = torch.cat([each.scales(by_row=by_row) for each in self.projections])
        columns = first.scheme.columns or first.inputs.count
        rows = 1 if by_row else first.scheme.rows or 1
        width = first.inputs.count
        self.matrix = QuantisedMatrix(self.data, scales, rows, columns, width, first.rounding())


@dataclass(slots=True)
class Slab:
    """The matrix of a linear map of which at least one projection is quantised."""

    inputs: Share
    group: TensorGroup
    pieces: list[Piece | Plain] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        inputs: Share,
        outputs: Mapping[str, Share],
        schemes: Mapping[str, Scheme | None],
        *,
        group: TensorGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Slab:
        """A slab with empty memory. Raises ConfigurationError if ranks cut a group of inputs."""
        found = cls(inputs, group)
        first = 0
        for names in _alike(outputs, schemes):
            count = sum(outputs[name].count for name in names)
            columns = slice(first, first + count)
            first += count
            scheme = schemes[names[0]]
            if scheme is None:
                weight = torch.empty(count, inputs.count, dtype=dtype, device=device)
                found.pieces.append(Plain(columns, names[0], inputs, outputs[names[0]], weight))
                continue
            check_split(scheme, inputs, names[0])
            data = empty_numbers(scheme, (count, inputs.count), device)
            rows = data.split([outputs[name].count for name in names])
            found.pieces.append(
                Piece(
                    columns,
                    [
                        Projection.empty(name, scheme, inputs, outputs[name], mine)
                        for name, mine in zip(names, rows, strict=True)
                    ],
                    data,
                )
            )
        return found

    def projections(self) -> Iterator[Projection]:
        """Yields the quantised projections."""
        for piece in self.pieces:
            if isinstance(piece, Piece):
                yield from piece.projections

    def tensors(self) -> Tensors:
        """Every tensor by its name in the checkpoint."""
        found: Tensors = {}
        for piece in self.pieces:
            for each in piece.projections if isinstance(piece, Piece) else (piece,):
                found |= each.tensors()
        return found

    def finish(self) -> None:
        """Collects the scales; call once after the weights are filled."""
        for piece in self.pieces:
            if isinstance(piece, Piece):
                piece.finish()

    def product(self, x: Tensor, first: int = 0) -> Tensor:
        """Columns `first` and later of x W [T, n - first] for x [T, k]."""
        maxima, found = None, []
        for piece in self.pieces:
            if piece.columns.stop <= first:
                continue
            skipped = slice(max(first - piece.columns.start, 0), None)
            if isinstance(piece, Plain):
                found.append(library_linear(x, piece.weight[skipped]))
                continue
            matrix = piece.matrix
            assert matrix is not None, "the weights are not filled yet"
            if self.inputs.is_part and matrix.rounding.kind == "token" and maxima is None:
                maxima = whole_maxima(self.group)(x)
            if skipped.start:
                matrix = rows_from(matrix, skipped.start)
            found.append(quantised_linear(x, matrix, maxima))
        return found[0] if len(found) == 1 else torch.cat(found, -1)

    def reordered(self, columns: slice, reorder: Callable[[Tensor], Tensor]) -> Slab:
        """A slab in which the rows of one projection [n, ...], which gives these columns, are
        replaced by `reorder` of them."""

        def at(piece: Piece | Plain, rows: Tensor) -> Tensor:
            mine = slice(columns.start - piece.columns.start, columns.stop - piece.columns.start)
            found = rows.clone()
            found[mine] = reorder(rows[mine])
            return found

        pieces: list[Piece | Plain] = []
        for piece in self.pieces:
            if columns.start < piece.columns.start or columns.stop > piece.columns.stop:
                pieces.append(piece)
            elif isinstance(piece, Plain):
                pieces.append(replace(piece, weight=at(piece, piece.weight)))
            else:
                assert piece.matrix is not None
                matrix = scales_by_row(piece.matrix)
                data, kind = matrix.data, matrix.data.dtype
                if kind is E4M3:  # a type that few operators take
                    data = data.view(torch.uint8)
                data = at(piece, data).view(kind)
                matrix = replace(matrix, data=data, scales=at(piece, matrix.scales))
                pieces.append(replace(piece, data=data, matrix=matrix))
        return replace(self, pieces=pieces)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """The whole slab [n, k] in dtype."""
        found = []
        for piece in self.pieces:
            if isinstance(piece, Plain):
                found.append(piece.weight.to(dtype))
            else:
                assert piece.matrix is not None
                found.append(unpacked(piece.matrix, dtype))
        return torch.cat(found)


@dataclass(slots=True)
class Plain:
    """A projection of a slab that its checkpoint leaves in float."""

    columns: slice
    name: str
    inputs: Share
    outputs: Share
    weight: Tensor  # [n, k]

    def tensors(self) -> Tensors:
        """The weight by its name in the checkpoint."""
        if self.inputs.is_part:
            return {f"{self.name}.weight": Part(self.weight, 1, self.inputs)}
        return {f"{self.name}.weight": divided(self.weight, 0, self.outputs)}


def rows_from(matrix: QuantisedMatrix, first: int) -> QuantisedMatrix:
    """Rows `first` and later of a matrix."""
    if first % matrix.rows:
        matrix = scales_by_row(matrix)
    return matrix.of_rows(slice(first, None))


def scales_by_row(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """The same matrix with scales for each row."""
    if matrix.rows == 1:
        return matrix
    scales = matrix.scales.repeat_interleave(matrix.rows, -2)[..., : matrix.data.shape[-2], :]
    return replace(matrix, scales=scales, rows=1)


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
        raise ConfigurationError(
            f"parallelism.tensor={ranks} cuts the {inputs.size} inputs of the quantised module "
            f"{name!r} inside a group of {unit}, which share a scale\n"
            f"  allowed: numbers of ranks that leave each a multiple of {unit} inputs\n"
            "  to do: lower parallelism.tensor",
            key="parallelism.tensor",
        )


def _alike(
    outputs: Mapping[str, Share], schemes: Mapping[str, Scheme | None]
) -> Iterator[list[str]]:
    """Yields neighbouring names with equal schemes. Static inputs have a scale for each projection,
    so that each is alone."""
    found: list[str] = []
    for name in outputs:
        scheme = schemes[name]
        fuses = scheme is not None and scheme.inputs != "static"
        if found and not (fuses and schemes[found[-1]] == scheme):
            yield found
            found = []
        found.append(name)
    yield found


@dataclass(slots=True)
class ExpertSlab:
    """One projection (gate, up or down) of all routed experts of a layer, quantised alike."""

    scheme: Scheme
    inputs: Share
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
        return cls(scheme, inputs, data, projections)

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
        self.matrix = QuantisedMatrix(
            self.data,
            scales,
            1 if by_row else self.scheme.rows or 1,
            self.scheme.columns or self.inputs.count,
            self.inputs.count,
            rounding,
        )

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
        if self.slabs[0].scheme.rows != self.scheme.rows and self.scheme.rows is not None:
            whole = sum(slab.projections[0].outputs.size for slab in self.slabs)
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


def whole_maxima(group: TensorGroup) -> Callable[[Tensor], Tensor]:
    """A function from a rank's part of rows to the largest magnitudes of whole rows."""
    return lambda x: group.all_gather(row_maxima(x)).amax(0)

"""The matrix of a linear map whose checkpoint is quantised.

Every projection keeps the numbers and the scales of its file: neighbours of a slab are one product
where their schemes agree, and each has its own where they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from hydraspec_kernels.activation import Activation
from hydraspec_kernels.quantised import (
    E4M3,
    QuantisedMatrix,
    RoundedRows,
    Rounding,
    gated_quantised_linear,
    prepared,
    quantised_linear,
    quantised_partials,
    rounding_before,
    row_maxima,
    unpacked,
)
from torch import Tensor
from torch.nn.functional import linear as library_linear

from hydraspec.models.checkpoint.quantization import Scheme
from hydraspec.models.parts import Share, Tensors, divided_matrix
from hydraspec.models.quantised.projection import Projection, check_split, empty_numbers
from hydraspec.parallel.group import TensorGroup


@dataclass(slots=True)
class Piece:
    """Neighbouring projections of a slab that one product computes."""

    columns: slice  # of the slab's outputs
    projections: list[Projection]
    data: Tensor  # of all of them
    matrix: QuantisedMatrix | None = None  # once the file's scales are known

    def finish(self, dtype: torch.dtype) -> None:
        """Collects the scales, for rows in dtype; call once after the weights are filled, whose
        order in memory may change."""
        first, others = self.projections[0], self.projections[:-1]
        # A block of rows that ends inside a projection must not go on in the next.
        by_row = not all(each.is_aligned for each in self.projections) or any(
            each.outputs.count % (each.scheme.rows or 1) for each in others
        )
        scales = torch.cat([each.scales(by_row=by_row) for each in self.projections])
        matrix = first.matrix(self.data, scales, first.rounding(), by_row=by_row)
        self.matrix = prepared(matrix, dtype)


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
        return {f"{self.name}.weight": divided_matrix(self.weight, self.inputs, self.outputs)}


@dataclass(slots=True)
class Slab:
    """The matrix of a linear map of which at least one projection is quantised."""

    inputs: Share
    group: TensorGroup
    dtype: torch.dtype  # of rows
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
        found = cls(inputs, group, dtype)
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
                piece.finish(self.dtype)

    @property
    def rounding_before(self) -> Rounding | None:
        """How the kernel that writes few rows x may round them for `product`; None: not at all."""
        found = []
        for piece in self.pieces:
            if isinstance(piece, Plain) or piece.matrix is None:
                return None
            found.append(rounding_before(piece.matrix))
        rounding = found[0]
        if rounding is None or any(each != rounding for each in found):
            return None
        return None if self.inputs.is_part and rounding.kind == "token" else rounding

    def product(self, x: Tensor | RoundedRows, first: int = 0) -> Tensor:
        """Columns `first` and later of x W [T, n - first] for x [T, k], which may be rounded as
        `rounding_before` says."""
        maxima, found = None, []
        for piece in self.pieces:
            if piece.columns.stop <= first:
                continue
            skipped = max(first - piece.columns.start, 0)
            if isinstance(piece, Plain):
                assert isinstance(x, Tensor)
                found.append(library_linear(x, piece.weight[skipped:]))
                continue
            matrix = piece.matrix
            assert matrix is not None, "the weights are not filled yet"
            if maxima is None:
                maxima = self._maxima(x, matrix)
            if skipped % matrix.rows:
                matrix = matrix.by_row()
            if skipped:
                matrix = matrix.from_row(skipped)
            found.append(quantised_linear(x, matrix, maxima))
        return found[0] if len(found) == 1 else torch.cat(found, -1)

    def partial_sums(self, x: Tensor | RoundedRows) -> Tensor:
        """x W [T, n] for x [T, k], as for `product`, or its partial sums [S, T, n] in float32."""
        piece = self.pieces[0]
        if len(self.pieces) > 1 or isinstance(piece, Plain):
            return self.product(x)
        matrix = piece.matrix
        assert matrix is not None, "the weights are not filled yet"
        return quantised_partials(x, matrix, self._maxima(x, matrix))

    def gated(self, x: Tensor | RoundedRows, activation: Activation) -> Tensor | None:
        """Product act(gate(x)) * up(x) [T, n / 2] for x [T, k], for a slab of gate and up; None: no
        kernel computes it at once."""
        piece = self.pieces[0]
        if len(self.pieces) > 1 or isinstance(piece, Plain) or isinstance(x, RoundedRows):
            return None
        assert piece.matrix is not None, "the weights are not filled yet"
        return gated_quantised_linear(x, piece.matrix, activation)

    def _maxima(self, x: Tensor | RoundedRows, matrix: QuantisedMatrix) -> Tensor | None:
        """Largest magnitudes of whole rows, where x [T, k] are parts and each row has its scale."""
        if isinstance(x, Tensor) and self.inputs.is_part and matrix.rounding.kind == "token":
            return whole_maxima(self.group)(x)
        return None

    def reordered(self, columns: slice, reorder: Callable[[Tensor], Tensor]) -> Slab:
        """A slab in which the rows of one projection [n, ...], which gives these columns, are
        replaced by `reorder` of them. Scales stay those of blocks where rows stay in their blocks.
        """

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
                matrix = piece.matrix
                block = torch.arange(matrix.data.shape[0], device=matrix.data.device) // matrix.rows
                if not torch.equal(at(piece, block), block):
                    matrix = matrix.by_row()
                data, kind = matrix.data, matrix.data.dtype
                if kind is E4M3:  # a type that few operators take
                    data = data.view(torch.uint8)
                data = at(piece, data).view(kind)
                scales = matrix.scales
                if matrix.rows == 1:
                    scales = at(piece, scales.movedim(-2, 0)).movedim(0, -2).contiguous()
                matrix = replace(matrix, data=data, scales=scales)
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


def whole_maxima(group: TensorGroup) -> Callable[[Tensor], Tensor]:
    """A function from a rank's part of rows to the largest magnitudes of whole rows."""
    return lambda x: group.all_gather(row_maxima(x)).amax(0)


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

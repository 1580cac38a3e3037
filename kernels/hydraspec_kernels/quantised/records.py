"""Records of quantised matrices and of how the rows before them are rounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(slots=True, frozen=True)
class Rounding:
    """How rows [..., K] are rounded to e4m3 numbers times float32 scales."""

    kind: Literal["float", "token", "group", "static"]  # float: they are not
    group: int = 0  # numbers of a row that share a scale, for "group"
    scale: Tensor | None = None  # the one scale, for "static"; [E, 1, 1] for E experts


@dataclass(slots=True, frozen=True)
class QuantisedMatrix:
    """A matrix W [N, K] = numbers * scales, or a stack of them [E, N, K]."""

    data: Tensor  # [..., N, K] e4m3, or [..., N, K / 8] int32 of four-bit integers plus 8
    scales: Tensor  # [..., R, G] float32
    rows: int  # rows of W that share a scale
    columns: int  # columns of W that share a scale
    width: int  # K
    rounding: Rounding

    def of_rows(self, rows: slice) -> QuantisedMatrix:
        """The matrix of some rows; they must begin with a block, unless scales are per row."""
        first, last = rows.start or 0, rows.stop
        assert first % self.rows == 0, f"row {first} is inside a block of {self.rows}"
        end = None if last is None else -(-last // self.rows)
        scales = self.scales[..., first // self.rows : end, :]
        return QuantisedMatrix(
            self.data[..., rows, :], scales, self.rows, self.columns, self.width, self.rounding
        )

    def of_experts(self, experts: Tensor | slice) -> QuantisedMatrix:
        """The stack of some experts, given by their indices or as a range."""
        rounding = self.rounding
        if rounding.scale is not None:
            rounding = Rounding(rounding.kind, rounding.group, rounding.scale[experts])
        return QuantisedMatrix(
            self.data[experts], self.scales[experts], self.rows, self.columns, self.width, rounding
        )

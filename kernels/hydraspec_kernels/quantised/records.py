"""Records of quantised matrices and of how the rows before them are rounded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

MOST_ROWS = 128  # of x, in a product of few rows


@dataclass(slots=True, frozen=True)
class Rounding:
    """How rows [..., K] are rounded to e4m3 numbers times float32 scales."""

    kind: Literal["float", "token", "group", "static"]  # float: they are not
    group: int = 0  # numbers of a row that share a scale, for "group"
    scale: Tensor | None = None  # the one scale, for "static"; [E, 1, 1] for E experts


@dataclass(slots=True, frozen=True)
class RoundedRows:
    """Rows rounded to e4m3."""

    padded: Tensor  # [T or more, K] e4m3; what follows the rows is never used
    by_group: Tensor  # [G, MOST_ROWS] float32, [:, :T] are the scales of each group
    count: int  # T
    dtype: torch.dtype  # of the rows before

    @property
    def numbers(self) -> Tensor:
        """[T, K] e4m3."""
        return self.padded[: self.count]

    @property
    def scales(self) -> Tensor:
        """[T, G] float32."""
        return self.by_group[:, : self.count].t()

    def index_select(self, dim: Literal[0], rows: Tensor) -> RoundedRows:
        """Some of the rows."""
        bits = self.padded.view(torch.uint8).index_select(dim, rows)
        by_group = torch.empty_like(self.by_group)
        by_group[:, : len(rows)] = self.by_group.index_select(1, rows)
        padded = bits.view(self.padded.dtype)
        return replace(self, padded=padded, by_group=by_group, count=len(rows))


@dataclass(slots=True, frozen=True)
class QuantisedMatrix:
    """A matrix W [N, K] = numbers * scales, or a stack of them [E, N, K]."""

    data: Tensor  # [..., N, K] e4m3, or [..., N, K / 8] int32 of four-bit integers plus 8
    scales: Tensor  # [..., R, G] float32; in lanes [K / 256, N, 8] bfloat16
    rows: int  # rows of W that share a scale
    columns: int  # columns of W that share a scale
    width: int  # K
    rounding: Rounding
    lanes: bool = False  # words and scales are in the order of `lanes`

    def by_row(self) -> QuantisedMatrix:
        """The same matrix with scales for each row."""
        if self.rows == 1:
            return self
        scales = self.scales.repeat_interleave(self.rows, -2)[..., : self.data.shape[-2], :]
        return replace(self, scales=scales, rows=1)

    def from_row(self, first: int) -> QuantisedMatrix:
        """The matrix of rows `first` and later, which must begin with a block."""
        assert first % self.rows == 0, f"row {first} is inside a block of {self.rows}"
        scales = self.scales[..., first // self.rows :, :]
        return replace(self, data=self.data[..., first:, :], scales=scales)

    def of_experts(self, experts: Tensor | slice) -> QuantisedMatrix:
        """The stack of some experts, given by their indices or as a range."""
        rounding = self.rounding
        if rounding.scale is not None:
            rounding = replace(rounding, scale=rounding.scale[experts])
        data, scales = self.data[experts], self.scales[experts]
        return replace(self, data=data, scales=scales, rounding=rounding)

"""Schemes of quantised matrices: how a checkpoint stores them, and how to write and read one.

A matrix W [N, K] is stored as narrow numbers and scales; numbers of one block share a scale, and
W = number * scale. Formats: compressed-tensors' float-quantized and pack-quantized, transformers'
fp8, and Mistral's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from hydraspec_kernels.quantised import E4M3, E4M3_MAX, PER_INT32, integers
from torch import Tensor
from torch.nn.functional import pad

INT4_RANGE = (-8, 7)


@dataclass(slots=True, frozen=True, kw_only=True)
class Scheme:
    """How a module's matrix is stored, and how the rows that it multiplies are rounded."""

    kind: Literal["fp8", "int4"]  # e4m3 numbers; or integers from -8 to 7, eight in an int32
    rows: int | None  # outputs that share a scale; None: all
    columns: int | None  # inputs that share a scale; None: all
    # How rows are rounded to e4m3: not at all; with a scale for each row, for every `group` numbers
    # of a row, or with the one scale that the checkpoint gives.
    inputs: Literal["float", "token", "group", "static"]
    group: int | None = None
    scale: str = "weight_scale"  # the tensors' names, after the module's
    input_scale: str | None = None  # where inputs are static
    stacked: bool = False  # matrices of all experts [E, N, K] in one tensor

    @property
    def data(self) -> str:
        """Name of the tensor of numbers, after the module's."""
        return "weight" if self.kind == "fp8" else "weight_packed"

    def name(self, module: str, part: str) -> str:
        """Name of a module's tensor in the file: of `data`, `scale` or another part."""
        return tensor_name(module, part, stacked=self.stacked)

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """Number of scales along both dimensions of a matrix [rows, columns]."""
        return (
            1 if self.rows is None else -(-rows // self.rows),
            1 if self.columns is None else -(-columns // self.columns),
        )

    def shapes(
        self, rows: int, columns: int, experts: int | None = None
    ) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors of a matrix [rows, columns], or of a stack of them, by their names
        after the module's. A single scale has one element and any number of dimensions.
        """
        found: dict[str, tuple[int, ...]] = {self.data: (rows, columns)}
        if self.kind == "int4":
            found = {self.data: (rows, -(-columns // PER_INT32)), "weight_shape": (2,)}
        found[self.scale] = self.grid(rows, columns)
        if self.input_scale is not None:
            found[self.input_scale] = (1,) if experts is None else ()
        return found if experts is None else {k: (experts, *v) for k, v in found.items()}

    def __str__(self) -> str:
        """A short text for reports, such as "fp8 128x128, inputs per 128"."""
        if self.columns is not None:
            block = f"{self.rows}x{self.columns}" if self.rows != 1 else f"group {self.columns}"
        else:
            block = {None: "per tensor", 1: "per channel"}.get(self.rows, f"per {self.rows} rows")
        inputs = {"token": "per token", "group": f"per {self.group}", "static": "static"}
        rounded = f", inputs {inputs[self.inputs]}" if self.inputs in inputs else ""
        return f"{self.kind} {block}{rounded}"


def tensor_name(module: str, part: str, *, stacked: bool = False) -> str:
    """Name of a tensor in the file: "<module>.weight_scale_inv"; of a stack of experts, whose
    module is the tensor of numbers, "<module>" and "<module>_scale_inv"."""
    if not stacked:
        return f"{module}.{part}"
    return module if part == "weight" else f"{module}_{part.removeprefix('weight_')}"


_WIDE_NUMBERS = 1 << 24  # of a slice that is encoded at once: 64 MB in float32


def encode(
    weight: Tensor, scheme: Scheme, *, scale_dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """The tensors of a matrix [N, K] in float by their names after the module's, without a static
    scale of inputs. Scales are the largest magnitude of a block by 448, or by 7.5 for int4, as
    compressed-tensors takes them; they are rounded to scale_dtype before the numbers are.
    """
    largest = 448.0 if scheme.kind == "fp8" else 7.5
    n, k = weight.shape
    # Slices of rows bound the memory of their wide copies.
    step = max(1, _WIDE_NUMBERS // k // (scheme.rows or 1)) * (scheme.rows or 1)
    slices = weight.split(step)
    tops = torch.cat([_tops(rows, scheme) for rows in slices])
    if scheme.rows is None:
        tops = tops.amax(0, keepdim=True)
    scales = (tops / largest).to(scale_dtype)
    scales = torch.where(scales == 0, torch.finfo(scale_dtype).eps, scales)
    blocks = [-(-len(rows) // scheme.rows) for rows in slices] if scheme.rows else None
    of_slices = [scales] * len(slices) if blocks is None else scales.split(blocks)
    is_fp8 = scheme.kind == "fp8"
    width, kind = (k, E4M3) if is_fp8 else (-(-k // PER_INT32), torch.int32)
    data = torch.empty(n, width, dtype=kind, device=weight.device)
    for rows, mine, part in zip(slices, of_slices, data.split(step), strict=True):
        part.copy_(_numbers(rows, mine, scheme))
    if is_fp8:
        return {"weight": data, scheme.scale: scales}
    shape = torch.tensor([n, k], dtype=torch.int64)
    return {"weight_packed": data, scheme.scale: scales, "weight_shape": shape}


def _tops(rows: Tensor, scheme: Scheme) -> Tensor:
    """Largest magnitudes of the blocks of rows [N, K], which begin with a block, in float32."""
    wide = rows.float()
    n, k = wide.shape
    blocks = scheme.grid(n, k)
    height, width = scheme.rows or n, scheme.columns or k
    short = (blocks[0] * height - n, blocks[1] * width - k)
    padded = pad(wide, (0, short[1], 0, short[0])) if any(short) else wide
    return padded.abs().view(blocks[0], height, blocks[1], width).amax((1, 3))


def _numbers(rows: Tensor, scales: Tensor, scheme: Scheme) -> Tensor:
    """Rows [N, K] by their scales in the scheme's numbers: e4m3 [N, K], or int32 [N, K / 8]."""
    numbers = rows.float() / spread(scales, scheme, *rows.shape)
    if scheme.kind == "fp8":
        return numbers.clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return packed(numbers.round_().clamp_(*INT4_RANGE).to(torch.int32))


def decode(tensors: Mapping[str, Tensor], scheme: Scheme, columns: int) -> Tensor:
    """The matrix [N, columns] in float32 of a module's tensors by their names after its own."""
    data = tensors[scheme.data]
    numbers = data.float() if scheme.kind == "fp8" else integers(data, columns).float()
    return numbers * spread(tensors[scheme.scale], scheme, *numbers.shape)


def spread(scales: Tensor, scheme: Scheme, rows: int, columns: int) -> Tensor:
    """The scale of every number of a matrix [rows, columns], in float32, from a checkpoint's
    scales."""
    found = scales.float().reshape(scheme.grid(rows, columns))
    if scheme.rows is not None:
        found = found.repeat_interleave(scheme.rows, 0)[:rows]
    if scheme.columns is not None:
        found = found.repeat_interleave(scheme.columns, 1)[:, :columns]
    return found.expand(rows, columns)


def packed(numbers: Tensor) -> Tensor:
    """Integers [N, K] from -8 to 7 as int32 [N, K / 8], padded with zeros."""
    n, k = numbers.shape
    padded = numbers.new_zeros(n, -(-k // PER_INT32) * PER_INT32, dtype=torch.int64)
    padded[:, :k] = numbers - INT4_RANGE[0]
    shifts = torch.arange(0, 32, 4, device=numbers.device)
    whole = (padded.view(n, -1, PER_INT32) << shifts).sum(-1)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).to(torch.int32)

"""What runs quantised experts, from their shapes and formats: the tiles of grouped products of
pairs (a row with one of its experts), and how inner rows are rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hydraspec_kernels.quantised import PER_INT32, QuantisedMatrix
from hydraspec_kernels.quantised.plan import LEAST_STEP, shared_columns

Experts = tuple[QuantisedMatrix, QuantisedMatrix, QuantisedMatrix]  # gate, up and down
Maxima = Callable[[Tensor], Tensor]  # a rank's part of rows -> largest magnitudes of whole rows
# Block sizes have been compiled and not been measured.
FEW_PAIRS = 16  # of an expert, on average: reading its numbers takes longer than multiplying them


@dataclass(slots=True, frozen=True)
class ExpertTiles:
    """Block sizes of one `quantised_experts_kernel` launch."""

    pairs: int
    rows: int  # of the matrix; those of gate and up together
    step: int  # columns of the matrix at once
    warps: int
    stages: int  # steps in flight


def expert_tiles(num_pairs: int, matrix: QuantisedMatrix) -> ExpertTiles | None:
    """Tiles for so many pairs and a stack of matrices; None: the stack has no kernel.

    Steps depend on the matrix alone, and no instruction multiplies fewer than 64 of its rows, so
    that a pair's sums are the same however many pairs there are.
    """
    is_packed, rounding = matrix.data.dtype is torch.int32, matrix.rounding
    shared = shared_columns(matrix)
    if rounding.kind == "static" or (is_packed and rounding.kind != "float"):
        return None
    step = 256 if is_packed else 128
    for columns in (shared, rounding.group):
        while columns % step and not (is_packed and step % columns == 0):
            step //= 2
    if step < LEAST_STEP or (is_packed and (matrix.width % PER_INT32 or shared % PER_INT32)):
        return None
    if num_pairs <= FEW_PAIRS * matrix.data.shape[0]:
        return ExpertTiles(16, 64, step, 4, 4 if is_packed else 6)
    # Unpacked integers are in registers, so that fewer rows fit.
    return ExpertTiles(64, 64 if is_packed else 128, step, 4, 3)


def have_kernel(experts: Experts) -> bool:
    """Returns whether grouped products read the experts' numbers as they are stored."""
    gate, up, down = experts
    alike = (
        gate.data.stride() == up.data.stride()
        and gate.scales.stride() == up.scales.stride()
        and (gate.rows, gate.columns, gate.rounding) == (up.rows, up.columns, up.rounding)
    )
    return alike and None not in (expert_tiles(1, gate), expert_tiles(1, down))


def inner_maxima(inner: Tensor, down: QuantisedMatrix, maxima: Maxima | None) -> Tensor | None:
    """Largest magnitudes of whole inner rows, where ranks divide rows with one scale each."""
    return None if maxima is None or down.rounding.kind != "token" else maxima(inner)

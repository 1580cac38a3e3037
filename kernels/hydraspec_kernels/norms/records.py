"""The result of the residual sum with norms, and the widest row of their kernels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hydraspec_kernels.quantised.records import RoundedRows

MAX_WIDTH = 16384  # a longer row does not fit the registers of one program


class AddNorm(NamedTuple):
    """The residual stream after a block, and the input of the next block."""

    h: Tensor  # [T, D], the tensor that was given, changed in place
    y: Tensor | RoundedRows | None  # [T, D] norm(h), None without a next norm

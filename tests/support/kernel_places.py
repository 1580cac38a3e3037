"""Devices and dtypes of the kernel tests, and poisoned memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# The interpreter truncates to bfloat16 where a GPU rounds: float16 is its narrow type.
PLACES = [
    ("cpu", torch.float32),
    ("cpu", torch.float16),
    pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a kernel leaves unwritten holds NaN, or an index far out of range."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> Tensor:
        made = empty(*args, **kwargs)  # type: ignore[arg-type]
        return made.fill_(float("nan") if made.is_floating_point() else 2**30)

    monkeypatch.setattr(torch, "empty", poisoned)

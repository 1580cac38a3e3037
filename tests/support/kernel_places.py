"""Devices and dtypes of the kernel tests, poisoned memory, and a repair of Triton's interpreter."""

from __future__ import annotations

from importlib.util import find_spec

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


def mend_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter holds loop bounds as numpy arrays of one dimension, which numpy 2.4
    no longer turns into numbers.
    """
    if find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: object, scope: object) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)

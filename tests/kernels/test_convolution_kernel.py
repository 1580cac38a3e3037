"""The convolution of DFlash2's layers on a device against its definition, at odd sizes."""

from __future__ import annotations

import pytest
import torch
from hydraspec_kernels.convolution.kernel import block_convolution_cuda
from hydraspec_kernels.convolution.reference import block_convolution_reference
from kernel_places import PLACES, poison

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize(("blocks", "rows", "taps"), [(1, 1, 2), (3, 4, 2), (2, 8, 3), (0, 4, 2)])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_it_is_its_reference(
    device: str,
    dtype: torch.dtype,
    blocks: int,
    rows: int,
    taps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows and taps are views of wider tensors, as a layer has them."""
    groups, size = 37, 37 * 30
    wide = torch.randn(blocks * rows, size + 5, device=device).to(dtype)
    x = wide[:, :size]
    every = torch.randn(blocks * rows, 2 * taps * groups, device=device).to(dtype)
    delta = every.view(-1, 2, taps, groups)[:, 1]
    base = torch.randn(taps, size, device=device).to(dtype)
    wanted = block_convolution_reference(x, delta, base, rows)
    poison(monkeypatch)
    found = block_convolution_cuda(x, delta, base, rows)
    assert found.dtype is dtype
    error = (found.float() - wanted.float()).abs().max() if found.numel() else 0.0
    assert error <= TOLERANCE[dtype] * 4

"""Kernels over an e4m3 cache: what they write, and attention over it, against the definition.

In Triton's interpreter small; with `-m gpu` compiled, in the sizes of real models.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from attention_layers import CASES as REQUESTS
from attention_layers import DECODES, MODELS, Case, Inputs, assert_half_close, build
from grids import slow_unless
from hydraspec_kernels.attention import attend_projection, paged_attention, tiling
from hydraspec_kernels.attention.decode_kernel import attend_projection_kernel
from hydraspec_kernels.attention.e4m3 import round_kv
from hydraspec_kernels.attention.paged_kernel import paged_attention_kernel
from hydraspec_kernels.attention.qkv_kernel import write_qkv_cuda
from hydraspec_kernels.attention.reference import planned_attention_reference
from kernel_places import poison
from torch import Tensor

# Scratch memory of rows after the last request is never written.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered")

FLOAT32 = 5e-5  # sums of a few hundred terms in another order, of values up to 3


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


def over_e4m3(case: Case, seed: int = 7) -> tuple[Inputs, Tensor]:
    """A layer whose cache [rows, 2, Hkv, H] is in e4m3, NaN where nothing may be read, and its
    scales, of which those of the first head's keys let many of them exceed 448 numbers."""
    inputs = build(case, seed)
    draw = torch.Generator().manual_seed(seed)
    scales = torch.rand(2, case.kv_heads, generator=draw) * 0.2 + 0.05
    scales[0, 0] = 0.003
    scales = scales.to(inputs.cache.device)
    inputs.cache = round_kv(inputs.cache, scales)
    inputs.shape = replace(inputs.shape, kv_scales=scales)
    return inputs, scales


def check(inputs: Inputs, scales: Tensor) -> None:
    """The writing kernel rounds what it writes to a plain cache; the fused kernel, where it takes
    the plan, writes the same bytes; both readers attend over numbers times scales."""
    plain = (inputs.cache.float() * scales[:, :, None]).to(inputs.qkv.dtype)
    apart, fused = (inputs.cache.clone() for _ in range(2))
    projection, _, plan, shape = inputs.arguments(apart)
    q = write_qkv_cuda(projection, plain if inputs.writes else None, replace(shape, kv_scales=None))
    assert torch.equal(q, write_qkv_cuda(projection, apart if inputs.writes else None, shape))
    if inputs.writes:
        at = inputs.slots[inputs.slots >= 0]
        assert torch.equal(apart[at].float(), round_kv(plain[at], scales).float())
    expected = planned_attention_reference(
        q.double(), apart.double() * scales.double()[:, :, None], plan
    )
    found = [paged_attention_kernel(q, apart, plan, scales)]
    if tiling.supports_decode(plan.shape, plan.max_rows):
        arguments: Any = inputs.arguments(fused)
        found.append(attend_projection_kernel(*arguments, writes=inputs.writes))
        assert torch.equal(fused.view(torch.uint8), apart.view(torch.uint8))
    for out in found:
        if out.dtype is torch.float32:
            assert (out.double() - expected).abs().max() < FLOAT32
        else:
            assert_half_close(out, expected)


CASES = {
    name: Case(**vars(REQUESTS[name]))
    for name in (
        "decode, first token of a request",
        "rows differ",
        "window shorter, verify rows over a block border",
        "head size that is no power of two",
        "rows after the last and padding requests",
    )
} | {
    "shared cache": Case((2, 3), (40, 9), writes=False),
    "values are raw keys": Case((2, 3), (40, 9), k_eq_v=True, value_norm=False),
    "a prompt": Case((19,), (33,), heads=6, kv_heads=3),
}
WAYS = ("few splits", "transposed")
QUICK = [("rows after the last and padding requests", "transposed"), ("a prompt", "few splits")]


@pytest.fixture
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "FULL_DEVICE", 8 if request.param == "few splits" else 1)
    monkeypatch.setattr(tiling, "LEAST_SHARE", 1)
    most = 1e3 if request.param == "transposed" else 1e-3
    reached = dict.fromkeys(tiling.REACHED, 1e-3) | {1: 0.5, 4: most}
    monkeypatch.setattr(tiling, "REACHED", reached)


@pytest.mark.parametrize(
    ("name", "programs"),
    slow_unless(lambda *case: case in QUICK, product(CASES, WAYS)),
    indirect=["programs"],
)
@pytest.mark.usefixtures("programs")
def test_cache_and_result_are_the_definitions(name: str) -> None:
    check(*over_e4m3(CASES[name]))


def test_the_dispatch_never_reaches_kernels_that_copy_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prefills on Hopper copy keys as they are; e4m3 ones would be read as another type."""
    inputs, scales = over_e4m3(replace(Case((9,), (9,)), dtype=torch.float16))
    arguments: Any = inputs.arguments(inputs.cache)
    q = write_qkv_cuda(arguments[0], inputs.cache, inputs.shape)
    monkeypatch.setattr("hydraspec_kernels.attention.fits_prefill", lambda *_: True)
    monkeypatch.setattr("hydraspec_kernels.attention.fits_latent", lambda *_: True)
    monkeypatch.setattr("hydraspec_kernels.attention.fits_decode", lambda *_: False)
    expected = paged_attention_kernel(q, inputs.cache, inputs.plan, scales)
    assert torch.equal(paged_attention(q, inputs.cache, inputs.plan, scales), expected)
    again: Any = attend_projection(*arguments, writes=True)
    torch.testing.assert_close(again, expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [*DECODES, "rows differ", "a prompt"])
@pytest.mark.parametrize("model", ["80 wide", "128 wide", "E4B sliding", "31B full"])
def test_compiled(model: str, rows: str, dtype: torch.dtype) -> None:
    others = {"rows differ": ((8, 1, 8, 3), (1030, 1, 8, 0)), "a prompt": ((300,), (700,))}
    count, lens = (DECODES | others)[rows]
    base = Case(count, lens, **MODELS[model], dtype=dtype, device="cuda", block_size=16)
    check(*over_e4m3(replace(base, tail=5, strided=True)))


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [1, 8, 64])
@pytest.mark.parametrize("model", ["E4B sliding", "31B full"])
def test_compiled_batches(model: str, requests: int) -> None:
    lens = tuple(600 + 7 * b for b in range(requests))
    base = Case((1,) * requests, lens, **MODELS[model], dtype=torch.bfloat16, device="cuda")
    check(*over_e4m3(replace(base, block_size=16, starts=False)))

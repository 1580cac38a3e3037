"""Caches in e4m3: what is written, and attention over it, against a cache of the rounded numbers in
the rows' type."""

import dataclasses

import pytest
import torch
from hydraspec_kernels.attention import (
    GroupShape,
    Projection,
    QkvShape,
    RowSegment,
    attend_projection,
    hold_kv,
    paged_attention,
    plan_attention,
    with_gain,
    write_qkv,
)
from hydraspec_kernels.attention.plan import device_plan
from hydraspec_kernels.attention.reference import (
    attend_projection_reference,
    planned_attention_reference,
)
from torch import Tensor

E4M3 = torch.float8_e4m3fn
BLOCK, REQUESTS, HEAD = 4, 3, 6
SCALES = torch.tensor([[0.37, 0.01], [0.0625, 3.0]])  # 0.01: many keys exceed 448 numbers
HEADS = QkvShape(num_heads=4, num_kv_heads=2, head_dim=HEAD, eps=1e-6)


@pytest.fixture(params=["cpu", "cpu, padding", "device's plan"])
def how(request: pytest.FixtureRequest) -> str:
    return request.param


def numbers(x: Tensor) -> Tensor:
    """e4m3 numbers by the definition: the nearest of all 253 finite ones, ties to the even code."""
    codes = torch.arange(256, dtype=torch.uint8)
    every = codes.view(E4M3).double()
    finite = every[~every.isnan()]
    codes = codes[~every.isnan()].to(torch.float64)
    distance = (x.double()[..., None] - finite).abs()
    tie = distance + 1e-300 + (codes % 2) * 1e-12
    return finite[tie.argmin(-1)]


def made(how: str, dtype: torch.dtype) -> tuple[Projection, Tensor, Tensor, object]:
    """A projection, an e4m3 cache whose unused rows are NaN, a plain one, and a plan."""
    draw = torch.Generator().manual_seed(3)
    lens, rows = torch.tensor([9, 5, 11]), 2
    table = 1 + torch.randperm(9, generator=draw).view(REQUESTS, 3)
    positions = torch.cat([torch.arange(n - rows, n) for n in lens.tolist()])
    owner = torch.arange(REQUESTS).repeat_interleave(rows)
    slots = table[owner, positions // BLOCK] * BLOCK + positions % BLOCK
    rounded = torch.full((10 * BLOCK, 2, 2, HEAD), torch.nan).to(E4M3)
    rounded[:BLOCK] = torch.zeros(HEAD).to(E4M3)
    for b, length in enumerate(lens.tolist()):
        j = torch.arange(length - rows)
        at = table[b, j // BLOCK] * BLOCK + j % BLOCK
        found = torch.randn(len(at), 2, 2, HEAD, generator=draw) * 3
        rounded.view(torch.uint8)[at] = found.to(E4M3).view(torch.uint8)
    plain = (rounded.float() * SCALES[:, :, None]).to(dtype)
    qkv = (torch.randn(len(slots), 8 * HEAD, generator=draw) * 2).to(dtype)
    angle = torch.randn(len(slots), 1, HEAD // 2, generator=draw)
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([-angle.sin(), angle.sin()], -1)
    projection = Projection(qkv, cos.to(dtype), sin.to(dtype), slots, how == "cpu, padding")
    shape = GroupShape(
        num_heads=4, num_kv_heads=2, head_dim=HEAD, block_size=BLOCK, window=7, scale=0.4
    )
    segments = (RowSegment(0, 0, REQUESTS, rows, 11),)
    if how == "device's plan":
        starts = torch.arange(0, 7, rows)
        return projection, rounded, plain, device_plan(shape, segments, table, lens, starts)
    plan = plan_attention(shape, segments, table, lens, positions, dtype)
    return projection, rounded, plain, plan


def copied(projection: Projection) -> Projection:
    return dataclasses.replace(projection, qkv=projection.qkv.clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_written_numbers_are_the_nearest_and_clamped(how, dtype):
    projection, cache, plain, _ = made(how, dtype)
    heads = dataclasses.replace(HEADS, kv_scales=SCALES)
    write_qkv(copied(projection), plain, HEADS)
    write_qkv(copied(projection), cache, heads)
    at = projection.cache_rows
    expected = numbers((plain[at].float() / SCALES[:, :, None]).clamp(-448, 448))
    assert (expected.abs() == 448).any()
    assert torch.equal(cache[at].double(), expected)


def test_padding_writes_nothing():
    projection, cache, _, _ = made("cpu, padding", torch.float32)
    projection.cache_rows = torch.full_like(projection.cache_rows, -1)
    before = cache.view(torch.uint8).clone()
    write_qkv(projection, cache, dataclasses.replace(HEADS, kv_scales=SCALES))
    assert torch.equal(cache.view(torch.uint8), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_attention_is_that_over_the_numbers_times_scales(how, dtype):
    projection, cache, plain, plan = made(how, dtype)
    heads = dataclasses.replace(HEADS, kv_scales=SCALES)
    attend = attend_projection_reference if how == "device's plan" else attend_projection
    found = attend(copied(projection), cache, plan, heads, writes=True)
    at = projection.cache_rows
    plain[at] = (cache[at].float() * SCALES[:, :, None]).to(dtype)
    query = write_qkv(copied(projection), torch.zeros_like(plain), HEADS)
    over_plain = planned_attention_reference if how == "device's plan" else paged_attention
    expected = over_plain(query, plain, plan)
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_held_keys_and_values_are_multiplied_by_the_scales():
    projection, cache, _, plan = made("cpu", torch.float32)
    heads = with_gain(dataclasses.replace(HEADS, kv_scales=SCALES))
    query = write_qkv(projection, cache, heads)
    expected = paged_attention(query, cache, plan, SCALES)
    held = hold_kv(plan, cache, SCALES)
    assert torch.equal(paged_attention(query, cache, held, SCALES), expected)

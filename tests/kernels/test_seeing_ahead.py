"""Attention of rows that see beyond their own position: those of an image in a prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_layers import MODELS
from grids import in_turn
from hydraspec_kernels.attention import hopper_tiling, paged_attention, tiling
from hydraspec_kernels.attention import plan as plans
from hydraspec_kernels.attention.reference import (
    planned_attention_reference,
    prefill_attention_reference,
)
from paged_queries import FLOAT64, REGIMES, Case, Inputs, build, check, on_cpu

# Scratch memory of rows after the last request is never written.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered")

# Requests, and first and last position of an image in each: its rows see each other both ways.
AHEAD = {
    "an image in a prompt": (Case((9, 5), (9, 12)), ((2, 6), (8, 10))),
    "within a window": (Case((9, 6), (20, 30), window=3), ((12, 18), (25, 28))),
    "a window of one": (Case((7,), (7,), window=1), ((1, 5),)),
    "several tiles": (Case((23, 1), (40, 9), heads=8, kv_heads=1, window=5), ((20, 36), (8, 8))),
    "nothing but the image": (Case((6,), (6,), window=40), ((0, 5),)),
    "beside padding": (Case((5, 4), (30, 0), window=8, tail=3), ((26, 28), (0, 0))),
}


def build_ahead(name: str, dtype: torch.dtype = torch.float32) -> Inputs:
    case, images = AHEAD[name]
    return built(replace(case, dtype=dtype), images)


def built(case: Case, images: tuple[tuple[int, int], ...]) -> Inputs:
    inputs, until = build(case), []
    for rows, length, (first, last) in zip(case.rows, case.lens, images, strict=True):
        until += [last if first <= p <= last else 0 for p in range(length - rows, length)]
    inputs.plan.sees_until = torch.tensor([*until, *[0] * case.tail], device=case.device)
    query, cache = inputs.query.double(), inputs.cache.double()
    inputs.expected = planned_attention_reference(query, cache, inputs.plan)
    return inputs


@pytest.mark.parametrize("name", AHEAD)
def test_an_image_sees_itself_both_ways_within_the_window(name: str) -> None:
    """Both references, row by row from the words of the specification."""
    case, images = AHEAD[name]
    inputs = build_ahead(name)
    plan, row = inputs.plan, 0
    query, cache = inputs.query.double(), inputs.cache.double()
    for b, (rows, length) in enumerate(zip(case.rows, case.lens, strict=True)):
        first, last = images[b]
        for p in range(length - rows, length) if length else ():
            end = last if first <= p <= last else p
            j = torch.arange(max(0, p - (case.window or 99) + 1), end + 1)
            at = plan.block_table[b, j // case.block_size] * case.block_size + j % case.block_size
            k, v = cache[at].repeat_interleave(case.heads // case.kv_heads, 2).unbind(1)
            scores = torch.einsum("nd,jnd->nj", query[row], k) * plan.shape.scale
            seen = torch.einsum("nj,jnd->nd", scores.softmax(-1), v).flatten()
            assert (inputs.expected[row] - seen).abs().max() < FLOAT64
            row += 1
        row += 0 if length else rows
    by_request = prefill_attention_reference(query, cache, plan)
    assert (inputs.expected - by_request).abs().max() < FLOAT64


@pytest.mark.parametrize(("name", "regime"), in_turn(AHEAD, REGIMES, ()), indirect=["regime"])
def test_rows_that_see_ahead_match_the_definition(name: str, regime: str) -> None:
    inputs = build_ahead(name)
    assert not tiling.fits_decode(inputs.plan)
    assert not hopper_tiling.fits_prefill(inputs.query.bfloat16(), inputs.plan)
    check(inputs)


@pytest.mark.parametrize("tile", [plans.MAX_TILE_SCORES, 600], ids=["whole", "tiles"])
@pytest.mark.parametrize("name", [n for n, (case, _) in AHEAD.items() if not case.tail])
def test_rows_that_see_ahead_on_the_cpu(
    name: str, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "MAX_TILE_SCORES", tile)
    wanted = build_ahead(name, torch.float64)
    plan, inputs = on_cpu(AHEAD[name][0], torch.float64, until=wanted.plan.sees_until)
    out = paged_attention(inputs.query, inputs.cache, plan)
    assert (out - wanted.expected).abs().max() < FLOAT64
    causal = on_cpu(AHEAD[name][0], torch.float64)[0]
    assert (
        paged_attention(inputs.query, inputs.cache, causal) - wanted.expected
    ).abs().max() > 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model", ["E4B sliding", "128 wide"])
def test_compiled(model: str, dtype: torch.dtype) -> None:
    base = Case((300, 17, 8), (700, 2000, 40), **MODELS[model])
    case = replace(base, dtype=dtype, device="cuda", block_size=16, tail=5, strided=True)
    check(built(case, ((420, 690), (1985, 1999), (33, 39))))

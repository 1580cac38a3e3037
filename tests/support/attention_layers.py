"""One layer's projection, cache and plan with requests of given rows and lengths."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from hydraspec_kernels.attention import GroupShape, Projection, QkvShape
from hydraspec_kernels.attention.plan import DevicePlan, RowMask, device_plan
from hydraspec_kernels.rope import mirrored, rope_frequencies
from hydraspec_kernels.rope.reference import rope_table_reference
from torch import Tensor

from hydraspec.types import RowSegment

EPS = 1e-6
# Weights and result are rounded to 8 (11) bits: relative to the norm of the result, and per entry
# relative to the largest one.
HALF_NORM = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
HALF_ENTRY = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """What `torch.empty` returns holds NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def assert_half_close(out: Tensor, expected: Tensor) -> None:
    """Equal but for the rounding of out's narrow type; expected is float64."""
    error = (out.double() - expected).abs()
    assert error.norm() < HALF_NORM[out.dtype] * expected.norm()
    assert error.max() < HALF_ENTRY[out.dtype] * expected.abs().max()


@dataclass(frozen=True)
class Requests:
    """Rows and sequence lengths per request. A length of 0 is a padding request."""

    rows: tuple[int, ...]
    lens: tuple[int, ...]
    window: int | None = None
    block_size: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    scale: float = 1.0
    mask: RowMask = "causal"
    tail: int = 0  # rows after the last request
    strided: bool = False  # inputs are part of wider rows
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def group_shape(self, latent_dim: int | None = None) -> GroupShape:
        """With latent_dim the cache holds one key per row, whose leading part is the value."""
        return GroupShape(
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            window=self.window,
            scale=self.scale,
            latent_dim=latent_dim,
            mask=self.mask,
        )


CASES = {  # for every kernel of attention
    "decode, one request": Requests((1,), (9,)),
    "decode, first token of a request": Requests((1, 1), (1, 17)),
    "decode on a block border": Requests((1, 1, 1), (4, 8, 5)),
    "decode, every split has keys": Requests((1,), (300,)),
    "verify rows": Requests((4, 4), (12, 70)),
    "rows differ": Requests((1, 9, 2, 5), (40, 9, 70, 33)),
    "queries of a request fill several tiles": Requests((9, 3), (21, 50), heads=8, kv_heads=1),
    "window larger than the sequence": Requests((1, 1), (3, 5), window=16),
    "window as long as the sequence": Requests((2,), (8,), window=8),
    "window shorter, decode": Requests((1, 1), (70, 9), window=37),
    "window shorter, verify rows over a block border": Requests((4, 4), (66, 6), window=21),
    "window shorter than the rows": Requests((9,), (12,), window=3),
    "window of one": Requests((3,), (10,), window=1),
    "one KV head": Requests((1, 1, 3), (6, 11, 9), kv_heads=1),
    "a KV head per query head": Requests((3, 3), (6, 11), kv_heads=4),
    "group of three": Requests((2, 7), (8, 51), heads=6, kv_heads=2),
    "blocks of one": Requests((2, 2), (6, 11), block_size=1),
    "blocks larger than a tile": Requests((2, 2), (70, 11), block_size=64),
    "head size that is no power of two": Requests((2, 2), (6, 11), head_dim=24),
    "scaled scores, part of wider rows": Requests((1, 3), (6, 40), scale=3.0, strided=True),
    "padding requests": Requests((2, 2, 2), (7, 0, 0)),
    "rows after the last request": Requests((3, 2), (7, 20), tail=13),
    "rows after the last and padding requests": Requests((3, 1, 1), (7, 0, 0), tail=2),
}
MODELS: dict[str, dict[str, Any]] = {
    "64 wide, grouped": {"heads": 32, "kv_heads": 8, "head_dim": 64, "scale": 0.125},
    "64 wide": {"heads": 8, "kv_heads": 8, "head_dim": 64, "scale": 0.125},
    "80 wide": {"heads": 12, "kv_heads": 4, "head_dim": 80, "scale": 0.1},
    "128 wide": {"heads": 32, "kv_heads": 8, "head_dim": 128, "scale": 0.1},
    "E4B sliding": {"heads": 8, "kv_heads": 2, "head_dim": 256, "window": 512},
    "E4B full": {"heads": 8, "kv_heads": 2, "head_dim": 512},
    "31B sliding": {"heads": 32, "kv_heads": 16, "head_dim": 256, "window": 1024},
    "31B full": {"heads": 32, "kv_heads": 4, "head_dim": 512},
}
DECODES = {
    "decode": ((1, 1, 1, 1, 1), (640, 1, 17, 5000, 1500)),
    "verify": ((4,) * 33, tuple(37 * b + 4 for b in range(33))),
}


def poisoned_cache(
    case: Requests, entry: tuple[int, ...], draw: torch.Generator, *, has_own_rows: bool = True
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A cache [rows, *entry] of NaN in which only what some row may see holds numbers, without
    has_own_rows only what no row writes; its block table; and the places of each request's keys.

    Freed blocks, and table entries after a sequence's, name the null block or poison.
    """
    device = case.device
    per_request = -(-max(case.lens) // case.block_size) + 1
    blocks = len(case.rows) * per_request
    table = (
        torch.randperm(blocks, generator=draw, device=device).view(len(case.rows), per_request) + 1
    )
    size = ((blocks + 1) * case.block_size, *entry)
    cache = torch.full(size, torch.nan, dtype=case.dtype, device=device)
    cache[: case.block_size] = 0
    places = []
    for request, (rows, length) in enumerate(zip(case.rows, case.lens, strict=True)):
        first = 0
        if case.window is not None:  # what no row can see was freed
            first = max(0, length - rows - case.window + (case.mask == "causal"))
        j = torch.arange(first, length, device=device)
        at = table[request, j // case.block_size] * case.block_size + j % case.block_size
        filled = at if has_own_rows else at[: len(at) - rows]
        entries = torch.randn(len(filled), *entry, generator=draw, device=device)
        cache[filled] = entries.to(case.dtype)
        table[request, : first // case.block_size] = 0
        if length == 0:
            table[request] = 0
        places.append(at)
    return cache, table, places


@dataclass
class Queries:
    """Queries over a poisoned cache, and the kernels' plan."""

    query: Tensor
    cache: Tensor
    plan: DevicePlan


def queries(
    case: Requests,
    latent_dim: int | None = None,
    *,
    seed: int = 7,
    size: float = 2.0,  # of a query, so that scores are of this size times case.scale
    has_starts: bool = True,
) -> Queries:
    """Random queries of every row; with latent_dim the cache holds one key a row."""
    device, draw = case.device, torch.Generator(case.device).manual_seed(seed)
    page = (1,) if latent_dim else (2, case.kv_heads)
    cache, table, _ = poisoned_cache(case, (*page, case.head_dim), draw)
    width = case.heads * (2 if case.strided else 1)
    rows = sum(case.rows) + case.tail
    query = torch.randn(rows, width, case.head_dim, generator=draw, device=device)
    query = (query * size * case.head_dim**-0.5).to(case.dtype)[:, : case.heads]
    starts = torch.tensor([0, *case.rows], device=device).cumsum(0) if has_starts else None
    lens = torch.tensor(case.lens, device=device)
    segments = [RowSegment(0, b, 1, rows, 0) for b, rows in enumerate(case.rows)]
    shape = case.group_shape(latent_dim)
    return Queries(query, cache, device_plan(shape, segments, table, lens, starts))


@dataclass(frozen=True)
class Case(Requests):
    """Requests of a layer, and what it does before attention."""

    writes: bool = True
    head_norms: bool = True
    value_norm: bool = True
    k_eq_v: bool = False
    starts: bool = True


@dataclass
class Inputs:
    qkv: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor
    cache: Tensor
    plan: DevicePlan
    shape: QkvShape
    writes: bool

    def arguments(self, cache: Tensor) -> tuple[Any, ...]:
        projection = Projection(self.qkv, self.cos, self.sin, self.slots)
        return projection, cache, self.plan, self.shape


def build(case: Case, seed: int = 7) -> Inputs:
    """A NaN-poisoned cache in which only what some row may see and no row writes holds numbers."""
    device, draw = case.device, torch.Generator(case.device).manual_seed(seed)
    entry = (2, case.kv_heads, case.head_dim)
    cache, table, places = poisoned_cache(case, entry, draw, has_own_rows=not case.writes)
    slots, positions = [], []
    for rows, length, at in zip(case.rows, case.lens, places, strict=True):
        slots += at[len(at) - rows :].tolist() if length else [-1] * rows
        positions += list(range(length - rows, length)) if length else [0] * rows
    slots += [-1] * case.tail
    positions += [0] * case.tail
    kinds = 0 if not case.writes else 1 if case.k_eq_v else 2
    heads = case.heads + kinds * case.kv_heads
    width = heads * case.head_dim * (2 if case.strided else 1)
    qkv = torch.randn(len(slots), width, generator=draw, device=device)
    weights = [None, None]
    if case.head_norms:
        root = case.head_dim**-0.25  # scores of size 1
        drawn = torch.randn(2, case.head_dim, generator=draw, device=device)
        weights = [(w * root).to(case.dtype) for w in drawn]
    cos, sin = rope_table_reference(
        torch.tensor(positions), mirrored(rope_frequencies(case.head_dim, 1e4)), case.dtype
    )
    group = case.group_shape()
    shape = QkvShape(
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        eps=EPS,
        q_weight=weights[0],
        k_weight=weights[1] if case.writes else None,
        value_norm=case.value_norm,
        k_eq_v=case.k_eq_v,
    )
    starts = torch.tensor([0, *case.rows], device=device).cumsum(0) if case.starts else None
    plan = device_plan(
        group,
        (RowSegment(0, 0, len(case.rows), max(case.rows), 0),),
        table,
        torch.tensor(case.lens, device=device),
        starts,
    )
    return Inputs(
        qkv.to(case.dtype)[:, : heads * case.head_dim],
        cos.to(device),
        sin.to(device),
        torch.tensor(slots, device=device),
        cache,
        plan,
        shape,
        case.writes,
    )

"""Exchanges between ranks that are streams of one device: the kernels without links or processes.

As many programs as all ranks have must run at once, so these have few rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from hydraspec_kernels import collectives
from hydraspec_kernels.collectives import MAX_BOXES, Fault, Mailboxes
from hydraspec_kernels.collectives.memory import found_fault
from hydraspec_kernels.collectives.reference import (
    add_norm_over_ranks_reference,
    all_reduce_reference,
)
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

EPS = 1e-6
WAIT_S = 5.0
# A norm's sum in another order; a narrow type may round the other way before and after the stream.
CLOSE = {
    torch.float32: {"rtol": 4e-6, "atol": 4e-6},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2**-5},
}
T = TypeVar("T")


def opened(size: int, wait_s: float) -> list[Mailboxes]:
    """The ends of `size` ranks, all on this device."""
    device = torch.device("cuda")
    boxes = [
        torch.full((collectives.num_bytes(size),), 0xFF, dtype=torch.uint8, device=device)
        for _ in range(size)
    ]
    addresses = [box.data_ptr() for box in boxes]
    ends = []
    for rank in range(size):
        fault = torch.zeros(1, dtype=torch.int64).pin_memory()
        ends.append(
            Mailboxes(
                rank=rank,
                size=size,
                boxes=boxes[rank],
                peers=tuple(addresses[(rank + 1 + i) % size] for i in range(size)),
                counts=torch.zeros(MAX_BOXES, dtype=torch.int32, device=device),
                control=torch.tensor([fault.data_ptr(), round(wait_s * 1e9)], device=device),
                fault=fault,
            )
        )
    torch.cuda.synchronize()
    return ends


class Ranks:
    """Streams that call alike. Each call is made once before, with boxes whose waits end at once:
    compiling and allocating could wait for the device, and so for a rank that is yet to be called.
    """

    def __init__(self, size: int) -> None:
        self.size, self.ends, self.warm = size, opened(size, WAIT_S), opened(size, 1e-3)
        self.streams = [torch.cuda.Stream() for _ in range(size)]

    def each(self, call: Callable[[Mailboxes], T]) -> list[T]:
        """What every rank's call returns."""
        self._on_streams(call, self.warm)
        found = self._on_streams(call, self.ends)
        assert [found_fault(end) for end in self.ends] == [None] * self.size
        return found

    def _on_streams(self, call: Callable[[Mailboxes], T], ends: list[Mailboxes]) -> list[T]:
        torch.cuda.synchronize()
        found = []
        for stream, end in zip(self.streams, ends, strict=True):
            with torch.cuda.stream(stream):
                found.append(call(end))
        torch.cuda.synchronize()
        return found


def draws(size: int, *shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Any:
    """[size] tensors."""
    draw = torch.Generator("cuda").manual_seed(seed)
    made = torch.randn(size, *shape, generator=draw, device="cuda")
    return list(made.to(dtype).unbind())


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "width", "parts"), [(1, 5376, 0), (4, 160, 3), (7, 1001, 0), (32, 2560, 4)]
)
def test_sums_with_norms_have_the_same_bits_on_every_rank(rows, width, parts, dtype, size):
    shape = (parts, rows, width) if parts else (rows, width)
    sent = draws(size, *shape, dtype=torch.float32 if parts else dtype)
    h = draws(1, rows, width, dtype=dtype, seed=1)[0]
    post, following = (1 + draws(1, width, dtype=dtype, seed=s)[0] / 8 for s in (2, 3))
    options = {"post_weight": post, "next_weight": following, "eps": EPS, "scale": 0.7}
    ranks = Ranks(size)
    for _ in range(3):  # both places of a box, and the first again
        found = ranks.each(
            lambda end: collectives.add_norm_over_ranks(end, h.clone(), sent[end.rank], **options)
        )
        for one, other in zip(found[0], found[1], strict=True):
            assert torch.equal(one, other)
    expected = add_norm_over_ranks_reference(h.clone(), sent, **options)
    torch.testing.assert_close(tuple(found[-1]), tuple(expected), **CLOSE[dtype])


@pytest.mark.parametrize("options", [(False, True), (True, False), (False, False)])
def test_without_norms(options):
    has_post, has_next = options
    sent, h = draws(2, 3, 640), draws(1, 3, 640, seed=1)[0]
    weight = 1 + draws(1, 640, seed=2)[0] / 8
    kinds = {
        "post_weight": weight if has_post else None,
        "next_weight": weight if has_next else None,
        "eps": EPS,
        "has_post_norm": has_post,
    }
    found = Ranks(2).each(
        lambda end: collectives.add_norm_over_ranks(end, h.clone(), sent[end.rank], **kinds)
    )
    expected = add_norm_over_ranks_reference(h.clone(), sent, **kinds)
    for one in found:
        torch.testing.assert_close(one.h, expected.h, **CLOSE[torch.bfloat16])
        assert (one.y is None) == (not has_next)
        if has_next:
            torch.testing.assert_close(one.y, expected.y, **CLOSE[torch.bfloat16])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("n", [1, 7, 5376, 30_001])
def test_sums_are_exactly_the_reference(n, dtype):
    sent = draws(4, n, dtype=dtype)
    for found in Ranks(4).each(lambda end: collectives.all_reduce(end, sent[end.rank])):
        assert torch.equal(found, all_reduce_reference(sent))


@pytest.mark.parametrize("shape", [(1, 2), (128, 2), (11, 1001)])
def test_gathers_carry_any_bits(shape):
    made = [torch.randint(-(2**31), 2**31, shape, device="cuda") for _ in range(2)]
    made[0].view(-1)[0] = -1
    for found in Ranks(2).each(lambda end: collectives.all_gather(end, made[end.rank])):
        assert torch.equal(found, torch.stack(made))


def test_words_that_look_like_an_empty_box_arrive_as_nan():
    ones = torch.full((2, 640), -1, dtype=torch.int16, device="cuda").view(torch.bfloat16)
    for found in Ranks(2).each(lambda end: collectives.all_reduce(end, ones)):
        assert found.isnan().all()


def test_many_calls_of_several_sizes():
    """Counts of messages go on from call to call, for each box by itself. Few enough launches for
    one stream's queue: they wait for those of the other.
    """
    sent = {rows: draws(2, rows, 640, dtype=torch.float32, seed=rows) for rows in (1, 9, 40)}
    order = [(1, 9, 40)[number * number % 3] for number in range(60)]

    def call(end: Mailboxes) -> Tensor:
        total = torch.zeros(640, device="cuda")
        for rows in order:
            total = total * 0.5 + collectives.all_reduce(end, sent[rows][end.rank]).sum(0)
        return total

    expected = torch.zeros(640, device="cuda")
    for rows in order:
        expected = expected * 0.5 + all_reduce_reference(sent[rows]).sum(0)
    for found in Ranks(2).each(call):
        assert torch.equal(found, expected)


def test_a_message_that_never_comes_ends_the_wait():
    ends, warm = opened(2, 1.0), opened(2, 1e-3)
    x = draws(1, 4, 640)[0]
    collectives.all_reduce(warm[0], x)  # compiles
    torch.cuda.synchronize()
    start = time.monotonic()
    collectives.all_reduce(ends[0], x)
    torch.cuda.synchronize()
    assert 0.9 < time.monotonic() - start < 2
    found = found_fault(ends[0])
    assert found is not None
    assert found == Fault(peer=1, box=found.box, count=0)
    start = time.monotonic()
    for _ in range(100):
        collectives.all_reduce(ends[0], x)
    torch.cuda.synchronize()
    assert time.monotonic() - start < 1

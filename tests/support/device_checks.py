"""What ranks with a CUDA device each check of a SymmetricGroup. Every rank runs every check.

Inputs of all ranks are drawn on every rank, so that each knows what the others sent.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hydraspec_kernels.collectives.memory import found_fault
from hydraspec_kernels.collectives.reference import (
    add_norm_over_ranks_reference,
    all_reduce_reference,
)
from hydraspec_kernels.norms.add_norm_kernel import add_norm_cuda
from torch import Tensor

from hydraspec.parallel.group import LostPeerError
from hydraspec.parallel.symmetric import SIZES, Sizes, SymmetricGroup

EPS = 1e-6
# A norm's sum in another order moves a float32 result by some units in the last place, and a narrow
# one by one step, before and after it meets the stream: of numbers below 8.
CLOSE = {
    torch.float32: {"rtol": 4e-6, "atol": 4e-6},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2**-5},
    torch.float16: {"rtol": 2**-9, "atol": 2**-8},
}
# torch and NCCL round every partial sum of bfloat16: half a step of the largest, a few times.
ROUNDED = CLOSE | {torch.bfloat16: {"rtol": 2**-6, "atol": 2**-4}}
WAIT_S = 2.0  # for a rank that never comes
REPLAYS = 1000


@dataclass
class World:
    """One rank's view."""

    rank: int
    size: int
    device: torch.device
    group: Any
    _made: dict[Any, SymmetricGroup] = field(default_factory=dict)

    def symmetric(self, sizes: Sizes | None = None, wait_s: float = 20.0) -> SymmetricGroup:
        """The same group for the same arguments."""
        key = (sizes, wait_s)
        if key not in self._made:
            made = SymmetricGroup(self.group, self.device, sizes=sizes, wait_s=wait_s)
            assert made._boxes is not None, "the devices do not reach each other"
            self._made[key] = made
        return self._made[key]

    def same_everywhere(self, x: Tensor) -> None:
        """Assert that every rank has the same bits."""
        mine = x.contiguous().view(-1).view(torch.uint8)
        every = mine.new_empty(self.size, mine.numel())
        dist.all_gather_into_tensor(every.view(-1), mine, group=self.group)
        assert (every == mine).all(), "ranks have different bits"

    def draws(self, seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        """What each rank sends."""
        return [self.draw(seed + rank, *shape, dtype=dtype) for rank in range(self.size)]

    def draw(self, seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The same numbers on every rank."""
        made = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=made, device=self.device).to(dtype)


@dataclass(frozen=True)
class Norms:
    """A case of add_norm."""

    rows: int
    width: int
    dtype: torch.dtype = torch.bfloat16
    parts: int = 0
    post: bool = True
    following: bool = True
    scale: float | None = 0.7
    has_post_norm: bool = True


def norm_cases() -> Iterator[Norms]:
    for rows, width in product((1, 2, 7, 32, 128), (160, 1001, 2560, 5376)):
        yield Norms(rows, width)
    for rows, width in ((1, 5376), (3, 160), (128, 5376), (5, 8192)):
        yield Norms(rows, width, torch.float32)
    for parts in (1, 4, 16):
        yield Norms(4, 5376, parts=parts)
        yield Norms(4, 2560, torch.float32, parts=parts)
    yield Norms(8, 4096, torch.float16)
    yield Norms(8, 5376, post=False)
    yield Norms(8, 5376, following=False)
    yield Norms(8, 5376, has_post_norm=False, scale=None)
    yield Norms(8, 5376, following=False, has_post_norm=False)


def options_of(world: World, case: Norms) -> dict[str, Any]:
    weights = [1 + world.draw(900 + i, case.width, dtype=case.dtype) / 8 for i in range(2)]
    return {
        "post_weight": weights[0] if case.post and case.has_post_norm else None,
        "next_weight": weights[1] if case.following else None,
        "eps": EPS,
        "scale": case.scale,
        "has_post_norm": case.has_post_norm,
    }


def check_case(
    world: World,
    group: SymmetricGroup,
    case: Norms,
    seed: int,
    tolerances: dict[torch.dtype, dict[str, float]] = CLOSE,
) -> None:
    shape = (case.rows, case.width)
    if case.parts:
        sent = world.draws(seed, case.parts, *shape, dtype=torch.float32)
    else:
        sent = world.draws(seed, *shape, dtype=case.dtype)
    h = world.draw(seed + 100, case.rows, 2 * case.width, dtype=case.dtype)[:, : case.width]
    options = options_of(world, case)
    expected = add_norm_over_ranks_reference(h.clone(), sent, **options)
    found = group.add_norm(h, sent[world.rank], **options)
    assert found is not None
    assert found.h is h
    torch.testing.assert_close(
        found.h, expected.h, **CLOSE[case.dtype], msg=lambda m: f"{case} {m}"
    )
    world.same_everywhere(found.h)
    if expected.y is not None:
        torch.testing.assert_close(
            found.y, expected.y, **CLOSE[case.dtype], msg=lambda m: f"{case} {m}"
        )
        world.same_everywhere(found.y)


def add_norm_by_messages(world: World) -> None:
    """Near the reference, and the same bits on every rank."""
    group = world.symmetric(Sizes(messages=1 << 30, two_shot=0, gather=1 << 30))
    for number, case in enumerate(norm_cases()):
        check_case(world, group, case, 1000 * number)
    group.check()


def add_norm_beside_the_norm_kernel(world: World) -> None:
    """The sum over ranks is that of parts: what differs is the order within a norm's own sum."""
    group = world.symmetric(Sizes(messages=1 << 30, two_shot=0, gather=1 << 30))
    case = Norms(32, 5376)
    sent, options = world.draws(7, 32, 5376), options_of(world, case)
    h = world.draw(8, 32, 5376)
    expected = add_norm_cuda(h.clone(), torch.stack(sent).float(), **options)
    found = group.add_norm(h, sent[world.rank], **options)
    assert found is not None
    assert (found.h != expected.h).float().mean() < 0.01
    torch.testing.assert_close(found.h, expected.h, **CLOSE[torch.bfloat16])


def sums_by_messages(world: World) -> None:
    """Exactly the reference: the order of ranks is part of it."""
    group = world.symmetric(Sizes(messages=1 << 30, two_shot=0, gather=1 << 30))
    kinds = (torch.bfloat16, torch.float16, torch.float32)
    for dtype, n in product(kinds, (1, 7, 160, 5376, 100_003, 128 * 5376)):
        sent = world.draws(n, n, dtype=dtype)
        found = group.all_reduce(sent[world.rank].clone())
        assert torch.equal(found, all_reduce_reference(sent)), (dtype, n)
    stacked = world.draws(5, 2, 3, 640)
    found = group.all_reduce(stacked[world.rank].clone())
    assert torch.equal(found, all_reduce_reference(stacked))


def gathers_by_messages(world: World) -> None:
    """Bit by bit, whatever the bits."""
    group = world.symmetric(Sizes(messages=1 << 30, two_shot=0, gather=1 << 30))
    for shape in ((1, 2), (5, 2), (128, 2), (33, 1001)):
        pairs = world.draws(3, *shape, dtype=torch.float32)
        pairs[0].view(-1)[0] = float("nan")
        pairs[-1].view(torch.int32).view(-1)[-1] = -1
        found = group.all_gather(pairs[world.rank])
        assert torch.equal(found.view(torch.int32), torch.stack(pairs).view(torch.int32))
    ids = [torch.arange(-3, 40, device=world.device) * (rank + 1) for rank in range(world.size)]
    assert torch.equal(group.all_gather(ids[world.rank]), torch.stack(ids))


def not_a_number_travels(world: World) -> None:
    """Words that look like an empty box are sent as other NaNs: nothing hangs, NaN arrives."""
    group = world.symmetric(Sizes(messages=1 << 30, two_shot=0, gather=1 << 30))
    for dtype, word in ((torch.bfloat16, torch.int16), (torch.float32, torch.int32)):
        x = world.draws(11, 4, 640, dtype=dtype)[world.rank]
        x[1, 8:24] = torch.full((16,), -1, dtype=word, device=world.device).view(dtype)
        total = group.all_reduce(x)
        expected = torch.zeros_like(total, dtype=torch.bool)
        expected[1, 8:24] = True
        assert torch.equal(total.isnan(), expected)
    group.check()


def large_sums(world: World) -> None:
    """Two-shot and NCCL, with and without norms."""
    two_shot = world.symmetric(Sizes(messages=0, two_shot=32 << 20, gather=0))
    nccl = world.symmetric(Sizes(messages=0, two_shot=0, gather=0))
    for group, dtype in product((two_shot, nccl), (torch.bfloat16, torch.float32)):
        for rows, width in ((3, 161), (300, 1000), (512, 5376)):
            sent = world.draws(rows, rows, width, dtype=dtype)
            found = group.all_reduce(sent[world.rank].clone())
            torch.testing.assert_close(found, all_reduce_reference(sent), **ROUNDED[dtype])
            world.same_everywhere(found)
            check_case(world, group, Norms(rows, width, dtype), rows, ROUNDED)
        gathered = group.all_gather(sent[world.rank])
        assert torch.equal(gathered, torch.stack(sent))


def captured(world: World, run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of a call that has run once before, and its output."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        output = run()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, output


def chain(world: World, group: SymmetricGroup, rows: int, width: int) -> Callable[[], Tensor]:
    """A step of some layers: sums with norms, plain sums, gathers, of the world's draws."""
    case = Norms(rows, width)
    sent = world.draws(rows, rows, width)[world.rank]
    start, options = world.draw(rows + 50, rows, width), options_of(world, case)

    def run() -> Tensor:
        h, x = start.clone(), sent.clone()  # a sum may take the place of x
        for _ in range(10):
            found = group.add_norm(h, x, **options)
            assert found is not None
            assert found.y is not None
            total = group.all_reduce(found.y * (world.rank + 1))
            best = group.all_gather(total[:, :2].float()).sum(0)
            x = found.y + best[:, :1].to(h.dtype) * 0.01
        return torch.cat((h, x), 1)

    return run


def replays_do_not_drift(world: World) -> None:
    """Graphs of several sizes, replayed in turns and beside eager steps, while the ranks' hosts and
    devices are out of step: the same bits every time and on every rank.
    """
    group = world.symmetric()
    steps = [chain(world, group, rows, width) for rows, width in ((1, 5376), (9, 640), (128, 5376))]
    first = [run().clone() for run in steps]
    graphs = [captured(world, run) for run in steps]
    order, delays = random.Random(0), random.Random(world.rank + 1)
    for number in range(REPLAYS):
        which = order.randrange(len(graphs))
        if delays.random() < 0.02:
            time.sleep(0.005)
        if delays.random() < 0.02:
            torch.cuda._sleep(2_000_000)
        graph, output = graphs[which]
        graph.replay()
        if number % 50 == 0:
            assert torch.equal(output, first[which]), f"replay {number} of graph {which}"
            assert torch.equal(steps[which](), first[which]), f"eager step {number}"
    for (graph, output), expected in zip(graphs, first, strict=True):
        graph.replay()
        assert torch.equal(output, expected)
        world.same_everywhere(output)
    group.check()


def large_sums_in_graphs(world: World) -> None:
    """Two-shot and NCCL inside captures."""
    for sizes in (
        Sizes(messages=0, two_shot=32 << 20, gather=0),
        Sizes(messages=0, two_shot=0, gather=0),
    ):
        run = chain(world, world.symmetric(sizes), 200, 5376)
        expected = run().clone()
        graph, output = captured(world, run)
        for _ in range(20):
            graph.replay()
        assert torch.equal(output, expected)
        world.same_everywhere(output)


def a_rank_that_never_comes(world: World) -> None:
    """The others' waits end, name it, and later calls do not wait again."""
    group = world.symmetric(wait_s=WAIT_S)
    x = world.draws(1, 128, 5376)[world.rank]
    group.all_reduce(x)
    torch.cuda.synchronize()
    absent = world.size - 1
    if world.rank == absent:
        time.sleep(WAIT_S + 4)
    else:
        start = time.monotonic()
        group.all_reduce(x)
        torch.cuda.synchronize()
        waited = time.monotonic() - start
        assert WAIT_S * 0.9 < waited < WAIT_S + 2, waited
        with pytest.raises(LostPeerError, match=f"rank {absent} sent nothing for {WAIT_S:g} s"):
            group.check()
        start = time.monotonic()
        for _ in range(100):
            group.all_reduce(x)
        torch.cuda.synchronize()
        assert time.monotonic() - start < 2, time.monotonic() - start
    host_barrier(world)


def a_rank_killed_while_graphs_replay(world: World) -> None:
    """Last: no rank can be used afterwards."""
    group = SymmetricGroup(world.group, world.device, wait_s=WAIT_S)
    assert group._boxes is not None
    graph, _ = captured(world, chain(world, group, 8, 5376))
    torch.cuda.synchronize()
    host_barrier(world)
    absent = world.size - 1
    start = time.monotonic()
    while time.monotonic() - start < WAIT_S + 10:
        graph.replay()
        torch.cuda.synchronize()
        if world.rank == absent and time.monotonic() - start > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if found_fault(group._boxes) is not None:
            break
    assert time.monotonic() - start < WAIT_S + 4
    with pytest.raises(LostPeerError, match=f"rank {absent} "):
        group.check()


def host_barrier(world: World) -> None:
    """A barrier of the hosts: device work may be pending."""
    dist.all_reduce(torch.zeros(1))  # gloo


def sizes_are_known(world: World) -> None:
    """The number of ranks has measured sizes."""
    assert world.size in SIZES


CHECKS: list[str] = [
    check.__name__
    for check in (
        sizes_are_known,
        sums_by_messages,
        gathers_by_messages,
        add_norm_by_messages,
        add_norm_beside_the_norm_kernel,
        not_a_number_travels,
        large_sums,
        replays_do_not_drift,
        large_sums_in_graphs,
        a_rank_that_never_comes,
        a_rank_killed_while_graphs_replay,
    )
]

"""Exchanges between ranks: every order of their steps on a model, tiles and limits, references,
and that the kernels compile for sm_90. What they compute is tested where there are devices, in
tests/parallel/test_symmetric.py.
"""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import pytest
import torch
from compiled_apart import compiled
from hydraspec_kernels import collectives
from hydraspec_kernels.collectives import BOX_BYTES, MAX_BOXES, Fault
from hydraspec_kernels.collectives.kernel import chunk_of, tile_of
from hydraspec_kernels.collectives.messages_kernel import receive_ptx, send_ptx
from hydraspec_kernels.collectives.reference import (
    add_norm_over_ranks_reference,
    all_reduce_reference,
)
from hydraspec_kernels.norms.reference import add_norm_reference
from hydraspec_kernels.runtime.launch import NUM_SMS
from message_model import BrokenError, Model, ends, walk
from ptx_machine import ONES, run

COMPILE = """
import json, sys
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from hydraspec_kernels.collectives import kernel as kernels

found = []
for name, size, dtype, width, parts, norms in json.loads(sys.argv[1]):
    kernel = getattr(kernels, name)
    names = kernel.arg_names
    floats = ("out_ptr", "h_ptr", "y_ptr", "post_weight_ptr", "next_weight_ptr")
    types = dict.fromkeys(floats, "*" + dtype)
    types |= {"x_ptr": "*fp32" if parts > 1 else "*" + dtype, "eps": "fp32", "scale": "fp32"}
    types |= {"counts_ptr": "*i32", "control_ptr": "*i64", "peers": ("i64",) * size}
    pack, padded, warps = kernels.tile_of(width, {"fp32": 4, "bf16": 2, "i16": 4}[dtype])
    fixed = dict.fromkeys(("HAS_POST_NORM", "HAS_POST_WEIGHT", "HAS_NEXT_NORM"), norms)
    fixed |= {"WIDTH": padded, "CHUNK": padded, "PARTS": parts, "PACK": pack}
    fixed |= {"SIZE": size, "WARPS": warps, "PDL": True}
    fixed = {key: value for key, value in fixed.items() if key in names}
    aligned = (*floats, "x_ptr", "width", "h_stride", "x_row_stride", "x_part_stride")
    source = GluonASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in fixed else types.get(n, "i32") for n in names},
        constexprs={(names.index(key),): value for key, value in fixed.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned if n in names},
    )
    options = {"num_warps": warps, "launch_pdl": True}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    found.append([ptx.count(part) for part in (
        "@p st.relaxed.sys.global.v4", "ld.relaxed.sys.global.v4", "griddepcontrol.wait",
        "again:", "bra again",
    )])
print(json.dumps(found))
"""


def test_the_kernels_compile(tmp_path: Path) -> None:
    """Each 16 bytes of a thread are stored once for every rank and loaded in one loop."""
    jobs = [  # and tiles of a thread
        (("_add_norm_kernel", 2, "bf16", 5376, 4, True), 1),
        (("_add_norm_kernel", 4, "fp32", 5376, 1, False), 2),
        (("_all_reduce_kernel", 4, "bf16", 1024, 1, True), 1),
        (("_all_gather_kernel", 2, "i16", 1024, 1, True), 1),
    ]
    counted = compiled(COMPILE, [job for job, _ in jobs], tmp_path)
    for (job, tiles), (stores, loads, waits, loops, returns) in zip(jobs, counted, strict=True):
        assert stores == job[1] * tiles, job
        assert loads == job[1] * tiles, job
        assert waits == 1, job
        assert loops == tiles, job
        assert returns == 3 * tiles, job


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("pack", [4, 8])
def test_every_loop_ends_and_operands_are_in_place(size, pack):
    text = receive_ptx(size, pack, 4096)
    limit = text.index("setp.lt.u64 p, now, end;")
    assert text.index("%globaltimer") < limit < text.index("st.relaxed.sys.global.b64 [fault]")
    operands = {int(number) for number in re.findall(r"\$(\d+)", text)}
    first = 4 * size  # after the outputs
    assert operands == {*range(first), first, first + pack, first + 2 * pack}
    for rank in range(size):
        assert f"[${first}+{rank * 4096}]" in text
        assert f"mov.b64 end, {rank << 8};" in text
    assert {int(number) for number in re.findall(r"\$(\d+)", send_ptx())} == set(range(9))


@pytest.mark.parametrize(
    ("size", "launches"), [(2, (1, 1, 1, 1, 1)), (2, (2, 1, 2)), (3, (1, 1, 1))]
)
def test_messages_find_empty_boxes_in_every_order(size, launches):
    model = Model(size, launches)
    (last,), _ = ends(model, 100_000)
    assert [rank.launch for rank in last.ranks] == [len(launches)] * size
    assert not last.boxes
    assert not last.flying


@pytest.mark.parametrize("wrong", [{"slots": 1}, {"resets_land": False}])
def test_the_model_finds_what_is_unsafe(wrong):
    """One box a sender, or resets that may land after their launch."""
    with pytest.raises(BrokenError):
        ends(Model(2, (1, 1, 1, 1), **wrong), 100_000)


@pytest.mark.parametrize("stops", [(0, 0), (1, 0), (1, 1), (2, 1)])
def test_waits_end_and_blame_the_rank_that_never_came(stops):
    model = Model(3, (1, 1), stops=stops)
    found, _ = ends(model, 100_000)
    for state in found:
        for index, rank in enumerate(model.given_up(state).ranks):
            if index != stops[0]:
                assert rank.blamed == stops[0]


@pytest.mark.parametrize("seed", range(10))
def test_more_ranks_in_random_order(seed):
    draw = random.Random(seed)
    launches = tuple(draw.randint(1, 3) for _ in range(draw.randint(3, 5)))
    last = walk(Model(4, launches), [draw.random() for _ in range(1000)])
    assert [rank.launch for rank in last.ranks] == [len(launches)] * 4


FAULT, CONTROL, BOXES, NEXT_RANK = 16, 32, 1 << 12, 1 << 16  # addresses
STRIDE = 256  # from the boxes of one sender to those of the next
LIMIT = 5000  # nanoseconds


def exchanges(rank: int, size: int, box: int, messages: list[list[int]], memory, clock, found):
    """One program's exchanges of a launch after another, as `kernel._exchange` places them."""
    for count, words in enumerate(messages):
        parity, at = count % 2, 16 * box
        send = dict(enumerate(words, 4))
        for i in range(size):
            peer = BOXES + (rank + 1 + i) % size * NEXT_RANK
            to = peer + (parity * size + rank) * STRIDE + at
            yield from run(send_ptx(), send | {8: to}, memory, clock)
        first, code = 4 * size, count << 32 | box << 16 | 1
        own = BOXES + rank * NEXT_RANK + parity * size * STRIDE + at
        inputs = {first: own, first + 8: CONTROL, first + 16: code}
        got = yield from run(receive_ptx(size, 8, STRIDE), inputs, memory, clock)
        found[rank, box, count] = [got[f"${i}"] for i in range(first)]


def interleaved(programs: list, draw: random.Random) -> None:
    while programs:
        program = draw.choice(programs)
        try:
            next(program)
        except StopIteration:
            programs.remove(program)


def empty_memory(size: int) -> dict[int, int]:
    memory = dict.fromkeys((FAULT, FAULT + 4, CONTROL + 4, CONTROL + 12), 0)
    memory |= {CONTROL: FAULT, CONTROL + 8: LIMIT}
    for rank in range(size):
        start = BOXES + rank * NEXT_RANK
        memory |= dict.fromkeys(range(start, start + 2 * size * STRIDE, 4), ONES)
    return memory


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_instructions_exchange_every_message(size, seed):
    """The text that is compiled, run an access at a time in random order."""
    draw = random.Random(seed)
    memory, found, boxes, launches = empty_memory(size), {}, 2, 6
    words = {
        (rank, box): [[draw.choice((0, 1, ONES)) for _ in range(4)] for _ in range(launches)]
        for rank in range(size)
        for box in range(boxes)
    }
    interleaved(
        [
            exchanges(rank, size, box, messages, memory, itertools.count(), found)
            for (rank, box), messages in words.items()
        ],
        draw,
    )
    for (_, box, count), got in found.items():
        sent = [word for rank in range(size) for word in words[rank, box][count]]
        assert got == [0x7FFFFFFF if word == ONES else word for word in sent]
    assert len(found) == size * boxes * launches
    assert memory == empty_memory(size)


def test_the_instructions_give_up_and_say_whose_message_is_missing():
    memory, found = empty_memory(3), {}
    clock = itertools.count(0, 1000)
    words = [[1, 2, 3, 4]] * 3
    present = [exchanges(rank, 3, 1, words, memory, clock, found) for rank in (0, 2)]
    interleaved(present, random.Random(0))
    assert Fault.of(memory[FAULT] | memory[FAULT + 4] << 32) == Fault(peer=1, box=1, count=0)
    assert LIMIT / 1000 < next(clock) / 1000 <= 2 * (LIMIT / 1000 + 2)  # no later wait asked again


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("width", [1, 160, 1000, 2560, 5376, 8192])
def test_threads_have_different_messages(width, size):
    pack, padded, warps = tile_of(width, size)
    assert pack * size == 16
    assert padded >= width
    assert padded % (32 * warps * pack) == 0
    assert 1 <= warps <= 32
    assert warps & (warps - 1) == 0


@pytest.mark.parametrize(("n", "dtype"), [(1, torch.float32), (128 * 5376, torch.bfloat16)])
def test_boxes_suffice_for_what_fits(n, dtype):
    x = torch.empty(n, dtype=dtype)
    assert collectives.fits_all_reduce(x)
    assert chunk_of(n) * x.element_size() <= BOX_BYTES
    assert -(-n // chunk_of(n)) <= MAX_BOXES
    assert MAX_BOXES <= NUM_SMS  # all programs run at once


def test_what_fits():
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    assert collectives.fits_add_norm(empty(128, 16384))
    assert not collectives.fits_add_norm(empty(129, 64))
    assert not collectives.fits_add_norm(empty(0, 64))
    assert not collectives.fits_add_norm(empty(1, 8193, dtype=torch.float32))
    assert not collectives.fits_add_norm(empty(1, 64, dtype=torch.float64))
    most = MAX_BOXES * BOX_BYTES
    assert collectives.fits_all_reduce(empty(most // 2))
    assert not collectives.fits_all_reduce(empty(most // 2 + 1))
    assert not collectives.fits_all_reduce(empty(4, dtype=torch.int64))
    assert collectives.fits_all_gather(empty(most // 16, dtype=torch.int64))
    assert not collectives.fits_all_gather(empty(most // 16 + 1, dtype=torch.int64))
    assert not collectives.fits_all_gather(empty(4, dtype=torch.uint8))
    assert collectives.num_bytes(4) == 8 * most


def test_a_fault_is_read_as_it_was_written():
    for count in (0, 7, (1 << 32) - 1):
        word = count << 32 | 127 << 16 | 3 << 8 | 1
        signed = word - (1 << 64) if word >> 63 else word
        assert Fault.of(signed) == Fault(peer=3, box=127, count=count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_reference_is_the_norms_of_a_plain_sum(dtype):
    draw = torch.Generator().manual_seed(0)
    ranks = [torch.randn(2, 3, 40, generator=draw) for _ in range(4)]
    h = torch.randn(3, 40, generator=draw).to(dtype)
    post, following = (torch.randn(40, generator=draw).to(dtype) for _ in range(2))
    options = {"post_weight": post, "next_weight": following, "eps": 1e-6, "scale": 0.7}
    found = add_norm_over_ranks_reference(h.clone(), ranks, **options)
    sent = torch.stack([x.sum(0).to(dtype).double() for x in ranks])
    expected = add_norm_reference(h.double(), sent, **options)
    close = {torch.bfloat16: 2**-6, torch.float32: 2e-6, torch.float64: 1e-12}[dtype]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=close, atol=close)


def test_a_sum_is_rounded_once_and_in_the_order_of_ranks():
    ranks = [torch.tensor([value]) for value in (1.0, 2.0**-24, 2.0**-24)]
    assert all_reduce_reference(ranks).item() == 1.0  # from the other end it is more
    narrow = [torch.tensor([value], dtype=torch.bfloat16) for value in (1.0, 2.0**-8, 2.0**-8)]
    assert all_reduce_reference(narrow).item() == 1.0 + 2.0**-7

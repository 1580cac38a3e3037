"""The prefill kernel's producer: a warp that copies queries, keys and values to shared memory.

It takes tiles of queries one after another and announces each to the groups of warps that multiply.
Keys and values go page by page through a ring of slots; barriers say which are filled or free.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from hydraspec_kernels.attention import tiling
from hydraspec_kernels.attention.hopper_tiling import WGMMA_ROWS
from hydraspec_kernels.runtime.gluon_kernel import load_tile

GROUP_QUERIES = gl.constexpr(WGMMA_ROWS)
MAX_SPLITS = gl.constexpr(tiling.MAX_SPLITS)
SHARES_OF_LONG = gl.constexpr(tiling.SHARES_OF_LONG)
CHUNK = gl.constexpr(64)  # numbers of a row that are contiguous in shared memory


@gluon.jit
def next_slot(slot, phase, SLOTS: gl.constexpr):
    """The ring slot after `slot`, and the phase of its barrier."""
    last = slot == SLOTS - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _find_tile(
    starts, seq_lens, num_rows, num_requests, units, tiles, at,
    FEW: gl.constexpr, GROUP: gl.constexpr, M: gl.constexpr, BLOCK_B: gl.constexpr,
    SKIPPED_ROWS: gl.constexpr,
):  # fmt: skip
    """Request and first query of the tile with the number `at`; the request's first row, number of
    rows, and length. Request B stands for the rows after the last one. Requests with at most
    SKIPPED_ROWS rows, which another launch attends, count as without rows.

    A program takes its next tile before it knows how long the present one is, so empty tiles among
    the others leave some programs two while others end. With few rows (FEW) each request has
    `tiles` tiles, few of them empty. Otherwise tiles are numbered as in `find_request`, from the
    last one on: the last ones of a request see most keys.
    """
    if FEW:
        request = gl.minimum(at // tiles, num_requests)
        query = (at - request * tiles) * M
    else:
        unit = units - 1 - at
        b = gl.arange(0, BLOCK_B, gl.BlockedLayout([BLOCK_B // 32], [32], [1], [0]))
        exists = b <= num_requests
        first = gl.load(starts + b, mask=exists, other=0).to(gl.int32) * GROUP // M + b
        mine = (first <= unit) & exists
        request = gl.sum(mine.to(gl.int32), 0) - 1
        query = (unit - gl.max(gl.where(mine, first, 0), 0)) * M
    exists = request < num_requests
    length = gl.load(seq_lens + request, mask=exists, other=0).to(gl.int32)
    start = gl.load(starts + request).to(gl.int32)
    stop = gl.load(starts + request + 1, mask=exists, other=0).to(gl.int32)
    rows = gl.where(exists, stop, num_rows) - start
    if SKIPPED_ROWS > 0:
        rows = gl.where(exists & (rows <= SKIPPED_ROWS), 0, rows)
    return request, query, start, rows, length


@gluon.jit
def find_keys(
    length, rows, query, COUNT: gl.constexpr, GROUP: gl.constexpr, WINDOW: gl.constexpr,
    PAGE: gl.constexpr,
):  # fmt: skip
    """First key, rounded down to a page, and end of the keys that some of COUNT queries see."""
    last = gl.minimum((query + COUNT - 1) // GROUP, rows - 1)
    first = 0
    if WINDOW > 0:
        first = gl.maximum(length - rows + query // GROUP - WINDOW + 1, 0) // PAGE * PAGE
    return first, gl.where(query // GROUP < rows, length - rows + last + 1, 0)


@gluon.jit
def share_keys(first, limit, split, splits, N: gl.constexpr):
    """First key and end of the keys that a split reads: whole tiles of N, but for the last one.

    A tile has more than MAX_SPLITS splits only if each has SHARES_OF_LONG tiles of keys.
    """
    all_keys = gl.maximum(limit - first, 0)
    least = gl.minimum(gl.cdiv(all_keys, MAX_SPLITS), SHARES_OF_LONG * N)
    share = gl.cdiv(gl.maximum(gl.cdiv(all_keys, splits), least), N) * N
    first += split * share
    return first, gl.minimum(limit, first + share)


@gluon.jit
def _clear_unwritten(
    ring, slot, at, low, high, PAGE: gl.constexpr, PAGES: gl.constexpr, CHUNKS: gl.constexpr
):
    """Zeroes the values outside low..high: they may hold NaN, and 0 * NaN is NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    for p in range(PAGES):
        j = at + p * PAGE + gl.arange(0, PAGE, gl.SliceLayout(1, LAYOUT))
        good = (j >= low) & (j < high)
        if (at + p * PAGE < low) | (at + p * PAGE + PAGE > high):
            for c in range(CHUNKS):
                piece = ring.index((slot * CHUNKS + c) * PAGES + p)
                v = piece.load(LAYOUT)
                piece.store(gl.where(good[:, None], v, gl.zeros_like(v)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _announce(work, phase, kv_head, query, start, rows, length, split):
    """Hands the next tile to the multiplying groups, once both have read the previous one."""
    tile, announced, received = work
    i = gl.arange(0, 8, gl.BlockedLayout([1], [32], [1], [0]))
    v = gl.where(i == 0, kv_head, gl.where(i == 1, query, gl.where(i == 2, start, length)))
    v = gl.where(i == 3, rows, gl.where(i == 5, split, v))
    mbarrier.wait(received, phase ^ 1)
    tile.store(v)
    gl.thread_barrier()
    mbarrier.arrive(announced, count=1)


@gluon.jit
def _pick(v, i: gl.constexpr):
    """Element i of a vector that every thread holds in full."""
    return gl.sum(gl.where(gl.arange(0, v.shape[0], v.type.layout) == i, v, 0), 0)


@gluon.jit
def receive(work, phase):
    """KV head and first query of the next tile; the request's first row, number of rows, and
    length; the split of its keys. A number of rows of 0 means that there is no further tile.
    """
    tile, announced, received = work
    mbarrier.wait(announced, phase)
    v = tile.load(gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))
    mbarrier.arrive(received, count=1)
    return _pick(v, 0), _pick(v, 1), _pick(v, 2), _pick(v, 3), _pick(v, 4), _pick(v, 5)


@gluon.jit
def _find_pages(
    table, at, limit, BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr, PAGES: gl.constexpr
):
    """First cache rows [PAGES] of the pages of keys from `at` on, the same in every lane."""
    j = at + PAGE * gl.arange(0, PAGES, gl.BlockedLayout([PAGES], [32], [1], [0]))
    block = gl.load(table + j // BLOCK_SIZE, mask=j < limit, other=0).to(gl.int32)
    return block * BLOCK_SIZE + j % BLOCK_SIZE


@gluon.jit
def copy_tiles(
    query, cache, block_table, table_stride, seq_lens, starts, counters, work, queries, keys, sizes,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    WIDTH: gl.constexpr, SLOTS: gl.constexpr, BLOCK_B: gl.constexpr, FEW: gl.constexpr,
    SKIPPED_ROWS: gl.constexpr,
):  # fmt: skip
    """The program of the copying warp, which takes tiles dynamically, so that programs end at about
    the same time.
    """
    qs, q_filled, q_free = queries
    ring, filled, free = keys
    PARTS: gl.constexpr = DIM // WIDTH
    PAGES: gl.constexpr = N // PAGE
    CHUNKS: gl.constexpr = WIDTH // CHUNK
    num_rows, num_requests, units, tiles, splits = sizes
    slot, phase, q_phase, clear_phase, work_phase = 0, 0, 0, 0, 0
    index, programs = gl.program_id(0), gl.num_programs(0)
    each = KV_HEADS * splits  # programs of a tile of rows
    # bound: units * each trips, for the index rises whatever the counter holds
    while index < units * each:
        following = gl.maximum(programs + gl.atomic_add(counters, 1), index + 1)
        kv_head, split = index % KV_HEADS, index // KV_HEADS % splits
        request, q_at, start, rows, length = _find_tile(
            starts, seq_lens, num_rows, num_requests, units, tiles, index // each,
            FEW, GROUP, M, BLOCK_B, SKIPPED_ROWS,
        )  # fmt: skip
        first, limit = 0, 0
        if q_at // GROUP < rows:
            _announce(work, work_phase, kv_head, q_at, start, rows, length, split)
            work_phase ^= 1
            first, limit = find_keys(length, rows, q_at, M, GROUP, WINDOW, PAGE)
            first, limit = share_keys(first, limit, split, splits, N)
        kept = gl.maximum(length - rows - WINDOW + 1, 0) if WINDOW else 0
        table = block_table + request.to(gl.int64) * table_stride
        pages = _find_pages(table, first, limit, BLOCK_SIZE, PAGE, PAGES)
        for at in range(first, limit, N):
            rows_at = pages
            pages = _find_pages(table, at + N, limit, BLOCK_SIZE, PAGE, PAGES)
            clears = (at < kept) | (at + N > length)
            for part in gl.static_range(2 * PARTS):  # of keys, then of values
                column = (part // PARTS * KV_HEADS + kv_head) * DIM + part % PARTS * WIDTH
                bar = filled.index(gl.where(clears, SLOTS, slot) if part >= PARTS else slot)
                mbarrier.wait(free.index(slot), phase ^ 1)
                mbarrier.expect(bar, 2 * N * WIDTH)
                for p in gl.static_range(PAGES):
                    row = _pick(rows_at, p)
                    for c in gl.static_range(CHUNKS):
                        to = ring.index((slot * CHUNKS + c) * PAGES + p)
                        load_tile(cache, [row, column + c * CHUNK], bar, to)
                slot, phase = next_slot(slot, phase, SLOTS)
                if part == 0 and at == first:  # after keys: their slots were free already
                    for i in gl.static_range(M // GROUP_QUERIES):
                        mbarrier.wait(q_free.index(i), q_phase ^ 1)
                        mbarrier.expect(q_filled.index(i), 2 * GROUP_QUERIES * DIM)
                        row = start + (q_at + i * GROUP_QUERIES) // GROUP
                        for c in gl.static_range(DIM // CHUNK):
                            q = qs.index(i * (DIM // CHUNK) + c)
                            load_tile(
                                query, [row, kv_head * GROUP, c * CHUNK], q_filled.index(i), q
                            )
                    q_phase ^= 1
            if clears:
                mbarrier.wait(filled.index(SLOTS), clear_phase)
                clear_phase ^= 1
                for back in range(PARTS):
                    last = slot - 1 - back
                    v = gl.where(last < 0, last + SLOTS, last)
                    _clear_unwritten(ring, v, at, kept, length, PAGE, PAGES, CHUNKS)
                    mbarrier.arrive(filled.index(v), count=1)
        index = following
    _announce(work, work_phase, 0, 0, 0, 0, 0, 0)
    if gl.atomic_add(counters + 1, 1) == programs - 1:  # the last program resets them
        gl.store(counters, 0)
        gl.store(counters + 1, 0)

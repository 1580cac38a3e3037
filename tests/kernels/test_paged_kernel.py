"""The paged kernel against its reference, in the regimes where an off-by-one would show.

In Triton's interpreter in float32 and small; with `-m gpu` compiled, in the sizes of real models.
"""

from dataclasses import replace

import pytest
import torch
from attention_layers import CASES as ATTENTION_CASES
from attention_layers import DECODES
from attention_layers import MODELS as ATTENTION_MODELS
from grids import in_turn
from hydraspec_kernels.attention import (
    GroupShape,
    paged_attention,
    plan_attention,
    tiling,
)
from hydraspec_kernels.attention import (
    paged_kernel as kernel,
)
from hydraspec_kernels.attention import plan as plans
from hydraspec_kernels.attention.plan import RowMask, device_plan
from hydraspec_kernels.attention.reference import (
    latent_attention_reference,
    paged_attention_reference,
    prefill_attention_reference,
    seen_keys,
)
from paged_queries import FLOAT64, REGIMES, Case, build, check, on_cpu, run

from hydraspec.types import RowSegment

# Scratch memory of rows after the last request is never written, and its sums are unused.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered")

CASES = {
    **{name: Case(**vars(requests)) for name, requests in ATTENTION_CASES.items()},
    "prefill of everything": Case((7,), (7,)),
    "group of eight": Case((2, 3), (6, 51), heads=8, kv_heads=1),
    "block": Case((4, 6, 1), (12, 70, 9), mask="block"),
    "block, all of it new": Case((7,), (7,), mask="block"),
    "block, several tiles": Case((9, 3), (21, 50), heads=8, kv_heads=1, mask="block"),
    "block with a window": Case((4, 4), (66, 6), window=21, mask="block"),
    "block longer than its window": Case((9, 9), (12, 40), window=3, mask="block"),
    "block beside padding": Case((4, 4, 4), (12, 0, 40), window=5, mask="block", tail=3),
    "causal block": Case((4, 6), (12, 70), window=21, mask="causal_block"),
    "causal block, window of one": Case((5,), (30,), window=1, mask="causal_block"),
    "latent": Case((1, 3), (5, 40), heads=3, kv_heads=1, head_dim=10, latent_dim=6, scale=0.7),
    "latent, several tiles": Case((7,), (40,), heads=5, kv_heads=1, head_dim=20, latent_dim=16),
}


BOTH = ("verify rows", "rows differ", "window shorter than the rows", "rows after the last request")


@pytest.mark.parametrize(("name", "regime"), in_turn(CASES, REGIMES, BOTH), indirect=["regime"])
def test_matches_the_definition(name: str, regime: str) -> None:
    check(build(CASES[name]))


@pytest.mark.parametrize("name", ["verify rows", "rows after the last request"])
def test_without_splits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "FULL_DEVICE", 1)
    check(build(CASES[name]))


def test_more_splits_than_keys() -> None:
    inputs = build(Case((1,), (20,)))
    assert tiling.paged_tiling(inputs.plan.shape, 1, 1, torch.float32).splits == tiling.MAX_SPLITS
    check(inputs)


@pytest.mark.parametrize("requests", [1, 2, 7, 33, 66, 67, 200, 600])
def test_splits_fill_the_device_once(requests: int) -> None:
    shape = GroupShape(num_heads=8, num_kv_heads=2, head_dim=256, block_size=16, window=512)
    splits = tiling.paged_tiling(shape, 4, requests, torch.bfloat16).splits
    programs = 2 * requests * splits
    assert splits == 1 or programs <= tiling.FULL_DEVICE
    assert splits == tiling.MAX_SPLITS or 2 * programs > tiling.FULL_DEVICE
    assert tiling.paged_tiling(shape, 512, requests, torch.bfloat16).splits == 1


def test_prompts_are_looked_up() -> None:
    rows = (1, tiling.MOST_SPLIT_ROWS + 4)
    check(build(Case(rows, (30, rows[1]))))


@pytest.mark.parametrize("window", [None, 5])
def test_a_row_a_request_needs_no_starts(window: int | None) -> None:
    case = Case((1, 1, 1), (30, 1, 0), window=window)
    check(build(case, given_starts=False))


def test_several_rows_need_starts() -> None:
    inputs = build(CASES["verify rows"])
    plan = inputs.plan
    segments = (RowSegment(0, 0, 2, 4, 0),)
    with pytest.raises(ValueError, match="query_start_loc"):
        device_plan(plan.shape, segments, plan.block_table, plan.seq_lens, None)


def test_float64_goes_to_the_reference() -> None:
    inputs = build(CASES["rows differ"])
    out = paged_attention(inputs.query.double(), inputs.cache.double(), inputs.plan)
    assert torch.equal(out, inputs.expected)


@pytest.mark.parametrize("name", ["rows differ", "window shorter than the rows", "verify rows"])
def test_the_padded_reference_is_the_definition(name: str) -> None:
    case = CASES[name]
    inputs = build(case)
    plan, shape = inputs.plan, inputs.plan.shape
    positions = torch.cat(
        [torch.arange(n - r, n) for r, n in zip(case.rows, case.lens, strict=True)]
    )
    request = torch.repeat_interleave(torch.arange(len(case.rows)), torch.tensor(case.rows))
    query, cache = inputs.query.double(), inputs.cache.double()
    expected = paged_attention_reference(
        query, cache, plan.block_table, positions, request, case.block_size, shape.window
    )
    assert (inputs.expected - expected.flatten(1)).abs().max() < FLOAT64


@pytest.mark.parametrize("name", CASES)
def test_the_padded_reference_is_the_one_of_each_request(name: str) -> None:
    """Prefill's specification, and the latent cache's, with windows, padding and unused rows."""
    inputs = build(CASES[name])
    latent = inputs.plan.shape.latent_dim is not None
    reference = latent_attention_reference if latent else prefill_attention_reference
    expected = reference(inputs.query.double(), inputs.cache.double(), inputs.plan)
    assert (inputs.expected - expected).abs().max() < FLOAT64


@pytest.mark.parametrize("slack", [0, 40], ids=["", "upper bound beyond the block table"])
@pytest.mark.parametrize("tile", [plans.MAX_TILE_SCORES, 600], ids=["whole", "tiles"])
@pytest.mark.parametrize(
    "name", [n for n, case in CASES.items() if all(case.lens) and not case.tail + case.strided]
)
def test_the_cpu_matches_the_definition(
    name: str, tile: int, slack: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "MAX_TILE_SCORES", tile)
    plan, inputs = on_cpu(CASES[name], torch.float64, slack)
    out = paged_attention(inputs.query, inputs.cache, plan)
    assert (out - inputs.expected).abs().max() < FLOAT64


@pytest.mark.parametrize("window", [None, 5])
def test_long_prefills_are_cut_into_tiles(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "MAX_TILE_SCORES", 600)
    plan, _ = on_cpu(Case((1, 23, 23), (9, 23, 40), window=window), torch.float64)
    assert len(plan.tiles) > 4
    assert max(tile.mask.numel() for tile in plan.tiles) <= 1200  # rows are not cut below one


@pytest.mark.parametrize("mask", ["causal", "block", "causal_block"])
@pytest.mark.parametrize("window", [None, 1, 3, 40])
@pytest.mark.parametrize("rows", [1, 4])
def test_masks_by_their_words(mask: RowMask, window: int | None, rows: int) -> None:
    """A row sees its own block as the mask says, and a context that begins `window` keys before
    the block (causal: before the key after the row's own position)."""
    length = 9
    first = length - rows
    for p in range(first, length):
        seen = {j for j in range(length) if j <= p or mask == "block"}
        if window is not None:
            oldest = p - window + 1 if mask == "causal" else first - window
            seen = {j for j in seen if j >= oldest}
        keys = torch.arange(length)
        found = seen_keys(keys, torch.tensor(p), length, rows, window, mask)
        assert set(keys[found].tolist()) == seen


def test_a_window_is_all_that_is_gathered() -> None:
    (tile,) = on_cpu(Case((4, 4), (200, 100), window=8), torch.float64)[0].tiles
    assert tile.num_keys == 8 + 4 - 1


def test_a_request_does_not_see_its_neighbours(regime: str) -> None:
    """Bitwise: graphs replay a shape whichever requests fill the other rows."""
    case = Case((2, 2, 2), (40, 9, 33))
    one = build(case)
    other = replace(case, lens=(40, 1, 0))
    two = build(other, seed=8)
    two.query[:2] = one.query[:2]
    for j in range(40):
        at = [int(i.plan.block_table[0, j // 4]) * 4 + j % 4 for i in (one, two)]
        two.cache[at[1]] = one.cache[at[0]]
    assert torch.equal(run(one)[:2], run(two)[:2])


# ------------------------------------------------------------------------------------- compiled

MODELS = {
    **{name: Case((), (), **sizes) for name, sizes in ATTENTION_MODELS.items()},
    "96 wide": Case((), (), heads=8, kv_heads=2, head_dim=96, scale=0.1),
    "192 wide": Case((), (), heads=4, kv_heads=2, head_dim=192, scale=0.1),
    "latent": Case((), (), heads=128, kv_heads=1, head_dim=576, latent_dim=512, scale=0.05),
}
ROWS = {
    **DECODES,
    "eight rows": ((8, 8, 8), (1030, 8, 0)),
    "mixed": ((1, 4, 300, 17, 129), (700, 5, 300, 2000, 1300)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("model", MODELS)
def test_compiled(model: str, rows: str, dtype: torch.dtype) -> None:
    count, lens = ROWS[rows]
    base = replace(MODELS[model], rows=count, lens=lens, dtype=dtype, device="cuda")
    check(build(replace(base, block_size=16, tail=5, strided=True)))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
def test_compiled_half(rows: str) -> None:
    count, lens = ROWS[rows]
    base = replace(MODELS["128 wide"], rows=count, lens=lens, dtype=torch.float16, device="cuda")
    check(build(replace(base, block_size=64)))


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [1, 2, 8, 64])
@pytest.mark.parametrize("model", ["E4B sliding", "E4B full", "latent"])
def test_compiled_batches(model: str, requests: int) -> None:
    lens = tuple(600 + 7 * b for b in range(requests))
    base = replace(MODELS[model], lens=lens, dtype=torch.bfloat16, device="cuda", block_size=16)
    check(build(replace(base, rows=(1,) * requests), given_starts=False))
    check(build(replace(base, rows=(3,) * requests)))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 64])
def test_a_graph_follows_the_sequence_lengths(rows: int) -> None:
    base = replace(MODELS["E4B sliding"], dtype=torch.bfloat16, device="cuda", block_size=16)
    first = build(replace(base, rows=(rows,) * 3, lens=(900, 64, 640)))
    second = build(replace(base, rows=(rows,) * 3, lens=(70, 899, 0)), seed=8)
    plan = first.plan
    assert plan.query_start_loc is not None
    run(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.paged_attention_kernel(first.query, first.cache, plan)
    for fresh in (second, build(replace(base, rows=(rows,) * 3, lens=(900, 64, 640)))):
        plan.seq_lens.copy_(fresh.plan.seq_lens)
        plan.block_table.copy_(fresh.plan.block_table)
        first.cache.copy_(fresh.cache)
        first.query.copy_(fresh.query)
        graph.replay()
        assert torch.equal(out, run(fresh))


@pytest.mark.gpu
def test_plans_on_the_device_launch_nothing() -> None:
    inputs = build(replace(CASES["verify rows"], device="cuda"))
    plan = inputs.plan
    made = plan_attention(
        plan.shape,
        (RowSegment(0, 0, 2, 4, 0),),
        plan.block_table,
        plan.seq_lens,
        plan.seq_lens,
        torch.float32,
        plan.query_start_loc,
    )
    assert made == plan

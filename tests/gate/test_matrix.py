"""The cells: every pair run, every two options of the covering set met by one cell."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from cells import all_cells
from covering import all_pairs, covering_set, pairs_of
from matrix import (
    CUDAGRAPH,
    ROUNDED,
    SAMPLING,
    Cell,
    copying_cells,
    covered_cells,
    crossed_pairs,
    factors,
    format_cells,
    is_quantised,
    pairs,
    pictured_cells,
    plain_cells,
    rounded_kv_cells,
    ruled_cells,
)

from hydraspec.cli.compose import plan

ROOT = Path(__file__).parents[2]
PAIRS = pairs(ROOT)
CROSSED = crossed_pairs(PAIRS)
COVERED = covered_cells(PAIRS)


def composed(cell: Cell) -> Any:
    (job,) = plan([*cell.overrides, *cell.on_device, "tracker=none"]).jobs
    return job.config


def test_every_pair_of_the_zoo_runs_in_both_dtypes_unless_rows_are_rounded():
    rounded = [pair for pair in PAIRS if ROUNDED in pair[0]]
    quantised = [pair for pair in PAIRS if is_quantised(pair[0])]
    assert (len(PAIRS), len(quantised), len(rounded)) == (44, 23, 18)
    cells = plain_cells(PAIRS)
    num_typed = len(PAIRS) - len(quantised)
    assert [cell.is_typed for cell in cells].count(True) == num_typed
    num_packed = len(quantised) - len(rounded)
    assert len({cell.name for cell in cells}) == 2 * num_typed + num_packed
    mirrored = {cell.twin: cell.mirrored.overrides for cell in cells}
    assert len(mirrored) == num_typed + num_packed
    assert all("target.dtype=float32" in overrides for overrides in mirrored.values())


def by_key(words: Iterable[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words)


def typed(cell: Cell) -> dict[str, str]:
    """What a cell types, by key."""
    return by_key((*cell.overrides, *cell.on_device))


def test_every_pair_of_a_quantised_target_meets_every_graph_mode():
    """Over an FP8 cache too, but for the target whose cache does not hold keys of heads; in chunks
    and with each number of requests, on either cache."""
    cells = format_cells(PAIRS)
    words = [typed(cell) for cell in cells]
    met = {(each["target"], each["method"], each["cudagraph"]) for each in words}
    assert len(met) == len(cells) == 23 * len(CUDAGRAPH)
    over_fp8 = [each for each in words if each["engine.kv_cache.dtype"] == "fp8"]
    assert len(over_fp8) == 36
    others = {each["target"] for each in words} - {each["target"] for each in over_fp8}
    assert others == {"tiny_deepseek_fp8"}
    for some in (words, over_fp8):
        assert {each["cudagraph"] for each in some} == set(CUDAGRAPH)
        assert {each["engine.max_num_batched_tokens"] for each in some} == {"104", "2048"}
        assert {each["workload.concurrency"] for each in some} == {"1", "4", "16"}


def test_cells_of_a_pair_share_the_run_on_the_cpu():
    cells = format_cells(PAIRS)
    first = {cell.twin: cell for cell in reversed(cells)}
    assert len(first) == 45  # 23 pairs, 22 of them over an FP8 cache too
    for cell in cells:
        assert cell.mirrored == first[cell.twin].mirrored
    for cell in first.values():
        ours, twin = typed(cell), typed(cell.mirrored)
        assert "cudagraph" not in twin
        assert {key: value for key, value in ours.items() if twin.get(key) != value} == {
            "target.dtype": "bfloat16",
            **by_key(cell.on_device),
        }


@pytest.mark.parametrize("index", range(0, 115, 12))
def test_cells_of_quantised_targets_compose(index: int):
    cell = format_cells(PAIRS)[index]
    for config, dtype in ((composed(cell), "bfloat16"), (composed(cell.mirrored), "float32")):
        assert config.target.name == typed(cell)["target"]
        assert config.target.dtype.value == dtype
        assert config.engine.kv_cache.dtype.value == typed(cell)["engine.kv_cache.dtype"]
    assert composed(cell).cudagraph.name == CUDAGRAPH[index % len(CUDAGRAPH)]


def test_no_two_cells_have_a_name():
    names = [cell.name for cell in all_cells(PAIRS)]
    assert len(set(names)) == len(names) == 257


def test_every_two_levels_meet():
    """A set that lost a row would leave a combination untried in silence."""
    crossed = factors(CROSSED)
    rows = covering_set(crossed)
    assert set().union(*(pairs_of(row) for row in rows)) == all_pairs(crossed)
    assert len(rows) <= 80  # what fits into a part; 13 pairs with 6 samplings are 78
    assert rows == covering_set(crossed)
    assert rows != covering_set(crossed, seed=1)


def test_cells_say_what_their_rows_say():
    """Counted on the overrides, so that a level that is not translated is seen."""
    cells = COVERED
    assert len({cell.name for cell in cells}) == len(cells)
    for key, levels in (
        ("cudagraph", CUDAGRAPH),
        ("method.verification", ["standard", "block"]),
        ("method.draft_sampling", ["greedy", "probabilistic"]),
        ("workload.concurrency", ["1", "4", "16"]),
        ("method.num_speculative_tokens", ["1", "3", "5"]),
        ("engine.async_scheduling", ["true", "false"]),
    ):
        for level in levels:
            own = [cell for cell in cells if f"{key}={level}" in cell.overrides]
            assert len(own) >= len(CROSSED), (key, level)
            seen = {o for cell in own for o in cell.overrides if o.startswith("target=")}
            assert seen == {f"target={target}" for target, _ in CROSSED}, (key, level)
    assert {cell.is_greedy for cell in cells} == {True, False}
    settings = {cell.overrides[2:-10] for cell in cells}
    assert len(settings) >= len(SAMPLING)


def test_cells_over_an_fp8_cache_have_twins_over_one():
    cells = rounded_kv_cells()
    assert {composed(cell).cudagraph.name for cell in cells} == set(CUDAGRAPH)
    for cell in cells:
        (config,) = [job.config for job in plan([*cell.mirrored.overrides, "tracker=none"]).jobs]
        assert (config.engine.kv_cache.dtype.value, config.target.dtype.value) == ("fp8", "float32")


def test_block_and_copying_drafters_meet_every_graph_mode():
    everything = [*plain_cells(PAIRS), *COVERED, *copying_cells()]
    for method in ("dflash2", "suffix", "ngram"):
        jobs = [
            plan([*cell.overrides, "tracker=none"]).jobs[0].config
            for cell in everything
            if f"method={method}" in cell.overrides
        ]
        assert {job.cudagraph.name for job in jobs} == set(CUDAGRAPH), method


def test_each_drafter_of_the_target_that_reads_pictures_is_given_some():
    cells = pictured_cells(PAIRS)
    assert {cell.overrides[1] for cell in cells} == {"method=eagle3", "method=gemma4_mtp"}
    assert len({cell.name for cell in cells}) == len(cells) == 4
    for cell in cells:
        (config,) = [job.config for job in plan([*cell.mirrored.overrides, "tracker=none"]).jobs]
        assert (config.workload.name, config.target.dtype.value) == ("images", "float32")
    chunked = [cell for cell in cells if "engine.max_num_batched_tokens=104" in cell.overrides]
    assert len(chunked) == 2


def test_rules_and_grammars_are_greedy_in_one_cell_and_sampled_in_another():
    cells = ruled_cells()
    assert len({cell.name for cell in cells}) == len(cells) == 4
    for cell in cells:
        (config,) = [job.config for job in plan([*cell.mirrored.overrides, "tracker=none"]).jobs]
        assert (config.sampling.temperature == 0) == cell.is_greedy
        assert (config.sampling.structured.json is not None) == cell.name.startswith("grammar")
        assert (config.sampling.min_tokens == 12) == cell.name.startswith("penalties")
        assert (config.method.verification.value == "block") != cell.is_greedy


@pytest.mark.parametrize("index", [0, 20, 40])
def test_covered_cells_compose(index: int):
    cell = COVERED[index]
    (config,) = [job.config for job in plan([*cell.overrides, "tracker=none"]).jobs]
    assert config.seed == index
    assert (config.sampling.temperature == 0) == cell.is_greedy

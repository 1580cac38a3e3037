"""Whole engines on several CUDA devices choose the tokens of one, with every drafter of the zoo."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from device_engines import ALL_PAIRS, check_engines
from device_ranks import checked, num_devices
from fuzz_stages import RAGGED
from graph_runs import graph_config, zoo_requests
from thread_ranks import as_ranks

from hydraspec.parallel.layout import Layout

LIMIT_S = 2400.0  # of all pairs along both axes: two engines each compile their kernels
CHECKS = {
    "tensor": "device_engines.engine_chooses_the_tokens_of_one_device",
    "pipeline": "device_engines.stages_choose_the_tokens_of_one_device",
    "ahead": "device_engines.stages_ahead_choose_the_tokens_of_one_device",
}
COUNTS = [
    pytest.param(count, marks=pytest.mark.skipif(num_devices() < count, reason="fewer devices"))
    for count in (2, 4)
]


def is_cut(axis: str, pair: str) -> bool:
    """Returns whether ranks can share a pair: the matrices of one are a single block wide."""
    _, (target, _) = ALL_PAIRS[pair]
    return axis != "tensor" or target != RAGGED.stage


@pytest.fixture(scope="module")
def said() -> dict[int, dict[str, list[str]]]:
    """What was checked already, by number of ranks: they are started once."""
    return {}


def checks_asked_for(items: list[pytest.Item], count: int) -> list[str]:
    """Those of the tests on `count` devices that were selected."""
    found = [
        item.callspec.params
        for item in items
        if item.name.startswith("test_on_devices[") and item.path == Path(__file__)
    ]
    return [f"{CHECKS[p['axis']]}:{p['pair']}" for p in found if p["count"] == count]


@pytest.mark.multi_gpu
@pytest.mark.timeout(LIMIT_S + 120)
@pytest.mark.parametrize(("axis", "pair"), [c for c in product(CHECKS, ALL_PAIRS) if is_cut(*c)])
@pytest.mark.parametrize("count", COUNTS)
def test_on_devices(count, axis, pair, said, request):
    if count not in said:
        checks = checks_asked_for(request.session.items, count)
        said[count] = checked(count, checks, LIMIT_S)
    for rank, error in enumerate(said[count][f"{CHECKS[axis]}:{pair}"]):
        assert not error, f"rank {rank}: {error}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "pair"), [c for c in product(("tensor", "pipeline"), ALL_PAIRS) if is_cut(*c)]
)
def test_the_check_passes_on_a_cpu(axis, pair):
    """Threads as ranks, without graphs: the check itself is right."""
    layout = Layout(**{axis: 2})
    method, models = ALL_PAIRS[pair]
    config = graph_config(method, "none", pair=models)
    runs = as_ranks(layout, lambda ranks: check_engines(config, ranks, zoo_requests(3)))
    assert runs[0].outputs == runs[1].outputs
    assert runs[0].drafts == runs[1].drafts

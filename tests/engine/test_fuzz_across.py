"""The comparison of a device with the CPU (test_fuzz_on_gpu.py), with a CPU's graphs in place of
the device: it runs through, and it sees what it is for.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from fuzz_across import run_across
from fuzz_cases import ON_DEVICE, Case
from fuzz_engines import build
from fuzz_stages import RANDOM_PAIRS
from graph_runs import attention_as_on_devices
from rehearsed import rehearse_on_cpu, rehearse_where_it_decodes

from hydraspec.config.schema import Dtype
from hydraspec.engine.native import NativeEngine

SMALL = tuple(pair for pair in RANDOM_PAIRS if "eagle" not in pair.stage)
CHOICES = replace(ON_DEVICE, pairs=SMALL, dtypes=(Dtype.float64,))
CASES = [3, 5, 6]  # none of them takes long


def as_on_a_device(case: Case) -> NativeEngine:
    has_graphs = case.config.cudagraph.name != "none"
    return build(replace(case, runner="recorded" if has_graphs else "launched"))


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    attention_as_on_devices(monkeypatch)


def test_graphs_decode_what_eager_steps_decode() -> None:
    across = run_across(CASES, CHOICES, as_on_a_device)
    assert across.num_cases == len(CASES)
    assert across.num_accepted > 0
    assert not across.ties + across.listed


def test_garbage_of_a_rehearsal_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearse_on_cpu(monkeypatch)
    rehearse_where_it_decodes(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        run_across(CASES[:1], CHOICES, as_on_a_device)

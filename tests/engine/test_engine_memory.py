"""Engines leave no tensor when they are dropped or closed, while Python's garbage collector is off.

A cycle of references that holds one would keep an engine's weights and KV cache on the device
while the next engine of the process is built.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from graph_runs import (
    PAIRS,
    attention_as_on_devices,
    graph_config,
    make_graph_engine,
    run_requests,
    zoo_requests,
)
from recorded_graphs import RecordedOps
from rehearsed import living_tensors

import hydraspec
from hydraspec import factory
from hydraspec.config.schema import PerStep
from hydraspec.engine.native import NativeEngine
from hydraspec.graphs import MODES
from hydraspec.types import ConfigurationError

SMALL = {"k": 2, "max_num_seqs": 2, "max_num_batched_tokens": 12, "sizes": (2,)}


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    attention_as_on_devices(monkeypatch)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def left() -> Callable[[], list[torch.Size]]:
    """Shapes of the tensors that were made since the test began and are alive."""
    before = living_tensors()  # held, so that no later tensor has the id of one of them
    known = {id(tensor) for tensor in before}
    return lambda: [found.shape for found in living_tensors() if id(found) not in known]


def built(method: str, mode: str, **fields: Any) -> NativeEngine:
    return make_graph_engine(graph_config(method, mode, **SMALL | fields), RecordedOps())


def run(engine: NativeEngine) -> None:
    """Greedy requests, then others, of which graphs are captured while they run."""
    run_requests(engine, zoo_requests(2, longest=8))
    run_requests(engine, zoo_requests(1, longest=8, temperature=0.8))


FAST = ("eagle3", "full_and_piecewise")
SLOW = {(method, "full_and_piecewise") for method in PAIRS} - {FAST}
SLOW |= {(method, mode) for method in ("gemma4_mtp", "peagle") for mode in MODES}


@pytest.mark.parametrize(
    ("method", "mode"),
    [FAST, *(pytest.param(*kind, marks=pytest.mark.slow) for kind in sorted(SLOW))],
)
def test_a_dropped_engine_leaves_nothing(
    method: str, mode: str, left: Callable[[], list[torch.Size]]
) -> None:
    engine = built(method, mode)
    run(engine)
    assert left()
    del engine
    assert not left()


@pytest.mark.parametrize("mode", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_a_closed_engine_leaves_its_baseline_what_they_share(
    mode: str, left: Callable[[], list[torch.Size]]
) -> None:
    """The engine object is still referenced."""
    engine = built("eagle3", mode)
    wanted = run_requests(engine, zoo_requests(2, longest=8))
    baseline = engine.baseline()
    num_before = len(left())
    engine.close()
    assert 0 < len(left()) < num_before
    assert run_requests(baseline, zoo_requests(2, longest=8)).outputs == wanted.outputs
    baseline.close()
    assert not left()


@pytest.mark.slow
def test_a_closed_engine_of_transformers_leaves_nothing(
    left: Callable[[], list[torch.Size]],
) -> None:
    config = graph_config("gemma4_mtp", "none")
    config.engine.name = "transformers"
    engine = factory.build_engine(config)
    requests = zoo_requests(1, longest=8)
    engine.tokenize(requests)
    for _ in engine.run(requests, concurrency=None):
        pass
    engine.close()
    assert not left()


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True], ids=["waiting", "ahead"])
def test_an_engine_closed_in_the_middle_of_a_run_leaves_nothing(
    ahead: bool, left: Callable[[], list[torch.Size]]
) -> None:
    """Once the run's iterator is gone too."""
    config = graph_config("eagle3", "full", **SMALL)
    config.engine.async_scheduling = ahead
    engine = make_graph_engine(config, RecordedOps())
    requests = zoo_requests(2)
    engine.tokenize(requests)
    events = engine.run(requests, concurrency=None)
    next(events)
    next(events)
    engine.close()
    del events
    assert not left()


@pytest.mark.slow
def test_an_engine_that_chooses_its_draft_lengths_leaves_nothing(
    left: Callable[[], list[torch.Size]],
) -> None:
    engine = built("eagle3", "full", k=PerStep.auto, max_speculative_tokens=2)
    requests = zoo_requests(2, longest=8)
    engine.tokenize(requests)
    engine.prepare(requests)  # measures costs
    run(engine)
    del engine
    assert not left()


class _NoCaptures(RecordedOps):
    def capture(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("no graph is captured")


@pytest.mark.parametrize("fails_late", [False, True], ids=["cache", "capture"])
def test_an_engine_that_could_not_be_built_leaves_nothing(
    fails_late: bool, left: Callable[[], list[torch.Size]]
) -> None:
    config = graph_config("eagle3", "full", **SMALL)
    if not fails_late:
        config.engine.kv_cache.memory_gib = 1e-6
    refused = RuntimeError if fails_late else ConfigurationError
    with pytest.raises(refused) as raised:
        make_graph_engine(config, _NoCaptures())
    del raised  # its traceback has the frames of the build
    assert not left()


@pytest.mark.slow
def test_a_run_leaves_nothing_to_the_next_one(
    tmp_path: Path, left: Callable[[], list[torch.Size]]
) -> None:
    """Method and baseline, and the pass over all positions."""
    for number in range(2):
        hydraspec.run(
            [
                *("method=eagle3", "target.checkpoint=zoo:tiny_qwen3", "target.dtype=float64"),
                *("engine.device=cpu", "method.checkpoint=zoo:tiny_qwen3-eagle3"),
                *("workload.limit=2", "sampling.max_tokens=8"),
                *("metrics.trace=true", "metrics.all_positions=true"),
                f"hydra.run.dir={tmp_path / str(number)}",
            ],
            quiet=True,
        )
        assert not left()

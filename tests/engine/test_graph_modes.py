"""Every graph mode gives the tokens of eager steps, whatever batches come after one another.

On the CPU, captures are lists of operations over fixed memory (see recorded_graphs): what a capture
froze stays frozen, so a batch that was padded wrongly, an input that was not written anew, or a
number of the host that a graph baked in shows as another token. float64: no tie turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from graph_runs import (
    GRAPH_MODES,
    PAIRS,
    Run,
    assert_same,
    attention_as_on_devices,
    cache_gib,
    count_launches,
    graph_config,
    make_graph_engine,
    run_requests,
    zoo_requests,
)
from grids import slow_unless
from late_device import LateDevice
from recorded_graphs import CalledAgain, RecordedOps

from hydraspec.engine.native import NativeEngine
from hydraspec.engine.run.device_runner import DeviceRunner
from hydraspec.engine.run.device_tables import DeviceTables
from hydraspec.engine.run.inputs import PlanTensors
from hydraspec.engine.run.runner import Runner
from hydraspec.engine.run.upload import PlanUpload
from hydraspec.speculators import autoregressive
from hydraspec.speculators.gemma4 import Gemma4Speculator
from hydraspec.types import Batch, Request, StepPlan

NUM_REQUESTS = 7
FEW = 4


def crossed(
    methods: Iterable[str], others: Sequence[Any], quick: set[tuple[str, Any]]
) -> list[Any]:
    """Every method with every other value; those that are not quick are marked slow."""
    return slow_unless(lambda *case: case in quick, product(methods, others))


def requests_of(count: int) -> list[Request]:
    """Answers of 5 to 20 tokens."""
    return zoo_requests(count, longest=20)


@pytest.fixture(autouse=True)
def _static_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    attention_as_on_devices(monkeypatch)


@cache
def eager(method: str, k: int, count: int = NUM_REQUESTS) -> Run:
    """The same requests without graphs and without padding."""
    engine = make_graph_engine(graph_config(method, "none", k=k), None)
    return run_requests(engine, requests_of(count))


@pytest.mark.parametrize(
    ("method", "mode"),
    crossed(
        PAIRS,
        GRAPH_MODES,
        # The other pairs are quick where a later test compares them with the same eager steps.
        {
            ("gemma4_mtp", "full"),
            ("eagle3 on gemma4", "full_and_piecewise"),
            ("peagle on gemma4", "full_decode_only"),
            ("eagle", "full"),
            ("mtp", "piecewise"),
            ("dspark on gemma4", "full_and_piecewise"),
            ("dflash2", "full_and_piecewise"),
        },
    ),
)
def test_every_mode_gives_the_tokens_of_eager_steps(
    method: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of unlike lengths come and go: chunked prefills mix with decodes, batches shrink and
    grow, and rows that were a request's are padding in the next step."""
    backend = RecordedOps()
    engine = make_graph_engine(graph_config(method, mode), backend)
    counts = count_launches(engine, monkeypatch)
    run = run_requests(engine, requests_of(NUM_REQUESTS))
    assert_same(run, eager(method, 3))
    assert counts["decode"] > 10
    assert counts["split"] > 3, "no decodes ran beside a prefill"
    assert counts["eager"] > 2
    assert counts["mixed"] == 0 or mode != "full_decode_only"
    assert min(run.batch_sizes) == 1 < max(run.batch_sizes)
    if method != "none":
        assert run.num_accepted > 20, "nothing is accepted: no test of drafts"


@pytest.mark.parametrize(
    ("method", "mode"),
    crossed(
        ["gemma4_mtp", "eagle3", "peagle", "eagle3 on gemma4", "peagle on gemma4"],
        ["full", "full_and_piecewise", "piecewise"],
        {("gemma4_mtp", "piecewise"), ("peagle on gemma4", "full")},
    ),
)
def test_mixed_steps_run_as_graphs_where_they_are_small(
    method: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of at most 20 rows: every step fits a mixed graph, decodes and prefills together."""
    config = graph_config(method, mode, max_num_batched_tokens=20)
    engine = make_graph_engine(config, RecordedOps())
    counts = count_launches(engine, monkeypatch)
    run = run_requests(engine, requests_of(4))
    counts_eager, tokens = counts["eager"], run.tokens
    assert counts["mixed"] > 5
    assert counts_eager == 0
    assert tokens == eager(method, 3).tokens[:4]


@pytest.mark.parametrize(
    ("method", "k"),
    crossed(
        ["gemma4_mtp", "eagle3", "peagle", "dspark"], [1, 7], {("gemma4_mtp", 7), ("eagle3", 1)}
    ),
)
def test_one_draft_and_many(method: str, k: int) -> None:
    """K = 1 has no decode pass; K = 7 rows do not divide anything."""
    config = graph_config(method, "full_and_piecewise", k=k)
    run = run_requests(make_graph_engine(config, RecordedOps()), requests_of(FEW))
    assert_same(run, eager(method, k, FEW))


def test_padding_may_hold_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot that padding shares is filled with other tokens and a length before every launch,
    and what no table names with large numbers: nothing of it reaches a request."""
    engine = make_graph_engine(graph_config("eagle3", "full"), RecordedOps())
    runner = engine.parts.runner
    launch, state = runner.launch, runner.state

    def poisoned(plan):  # type: ignore[no-untyped-def]
        state.token_ids[-1].random_(0, 50)
        return launch(plan)

    monkeypatch.setattr(runner, "launch", poisoned)
    assert_same(run_requests(engine, requests_of(FEW)), eager("eagle3", 3))
    assert state.num_computed[-1] == 0
    for cache_tensor in runner.kv.caches:
        if cache_tensor is not None:
            assert cache_tensor[:16].count_nonzero() == 0, "padding wrote into the null block"


def tables_are_written_once(patch: pytest.MonkeyPatch) -> None:
    """Later steps read the blocks of earlier requests."""
    true_changes = DeviceTables.changes

    def changes(self: DeviceTables, tables: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        found = true_changes(self, tables)
        self.num_calls = getattr(self, "num_calls", 0) + 1  # type: ignore[attr-defined]
        return found if self.num_calls < 30 else (found[0][:0], found[1][:0])  # type: ignore[attr-defined]

    patch.setattr(DeviceTables, "changes", changes)


def padding_is_a_request(patch: pytest.MonkeyPatch) -> None:
    """Padding requests have the slot and the rows of the first request."""
    true_header = PlanUpload._write_header

    def write(self: PlanUpload, words: np.ndarray, plan: StepPlan | None) -> None:
        true_header(self, words, plan)
        if plan is not None:
            for first in (self._slots, self._rows):
                b, size = len(plan.slots), self.shape.max_num_seqs
                words[first + b : first + size] = words[first]

    patch.setattr(PlanUpload, "_write_header", write)


def the_decode_pass_reads_what_it_was_captured_with(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(autoregressive, "copy_into", lambda static, value: None)


def a_graph_freezes_a_number_of_the_host(patch: pytest.MonkeyPatch) -> None:
    """The step's own count of requests becomes a part of the computation."""
    true_prepare = Runner.prepare

    def prepare(self: Runner, plan: PlanTensors) -> Batch:
        batch = true_prepare(self, plan)
        return replace(batch, samples=batch.samples & (batch.num_drafts == int(batch.slots[0])))

    patch.setattr(Runner, "prepare", prepare)


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(tables_are_written_once, marks=pytest.mark.slow),
        pytest.param(padding_is_a_request, marks=pytest.mark.slow),
        the_decode_pass_reads_what_it_was_captured_with,
        pytest.param(a_graph_freezes_a_number_of_the_host, marks=pytest.mark.slow),
    ],
)
def test_planted_bugs_are_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs above prove something only if they fail when a step is padded or captured badly."""
    wanted = eager("eagle3", 3)
    plant(monkeypatch)

    def run() -> None:
        engine = make_graph_engine(graph_config("eagle3", "full_decode_only"), RecordedOps())
        assert_same(run_requests(engine, requests_of(NUM_REQUESTS)), wanted)

    with pytest.raises((AssertionError, IndexError)):
        run()


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("gemma4_mtp", marks=pytest.mark.slow),
        pytest.param("eagle3 on gemma4", marks=pytest.mark.slow),
        "peagle on gemma4",
    ],
)
def test_preempted_requests_come_back(method: str) -> None:
    """A cache of a few blocks: requests lose their slots between replays."""
    config = graph_config(method, "full_and_piecewise", block_size=8)
    config.engine.kv_cache.memory_gib = 0.3 * cache_gib(config)
    engine = make_graph_engine(config, RecordedOps())
    run = run_requests(engine, requests_of(NUM_REQUESTS))
    assert run.num_preempted > 0
    assert run.tokens == eager(method, 3).tokens


def test_only_the_sizes_asked_for_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes 1 and 3: a batch of 2 is padded to 3, one of 4 has no graph of decodes."""
    config = graph_config("gemma4_mtp", "full_decode_only", sizes=(1, 3))
    engine = make_graph_engine(config, RecordedOps())
    runner = engine.parts.runner
    assert isinstance(runner, DeviceRunner)
    assert runner.graphs is not None
    assert [found.num_requests for found in runner.graphs.manager.descriptors] == [1, 3]
    counts = count_launches(engine, monkeypatch)
    run = run_requests(engine, requests_of(NUM_REQUESTS), concurrency=None)
    assert run.tokens == eager("gemma4_mtp", 3).tokens
    assert 2 in run.batch_sizes
    assert max(run.batch_sizes) > 3
    assert counts["decode"] > 5


def test_a_drafter_that_cannot_be_captured_drafts_after_the_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Gemma4Speculator, "cannot_be_captured", "it asks the device")
    engine = make_graph_engine(graph_config("gemma4_mtp", "full"), RecordedOps())
    assert engine.info.cudagraph["draft"] == "none"
    assert "it asks the device" in str(engine.info.cudagraph["reason"])
    assert_same(run_requests(engine, requests_of(FEW)), eager("gemma4_mtp", 3))


def test_the_baseline_has_graphs_of_its_own() -> None:
    """It shares target and cache, and decodes one row a request."""
    engine = make_graph_engine(graph_config("gemma4_mtp", "full_and_piecewise"), RecordedOps())
    first = run_requests(engine, requests_of(3))
    baseline = engine.baseline()
    assert baseline.info.cudagraph["target"] == "full_and_piecewise"
    runner = baseline.parts.runner
    assert isinstance(runner, DeviceRunner)
    assert runner.graphs
    assert run_requests(baseline, requests_of(3)).tokens == first.tokens
    assert run_requests(engine, requests_of(3)).outputs == first.outputs


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("gemma4_mtp", marks=pytest.mark.slow),
        "eagle3",
        pytest.param("eagle3 on gemma4", marks=pytest.mark.slow),
    ],
)
def test_steps_launched_ahead_replay_the_same(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device works as late as it may, so the host has planned the next step by then."""
    wanted = eager(method, 3).tokens  # by an engine whose device is not late
    config = graph_config(method, "full_and_piecewise")
    config.engine.async_scheduling = True
    engine = make_graph_engine(config, RecordedOps())
    LateDevice(engine, monkeypatch)
    assert run_requests(engine, requests_of(FEW)).tokens == wanted[:FEW]


@pytest.mark.slow
def test_eager_at_padded_shapes_is_the_same_step() -> None:
    """What graphs on a device are compared with bit by bit."""
    engine = make_graph_engine(graph_config("mtp", "full"), CalledAgain())
    assert_same(run_requests(engine, requests_of(FEW)), eager("mtp", 3))


def test_a_cpu_runs_eagerly_and_says_so() -> None:
    engine = NativeEngine(graph_config("gemma4_mtp", "full_and_piecewise"))
    assert engine.info.cudagraph == {
        "requested": "full_and_piecewise",
        "target": "none",
        "draft": "none",
        "reason": "device is cpu",
    }
    assert engine.parts.runner.graphs is None

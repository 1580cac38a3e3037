"""Mixed steps of many rows are whole graphs that leave out the rows whose outputs are not read.

The limits of rows are lowered to what the tiny workload reaches. RecordedOps replays operations
only, so a number of a plan that a capture froze, a padding row that reaches another row's place,
and a request that is taken for one without rows show as other tokens or drafts. float64: no tie
turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from graph_runs import (
    SHARING,
    Run,
    assert_same,
    attention_as_on_devices,
    count_launches,
    graph_config,
    make_graph_engine,
    run_requests,
    zoo_requests,
)
from recorded_graphs import RecordedOps

from hydraspec.engine.native import NativeEngine
from hydraspec.engine.run import device_runner, step_graphs
from hydraspec.engine.run.device_runner import DeviceRunner
from hydraspec.engine.run.runners import launch_bound_rows
from hydraspec.engine.schedule import prompt_rows
from hydraspec.graphs import modes
from hydraspec.models import decoder
from hydraspec.models.decoder import Decoder
from hydraspec.models.needed_rows import needed_rows, padded_needed_rows
from hydraspec.types import NeededRows, Rows, RowSegment, SamplingFlags, StepPlan

NUM_REQUESTS = 5
NUM_SLOTS = 3
MOST_ROWS = 64
ROWS = {"max_num_batched_tokens": MOST_ROWS}


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    attention_as_on_devices(monkeypatch)
    for module in (modes, step_graphs):
        monkeypatch.setattr(module, "PROMPT_ROWS", (8, 16))
    monkeypatch.setattr(modes, "LARGE_ROWS", (24, 40, MOST_ROWS))


def engine_of(method: str, mode: str, *, max_mixing_cost: float | None = None) -> NativeEngine:
    pair = SHARING if method == "gemma4_mtp" else None
    config = graph_config(method, mode, pair=pair, max_num_seqs=NUM_SLOTS, sizes=(3,), **ROWS)
    config.engine.max_mixing_cost = max_mixing_cost
    return make_graph_engine(config, None if mode == "none" else RecordedOps())


def run_mode(
    method: str, mode: str, patch: pytest.MonkeyPatch
) -> tuple[NativeEngine, dict[str, int], Run]:
    engine = engine_of(method, mode)
    counts = count_launches(engine, patch) if mode != "none" else {}
    return engine, counts, run_requests(engine, zoo_requests(NUM_REQUESTS, longest=9))


@pytest.mark.parametrize(
    ("method", "mode"),
    [
        ("gemma4_mtp", "full_and_piecewise"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (("gemma4_mtp", "full"), ("none", "full_and_piecewise"))
        ),
        *(
            pytest.param(method, "full", marks=pytest.mark.slow)
            for method in ("eagle3", "peagle", "eagle", "mtp", "eagle3 on gemma4")
        ),
    ],
)
def test_no_mixed_step_is_eager_and_tokens_are_the_same(
    method: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several requests stand beside decodes; some are cut, and several end together."""
    wanted = run_mode(method, "none", monkeypatch)[2]
    rows: list[int] = []
    true_reduced = decoder.reduced

    def reduced(batch: Rows, needed: NeededRows) -> Rows:
        rows.append(len(needed.rows))
        return true_reduced(batch, needed)

    monkeypatch.setattr(decoder, "reduced", reduced)
    engine, counts, run = run_mode(method, mode, monkeypatch)
    assert_same(run, wanted)
    assert counts["eager"] == 0
    assert counts["mixed"] > 3
    reads_all = engine.parts.runner.speculator.reads_all_hidden_states
    each = NUM_SLOTS * (engine.info.num_speculative_tokens + 1)
    assert bool(rows) is not reads_all
    assert set(rows) <= {each}, "graphs have room for every request's rows"


@pytest.mark.parametrize("method", ["gemma4_mtp", "eagle3"])
def test_steps_that_pay_for_their_decodes_pass_the_graphs(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bound on what mixing costs: eager steps of more rows, and the same tokens."""
    monkeypatch.setattr(modes, "LARGE_ROWS", (24,))
    limits = {"PROMPT_ROWS": (8, 16), "FEW_ROWS": 16, "LEAST_PROMPT_ROWS": 8}
    costs = {"WEIGHT_ROWS": 30, "LATENCY_SHARE": 0, "KEYS_OF_LAUNCH": math.inf}
    for name, value in {**limits, **costs}.items():
        monkeypatch.setattr(prompt_rows, name, value)
    wanted, eager = run_mode(method, "none", monkeypatch)[2], {}
    for bound in (None, 1.0):
        engine = engine_of(method, "full", max_mixing_cost=bound)
        counts = count_launches(engine, monkeypatch)
        run = run_requests(engine, zoo_requests(NUM_REQUESTS, longest=9))
        assert run.outputs == wanted.outputs
        assert run.num_accepted == wanted.num_accepted > 0
        assert counts["mixed"] > 0
        eager[bound] = counts["eager"]
    assert eager[1.0] > eager[None]


def padding_writes_to_the_first_row(patch: pytest.MonkeyPatch) -> None:
    """Where an index is named twice, one of the two stays: here the one that is not a row's."""
    true = device_runner.padded_needed_rows

    def padded(*args):  # type: ignore[no-untyped-def]
        needed = true(*args)
        targets = torch.where(needed.targets < args[2], needed.targets, needed.rows[0])
        return replace(needed, targets=targets)

    patch.setattr(device_runner, "padded_needed_rows", padded)


def requests_without_rows_are_counted(patch: pytest.MonkeyPatch) -> None:
    """Every request of the plan gets a row, also one whose prompt is not read to its end."""
    true = device_runner.padded_needed_rows

    def padded(plan: StepPlan | None, *args):  # type: ignore[no-untyped-def]
        if plan is not None:
            plan = replace(plan, samples=np.roll(plan.samples, 1))
        return true(plan, *args)

    patch.setattr(device_runner, "padded_needed_rows", padded)


def needed_rows_are_not_sent(patch: pytest.MonkeyPatch) -> None:
    true = DeviceRunner._write

    def write(self, descriptor, plan):  # type: ignore[no-untyped-def]
        if plan is None:
            return true(self, descriptor, plan)
        self.upload.write(descriptor, plan)
        return None

    patch.setattr(DeviceRunner, "_write", write)


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(padding_writes_to_the_first_row, marks=pytest.mark.slow),
        pytest.param(requests_without_rows_are_counted, marks=pytest.mark.slow),
        pytest.param(needed_rows_are_not_sent, marks=pytest.mark.slow),
    ],
)
def test_planted_bugs_are_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = run_mode("none", "none", monkeypatch)[2]
    plant(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        assert_same(run_mode("none", "full", monkeypatch)[2], wanted)


def plan_of(num_rows: list[int], num_drafts: list[int], samples: list[bool]) -> StepPlan:
    segments = tuple(RowSegment(0, i, 1, rows, 50) for i, rows in enumerate(num_rows))
    return StepPlan(
        slots=np.arange(len(num_rows)),
        num_rows=np.array(num_rows),
        num_drafts=np.array(num_drafts),
        samples=np.array(samples),
        segments=segments,
        block_tables=[],
        all_greedy=True,
        flags=SamplingFlags(),
        num_speculative_tokens=2,
    )


def test_needed_rows_of_a_graph_are_those_of_the_plan_and_padding() -> None:
    """Two decodes, a prompt that ends, one that does not, and room for a fifth request."""
    plan = plan_of([3, 3, 5, 4], [2, 2, 0, 0], [True, True, True, False])
    padded = padded_needed_rows(plan, 5, 24, 2, 50)
    rows = needed_rows(plan).rows.tolist()
    assert rows == [0, 1, 2, 3, 4, 5, 10]
    assert padded.targets is not None
    assert padded.rows.tolist() == rows + [0] * 8
    assert padded.targets.tolist() == rows + [24] * 8
    assert padded.query_start_loc.tolist() == [0, 3, 6, 7, 7, 7]
    assert padded.requests.tolist() == [0, 1, 2, 3, 4]
    assert padded.segments == (RowSegment(0, 0, 5, 3, 50),)
    empty = padded_needed_rows(None, 5, 24, 2, 50)
    assert empty.targets is not None
    assert empty.targets.tolist() == [24] * 15


def test_padding_that_takes_longer_than_launches_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wide model's steps take as long as their rows: more than an eighth of padding is not worth
    saving launches, and decodes are not launched apart either."""
    engine = engine_of("none", "full")
    runner = engine.parts.runner
    assert isinstance(runner, DeviceRunner)
    graphs = runner.graphs
    assert graphs is not None
    assert graphs.mixed_rows == [8, 16, 24, 40, MOST_ROWS]
    plan = plan_of([1, 1, 26], [0, 0, 0], [True] * 3)
    found = graphs.serving(runner, plan)
    assert found is not None
    assert found.descriptor.num_rows == 40
    monkeypatch.setattr(graphs, "_launch_bound_rows", 27)
    assert graphs.serving(runner, plan) is None
    exact = graphs.serving(runner, plan_of([1, 1, 36], [0, 0, 0], [True] * 3))
    assert exact is not None
    monkeypatch.setattr(runner, "limits", replace(runner.limits, launch_bound_rows=25))
    assert [len(part.slots) for part, _ in runner._split(plan)] == [3]
    assert isinstance(runner.target, Decoder)


class NoRoomForTheLargest(RecordedOps):
    """The first two captures find no memory."""

    num_refused = 0

    def capture(self, *args: Any, **given: Any) -> Any:
        if self.num_refused < 2:
            self.num_refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0")
        return super().capture(*args, **given)


def test_large_graphs_without_memory_are_left_out() -> None:
    """Loading goes on, the scheduler knows, and the engine's facts say so."""
    config = graph_config("none", "full", max_num_seqs=NUM_SLOTS, sizes=(3,), **ROWS)
    engine = make_graph_engine(config, NoRoomForTheLargest())
    runner = engine.parts.runner
    assert isinstance(runner, DeviceRunner)
    graphs = runner.graphs
    assert graphs is not None
    assert graphs.mixed_rows == [8, 16, 24]
    assert engine.parts.scheduler._prompt_rows.graph_rows == (8, 16, 24)
    assert graphs.serving(runner, plan_of([1, 1, 36], [0, 0, 0], [True] * 3)) is None
    (warning,) = engine.info.warnings
    assert "steps that read prompts run without CUDA graphs" in warning
    assert "engine.kv_cache.memory_gib" in warning


def test_narrow_models_are_bound_by_launches_longer() -> None:
    """E2B, E4B, 31B: the rows of a step that takes the device as long as the host."""
    assert [launch_bound_rows(size) for size in (1536, 2560, 5376)] == [2543, 915, 207]

"""Steps that are run for the sake of their kernels: each is one that an engine might run."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from graph_runs import PAIRS, graph_config, make_graph_engine
from grids import in_turn
from hydraspec_kernels import lookup
from hydraspec_kernels.lookup import Lookup
from hydraspec_kernels.lookup.reference import write_drafts_reference
from recorded_graphs import RecordedOps
from torch import Tensor

from hydraspec.engine.run import loading
from hydraspec.engine.run.device_runner import DeviceRunner
from hydraspec.engine.run.host_drafts import rehearse_drafts
from hydraspec.engine.run.runner import Runner
from hydraspec.engine.schedule.plans import dummy_plans
from hydraspec.types import Batch, StepPlan


def plans(decodes: bool = False, mixed: bool = False, k: int = 3) -> list[StepPlan]:
    limits = {"max_rows": 40, "max_seq_len": 24}
    return list(dummy_plans({1, 4, 16}, k, **limits, decodes=decodes, mixed=mixed))


def test_prompts_fill_a_step_and_no_more() -> None:
    """By batch size, the largest first; none where a step has fewer rows than requests. The last
    one has a request that decodes."""
    shapes = [(len(plan.slots), plan.num_rows.tolist()) for plan in plans()]
    assert shapes == [(16, [2] * 16), (4, [10] * 4), (1, [24]), (2, [1, 24])]


def test_a_decode_beside_a_prompt_needs_two_requests_and_rows() -> None:
    limits = {"max_seq_len": 24, "decodes": True, "mixed": True}
    for sizes, max_rows in (({1}, 40), ({1, 2}, 2)):
        found = dummy_plans(sizes, 0, max_rows=max_rows, **limits)
        assert all(len(set(plan.num_rows.tolist())) == 1 for plan in found)
    *_, last = dummy_plans({1, 2}, 0, max_rows=40, **limits)
    assert [each.rows_per_request for each in last.segments] == [1, 24]
    assert [each.first_row for each in last.segments] == [0, 1]


def test_decodes_verify_every_draft_where_they_fit() -> None:
    decodes = [plan for plan in plans(decodes=True) if plan.num_drafts.any()]
    assert [plan.num_rows.tolist() for plan in decodes] == [[4] * 4, [4]]
    assert all(len(plan.segments) == 1 for plan in decodes)


def test_eager_mixed_steps_come_with_every_power_of_two_of_rows() -> None:
    found = [plan for plan in plans(mixed=True) if not plan.num_drafts.any()]
    prompts = {(len(plan.slots), int(plan.num_rows[0])) for plan in found}
    assert prompts == {
        *((1, rows) for rows in (1, 2, 4, 8, 16, 24)),
        *((4, rows) for rows in (1, 2, 4, 8, 10)),
        *((16, rows) for rows in (1, 2)),
        (2, 1),  # and a prompt
    }


def test_eager_mixed_steps_come_with_every_number_of_drafts() -> None:
    for decodes, most in ((False, 2), (True, 3)):
        found = plans(decodes=decodes, mixed=True)
        drafts = {(len(plan.slots), int(plan.num_drafts[0])) for plan in found}
        assert drafts == {
            *((1, n) for n in range(most + 1)),
            *((4, n) for n in range(most + 1)),
            *((16, n) for n in range(2)),
            (2, 0),
        }


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The batches that runners prepare."""
    batches: list[Batch] = []

    class Watching(DeviceRunner):
        def prepare(self, plan: object) -> Batch:
            batches.append(Runner.prepare(self, plan))  # type: ignore[arg-type]
            return batches[-1]

    monkeypatch.setattr(DeviceRunner, "prepare", Watching.prepare)
    return batches


METHODS = [name for name in PAIRS if " on " not in name]
MODES = ("none", "full", "full_and_piecewise")


@pytest.mark.parametrize(("method", "mode"), in_turn(METHODS, MODES, ["gemma4_mtp"]))
def test_every_method_rehearses(rehearsed: list[Batch], method: str, mode: str) -> None:
    """Graphs' shapes and those of prompts and, without graphs, of decodes."""
    config = graph_config(method, mode, sizes=(2, 5) if mode != "none" else ())
    engine = make_graph_engine(config, RecordedOps())
    runner = engine.parts.runner
    assert isinstance(runner, DeviceRunner)
    rehearsed.clear()
    runner.rehearse()
    shapes = {(batch.num_requests, batch.input_ids.shape[0]) for batch in rehearsed}
    k = engine.info.num_speculative_tokens
    assert {(5, 40), (1, 40)} <= shapes
    assert {(count, count * (k + 1)) for count in (2, 5)} <= shapes


def test_drafts_of_the_host_are_rehearsed_with_and_without_a_step_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And leave the slots of requests alone."""
    config = graph_config("suffix", "full", pair=("tiny_qwen3", None))
    engine = make_graph_engine(config, RecordedOps())
    runner, seen = engine.parts.runner, list[object]()

    def written(token_ids: Tensor, *args: Tensor, **given: object) -> None:
        seen.append(given["is_ahead"])
        write_drafts_reference(token_ids, *args, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(lookup, "write_drafts", written)
    runner.state.token_ids.fill_(7)
    rehearse_drafts(runner.state, 3, Lookup(4, 1.0))
    assert seen == [False, True]
    assert runner.state.token_ids[:-1].eq(7).all()
    seen.clear()
    runner.rehearse()
    assert seen == [False, True]


def test_loading_goes_on_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def rehearse() -> None:
        raise RuntimeError("out of memory")

    runner = SimpleNamespace(target=SimpleNamespace(device=torch.device("cpu")), rehearse=rehearse)
    monkeypatch.setattr(loading, "can_compile_ahead", lambda device: True)
    monkeypatch.setattr(loading, "compiled_ahead", lambda device: nullcontext())
    loading._compile(runner)
    assert "one by one" in caplog.text
    assert "out of memory" in caplog.text

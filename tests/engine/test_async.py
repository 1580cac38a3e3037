"""Scheduling a step ahead of the results changes nothing that a user sees: tokens, acceptance and
reasons are those of the engine that waits. The device of these tests does nothing until its results
are read, and freed cache is poison.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import eagle_worlds
import numpy as np
import pytest
import step_ahead
from late_device import StableOracle
from records import part
from scenarios import Scenario, World, draw_scenario, make_engine
from step_ahead import (
    FLAVOURS,
    both_ways,
    compare_mixed,
    compare_tight,
    make_world,
    outputs,
    run_watched,
)
from tiny_targets import assistant_config, gemma4_config, run_config, write_folder

from hydraspec.cli.compose import plan
from hydraspec.config.schema import DraftSampling, Weights
from hydraspec.engine.native import NativeEngine
from hydraspec.engine.run.collect import Collected, Collector, Flight
from hydraspec.engine.run.device_runner import DeviceRunner
from hydraspec.engine.run.results import LaunchedStep
from hydraspec.engine.run.step_graphs import RunnerLimits
from hydraspec.engine.run.timing import StepClock
from hydraspec.engine.schedule.scheduler import Scheduler
from hydraspec.engine.schedule.sequence import Scheduled, Sequence
from hydraspec.graphs import no_graphs
from hydraspec.speculators.base import BaseSpeculator
from hydraspec.speculators.gemma4 import Gemma4Speculator
from hydraspec.speculators.none import NoSpeculator
from hydraspec.speculators.registry import build_speculator
from hydraspec.types import (
    Completion,
    ConfigurationError,
    Request,
    SamplingParams,
    StepPlan,
    StepRecord,
)

# Scenarios of the comparisons, and how many of them show every planted bug.
MIXED, TIGHT = 8, 24
MIXED_OF_BUGS, TIGHT_OF_BUGS = 4, 8


@pytest.fixture(params=FLAVOURS, scope="module")
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"), request.param)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("dense"), "dense")


def test_a_step_ahead_equals_waiting(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops, limits, ends in the middle of accepted drafts, chunked prompts, few slots, edges of
    max_model_len."""
    happened = compare_mixed(world, monkeypatch, MIXED)
    assert happened["dropped"] > 10, "no request ended while a further step of it was in flight"
    assert happened["fewer drafts"] > 0, "no scenario met max_model_len"


def test_a_tight_cache_costs_no_token(dense: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempted with a step in flight: its tokens count, and none is read again before they are
    in. Some end by that very step and never come back."""
    happened = compare_tight(dense, monkeypatch, TIGHT)
    assert happened["preempted"] > 30
    assert happened["in flight"] > 3
    assert happened["ended"] > 0


def test_samples_and_drafts_are_the_same(
    dense: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real drafter with probabilities, at a temperature: streams depend on positions, not on
    which steps ran."""
    drafter = write_folder(tmp_path, assistant_config(gemma4_config()))
    num_dropped = 0
    for number in (0, 2, 3, 5):
        scenario = draw_scenario(dense, np.random.default_rng([7, number]), k=1 + number)
        scenario.cache_share = 1.0
        for request in scenario.requests:
            request.sampling.temperature = 0.8
            request.sampling.seed = number
        scenario.config.method.checkpoint = str(drafter)
        scenario.config.method.draft_sampling = DraftSampling.probabilistic
        speculator = Gemma4Speculator(scenario.config)
        speculator.load(dense.target)
        waiting, ahead = both_ways(scenario, dense.target, speculator, monkeypatch)
        assert outputs(ahead) == outputs(waiting)
        assert ahead.decodes == waiting.decodes
        num_dropped += ahead.num_dropped
    assert num_dropped > 0


def trained_head(world: World, scenario: Scenario) -> BaseSpeculator:
    assert isinstance(world, eagle_worlds.EagleWorld)
    method = scenario.config.method
    method.name, method.checkpoint = world.plain.method, world.drafter
    method.weights = Weights.checkpoint
    speculator = build_speculator(scenario.config)
    speculator.load(world.target)
    return speculator


@pytest.mark.parametrize(
    "name",
    ["eagle3 on gemma4", pytest.param("peagle on gemma4", marks=pytest.mark.slow)],
)
def test_heads_beside_hybrid_groups(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads with their own KV groups beside a target's sliding and full ones.

    Catches a draft group that is freed, slid or sized by other marks than the target's.
    """
    world = eagle_worlds.make_world(tmp_path, name, num_prompts=5)
    mixed = compare_mixed(world, monkeypatch, 4, trained_head)
    assert mixed["dropped"] > 0
    assert mixed["accepted"] > 10
    tight = compare_tight(world, monkeypatch, 2, trained_head)
    assert tight["preempted"] > 0


def test_persistent_buffers_do_not_mix_steps(dense: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's runner, here on the CPU: plans in memory that outlives them, results in a ring."""

    def over_buffers(*args: Any) -> NativeEngine:
        engine = make_engine(*args)
        plain, config = engine.parts.runner, engine.parts.config
        limits = RunnerLimits(
            max_num_seqs=config.engine.max_num_seqs,
            max_num_batched_tokens=config.engine.max_num_batched_tokens,
            num_speculative_tokens=config.method.num_speculative_tokens,
            max_seq_len=engine.info.max_model_len + 20,
            capture_sizes=(1,),
        )
        parts = plain.target, plain.speculator, plain.verifier, plain.kv, plain.state
        modes = no_graphs("none", None)
        engine.parts.runner = DeviceRunner(*parts, limits=limits, modes=modes, backend=None)
        return engine

    monkeypatch.setattr(step_ahead, "make_engine", over_buffers)
    assert compare_mixed(dense, monkeypatch, num_scenarios=4)["dropped"] > 0
    assert compare_tight(dense, monkeypatch, num_scenarios=4)["preempted"] > 0


def requests_of(world: World, sampling: SamplingParams, count: int = 4) -> list[Request]:
    return [
        Request(index=index, id=str(index), sampling=sampling, prompt_token_ids=list(prompt))
        for index, prompt in enumerate(list(world.continuations)[:count])
    ]


def ahead_engine(world: World, k: int = 3, **fields: int) -> NativeEngine:
    config = run_config(world.folder, method="gemma4_mtp", k=k, **fields)  # type: ignore[arg-type]
    config.engine.async_scheduling = True
    return make_engine(
        config, world.target, StableOracle(config, world.continuations, world.vocab_size)
    )


def test_a_certain_end_is_not_overrun(dense: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token is what the prompt's own step gives: a second step would only be thrown away."""
    requests = requests_of(dense, SamplingParams(max_tokens=1, ignore_eos=True))
    seen = run_watched(ahead_engine(dense), requests, monkeypatch)
    assert seen.num_dropped == 0
    assert seen.num_launched == len(requests)
    assert [len(done.output_token_ids) for done in seen.completions.values()] == [1] * 4


def test_without_drafts_only_a_stop_is_overrun(
    dense: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then every step gives one token and a limit is always foreseen."""
    config = run_config(dense.folder)
    config.engine.async_scheduling = True
    requests = requests_of(dense, SamplingParams(max_tokens=9, ignore_eos=True))
    engine = make_engine(config, dense.target, NoSpeculator(config))
    assert run_watched(engine, requests, monkeypatch).num_dropped == 0
    stop = dense.continuations[tuple(requests[0].prompt_token_ids or ())][4]
    requests[0].sampling = SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=(stop,))
    seen = run_watched(engine, requests, monkeypatch)
    assert seen.num_dropped == 1
    assert seen.completions[0].finish_reason == "stop"


def test_the_device_is_given_a_step_before_the_last_is_in(
    dense: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends, where a result decides, are the exception."""
    engine = ahead_engine(dense)
    events: list[str] = []
    launch = engine.parts.runner.launch

    def noted(plan):  # type: ignore[no-untyped-def]
        step = launch(plan)
        events.append("launch")
        result = step.result
        monkeypatch.setattr(step, "result", lambda: (events.append("result"), result())[1])
        return step

    monkeypatch.setattr(engine.parts.runner, "launch", noted)
    requests = requests_of(dense, SamplingParams(max_tokens=20, ignore_eos=True), count=1)
    run_watched(engine, requests, monkeypatch)
    assert events[:6] == ["launch", "launch", "result", "launch", "result", "launch"]


def test_a_closed_run_leaves_nothing_in_flight(
    dense: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run, and the baseline that shares the cache, start from nothing."""
    engine = ahead_engine(dense)
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    requests = requests_of(dense, sampling)
    events = engine.run(copy.deepcopy(requests), concurrency=None)
    for _ in range(3):
        next(events)
    assert engine._in_flight
    events.close()  # type: ignore[attr-defined]
    for other in (engine.baseline(), engine):
        seen = run_watched(other, requests, monkeypatch)
        for request in requests:
            expected = dense.continuations[tuple(request.prompt_token_ids or ())][:12]
            assert seen.completions[request.index].output_token_ids == expected


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_launch_leaves_the_engine_usable(
    dense: World, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    engine = ahead_engine(dense)
    requests = requests_of(dense, SamplingParams(max_tokens=12, ignore_eos=True))
    launch, num_calls = engine.parts.runner.launch, 0

    def fail_third(plan):  # type: ignore[no-untyped-def]
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise error("planted")
        return launch(plan)

    with monkeypatch.context() as patch:
        patch.setattr(engine.parts.runner, "launch", fail_third)
        with pytest.raises(error, match="planted"):
            list(engine.run(copy.deepcopy(requests), concurrency=None))
    assert not engine._in_flight
    assert len(run_watched(engine, requests, monkeypatch).completions) == 4


def test_next_token_logits_are_those_of_the_last_step(dense: World) -> None:
    config = run_config(dense.folder, max_num_batched_tokens=8)
    waiting = make_engine(config, dense.target, NoSpeculator(config))
    ahead = ahead_engine(dense, max_num_batched_tokens=8)
    prompt = max(dense.continuations, key=len)
    np.testing.assert_array_equal(
        ahead.next_token_logits(prompt), waiting.next_token_logits(prompt)
    )


def test_null_waits_on_the_cpu(dense: World) -> None:
    config = run_config(dense.folder)
    assert config.engine.async_scheduling is None
    engine = make_engine(config, dense.target, NoSpeculator(config))
    assert not engine._num_ahead
    records = [
        event
        for event in engine.run(requests_of(dense, SamplingParams()), concurrency=None)
        if isinstance(event, StepRecord)
    ]
    assert all(None not in record.phase_ms.values() for record in records)


def test_times_of_a_step_ahead(dense: World) -> None:
    """Phases overlap and read null; steps' times follow one another without gaps or overlap."""
    engine = ahead_engine(dense)
    began = time.perf_counter()
    requests = requests_of(dense, SamplingParams(max_tokens=20, ignore_eos=True))
    events = list(engine.run(requests, concurrency=None))
    wall_ms = (time.perf_counter() - began) * 1e3
    records = [event for event in events if isinstance(event, StepRecord)]
    assert {value for record in records for value in record.phase_ms.values()} == {None}
    assert all(record.total_ms > 0 for record in records)
    assert 0.5 * wall_ms < sum(record.total_ms for record in records) <= wall_ms
    for done in events:
        if isinstance(done, Completion):
            assert done.ttft_ms is not None
            assert 0 < done.ttft_ms < done.latency_ms <= wall_ms


def test_a_slow_launch_is_charged_to_its_own_step(
    dense: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: the step before a prompt, not collected yet, paid for the launch of the prompt, and
    decodes looked slow wherever requests came and went."""
    engine = ahead_engine(dense)
    launch, num_slow = engine.parts.runner.launch, 0

    def slow_with_prompts(plan: StepPlan) -> LaunchedStep:
        nonlocal num_slow
        if not plan.num_drafts.any() and plan.num_rows.max() > 1:
            num_slow += 1
            time.sleep(0.3)
        return launch(plan)

    monkeypatch.setattr(engine.parts.runner, "launch", slow_with_prompts)
    requests = requests_of(dense, SamplingParams(max_tokens=12, ignore_eos=True))[:3]
    events = engine.run(requests, concurrency=1)
    slow = [e for e in events if isinstance(e, StepRecord) and e.total_ms > 300]
    assert len(slow) == num_slow > 1
    assert all(part.is_prefill for record in slow for part in record.requests)


def test_other_engines_have_no_such_key() -> None:
    typed = ["engine=transformers", "method=none", "+engine.async_scheduling=true"]
    with pytest.raises(ConfigurationError, match=r"engine\.async_scheduling"):
        plan(typed)


def slide_to_the_upper_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are freed as if every draft in flight were accepted."""
    true = Sequence.fewest_computed.fget
    assert true is not None
    monkeypatch.setattr(
        Sequence, "fewest_computed", property(lambda self: true(self) + self.num_undecided)
    )


def allocate_to_the_lower_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows get blocks as if every draft in flight were rejected."""
    true = Scheduled.seq_len.fget
    assert true is not None
    monkeypatch.setattr(
        Scheduled, "seq_len", property(lambda self: true(self) - self.sequence.num_undecided)
    )


def start_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preempted request forgets what it computed while a result is still to be added to it."""
    true_preempt = Scheduler._preempt

    def preempt(self: Scheduler, sequence: Sequence) -> None:
        true_preempt(self, sequence)
        sequence.in_flight = None
        sequence.start_over()

    monkeypatch.setattr(Scheduler, "_preempt", preempt)


def keep_the_overrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in flight counts though its request has ended."""
    true_collect = Collector.collect

    def collect(self: Collector, flight: Flight, clock: StepClock) -> Collected:
        ended = [i.sequence for i in flight.scheduled if i.sequence.finish_reason is not None]
        collected = true_collect(self, flight, clock)
        assert collected.record is not None
        for sequence in ended:
            collected.record.requests.append(part(sequence.request.index, emitted=0))
        return collected

    monkeypatch.setattr(Collector, "collect", collect)


@pytest.mark.parametrize(
    "plant",
    [slide_to_the_upper_bound, allocate_to_the_lower_bound, start_over_at_once, keep_the_overrun],
)
def test_planted_bugs_are_caught(
    dense: World, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """The comparisons above prove something only if they fail when the engine is wrong."""
    plant(monkeypatch)

    def compare() -> None:
        compare_mixed(dense, monkeypatch, MIXED_OF_BUGS)
        compare_tight(dense, monkeypatch, TIGHT_OF_BUGS)

    with pytest.raises(AssertionError):
        compare()

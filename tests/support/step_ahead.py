"""Runs of one scenario with the engine that waits and with one that schedules a step ahead, and
what has to be equal between them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from late_device import LateDevice, StableOracle
from records import request
from scenarios import (
    KNOWN_TOKENS,
    Scenario,
    World,
    draw_scenario,
    make_engine,
    random_prompt,
    seeded,
    uncached_continuations,
)
from tiny_targets import gemma4_config, load, write_folder

from hydraspec.engine.native import NativeEngine
from hydraspec.engine.schedule.sequence import Scheduled
from hydraspec.models.base import TargetModel
from hydraspec.speculators.base import BaseSpeculator
from hydraspec.types import Completion, Request, StepRecord

FLAVOURS = {
    "dense": {},
    "shared_kv": {
        "attention_k_eq_v": False,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
    },
}


def make_world(folder: Path, flavour: str) -> World:
    config = gemma4_config(**FLAVOURS[flavour], tie_word_embeddings=False)
    target = load(write_folder(folder, config), torch.float64, weights="random", seed=7)
    world = World(folder=str(folder), target=target)
    rng = seeded(11)
    prompts = [random_prompt(rng, length, target.vocab_size) for length in (1, 4, 7, 9, 17, 33)]
    world.continuations = uncached_continuations(target, prompts, KNOWN_TOKENS)
    return world


@dataclass
class Watch:
    """What a run's scheduler did, and what came out."""

    num_launched: int = 0  # requests' shares of launched steps
    num_preempted_in_flight: int = 0
    num_ended_while_waiting: int = 0  # by the step in flight when they were preempted
    records: list[StepRecord] = field(default_factory=list)
    completions: dict[int, Completion] = field(default_factory=dict)

    @property
    def num_dropped(self) -> int:
        """Shares of steps that ran and were not recorded."""
        return self.num_launched - sum(len(record.requests) for record in self.records)

    @property
    def decodes(self) -> dict[int, list[tuple[int, list[int], int, list[int]]]]:
        """Per request what each of its decode steps verified, accepted and emitted."""
        steps: dict[int, list[tuple[int, list[int], int, list[int]]]] = {}
        for record in self.records:
            for part in record.requests:
                if not part.is_prefill:
                    steps.setdefault(part.index, []).append(
                        (
                            part.num_computed_tokens,
                            part.draft_token_ids,
                            part.num_accepted,
                            part.output_token_ids,
                        )
                    )
        return steps


def watch(engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> Watch:
    seen = Watch()
    scheduler = engine.parts.scheduler
    preempt, release = scheduler._preempt, scheduler.release
    plan = scheduler.plan

    def counted_plan(scheduled: list[Scheduled]):  # type: ignore[no-untyped-def]
        seen.num_launched += len(scheduled)
        return plan(scheduled)

    def counted_preempt(sequence) -> None:  # type: ignore[no-untyped-def]
        seen.num_preempted_in_flight += sequence.in_flight is not None
        preempt(sequence)

    def counted_release(sequence) -> None:  # type: ignore[no-untyped-def]
        seen.num_ended_while_waiting += sequence.slot < 0
        release(sequence)

    monkeypatch.setattr(scheduler, "plan", counted_plan)
    monkeypatch.setattr(scheduler, "_preempt", counted_preempt)
    monkeypatch.setattr(scheduler, "release", counted_release)
    return seen


def run_watched(
    engine: NativeEngine,
    requests: Seq[Request],
    monkeypatch: pytest.MonkeyPatch,
    concurrency: int | None = None,
) -> Watch:
    seen = watch(engine, monkeypatch)
    for event in engine.run(copy.deepcopy(list(requests)), concurrency=concurrency):
        if isinstance(event, StepRecord):
            seen.records.append(event)
        else:
            seen.completions[event.index] = event
    assert engine.parts.runner.kv.usage == 0.0, "blocks leaked"
    assert not engine._in_flight
    return seen


def both_ways(
    scenario: Scenario,
    target: TargetModel,
    speculator: BaseSpeculator,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Watch, Watch]:
    """The scenario with the engine that waits, and a step ahead: of a device that runs at once and
    of a late one, which must not differ."""
    runs = []
    for ahead, late in ((False, False), (True, False), (True, True)):
        scenario.config.engine.async_scheduling = ahead
        engine = make_engine(scenario.config, target, speculator, scenario.cache_share)
        with monkeypatch.context() as patch:
            if late:
                device = LateDevice(engine, patch)
                device.poison_freed_blocks(patch)
            runs.append(run_watched(engine, scenario.requests, patch, scenario.concurrency))
    assert device.num_poisoned > 0
    waiting, prompt, ahead_of_late = runs
    assert outputs(prompt) == outputs(ahead_of_late)
    assert prompt.decodes == ahead_of_late.decodes
    return waiting, ahead_of_late


def outputs(seen: Watch) -> dict[int, tuple[list[int], str, str | None]]:
    return {
        index: (done.output_token_ids, done.finish_reason, done.error)
        for index, done in seen.completions.items()
    }


Drafting = Callable[[World, Scenario], BaseSpeculator]


def stable_oracle(world: World, scenario: Scenario) -> BaseSpeculator:
    return StableOracle(scenario.config, world.continuations, world.vocab_size)


def compare_mixed(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    num_scenarios: int,
    drafting: Drafting = stable_oracle,
) -> Counter[str]:
    """Random scenarios, equal step by step in a roomy cache and token by token in a tight one."""
    happened: Counter[str] = Counter()
    for number in range(num_scenarios):
        scenario = draw_scenario(world, np.random.default_rng([5, number]), k=1 + number % 8)
        if number % 2:
            scenario.cache_share = 1.0
        speculator = drafting(world, scenario)
        waiting, ahead = both_ways(scenario, world.target, speculator, monkeypatch)
        assert outputs(ahead) == outputs(waiting), (number, scenario)
        assert waiting.num_dropped == 0
        happened["dropped"] += ahead.num_dropped
        if scenario.cache_share < 1.0:
            continue
        assert ahead.decodes == waiting.decodes, (number, scenario)
        steps = [step for steps in ahead.decodes.values() for step in steps]
        happened["accepted"] += sum(step[2] for step in steps)
        offers = {len(step[1]) for step in steps}
        happened["fewer drafts"] += offers > {1 + number % 8}
    return happened


def compare_tight(
    dense: World,
    monkeypatch: pytest.MonkeyPatch,
    num_scenarios: int,
    drafting: Drafting = stable_oracle,
) -> Counter[str]:
    """Five requests at once where there is room for about two."""
    happened: Counter[str] = Counter()
    for number in range(num_scenarios):
        rng = np.random.default_rng([6, number])
        scenario = draw_scenario(dense, rng, k=1 + number % 4)
        prompt = min(dense.continuations, key=lambda prompt: abs(len(prompt) - 9))
        continuation = dense.continuations[prompt]
        ends = [int(rng.integers(12, 25)) for _ in range(5)]
        scenario.requests = [
            request(index, prompt_token_ids=list(prompt), max_tokens=end, ignore_eos=True)
            for index, end in enumerate(ends)
        ]
        scenario.config.target.max_model_len = int(rng.integers(34, 50))  # sizes the cache too
        scenario.config.engine.max_num_seqs = 5
        scenario.config.engine.max_num_batched_tokens = 256
        scenario.config.engine.kv_cache.block_size = 2
        scenario.cache_share, scenario.concurrency = 0.0, None
        speculator = drafting(dense, scenario)
        waiting, ahead = both_ways(scenario, dense.target, speculator, monkeypatch)
        assert outputs(ahead) == outputs(waiting), (number, scenario)
        for index, end in enumerate(ends):
            assert ahead.completions[index].output_token_ids == continuation[:end]
        happened["preempted"] += sum(record.num_preempted for record in ahead.records)
        happened["in flight"] += ahead.num_preempted_in_flight
        happened["ended"] += ahead.num_ended_while_waiting
    return happened

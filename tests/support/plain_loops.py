"""Drafters with KV of their own in the engine, held against a plain uncached loop of the same head;
mistakes that such a comparison has to find.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from scenarios import (
    Outcome,
    Scenario,
    World,
    assert_every_draft_is_offered,
    draw_scenario,
    make_engine,
)
from torch import Tensor

from hydraspec.config.schema import Weights
from hydraspec.speculators.registry import build_speculator
from hydraspec.types import RequestStep, Rows, StepRecord

MAX_K = 8
Plant = Callable[[Any], None]  # changes a loaded speculator


@dataclass
class DraftedWorld(World, ABC):
    """A world with a head, and what its definition drafts."""

    drafter: str | None = None
    num_drafts: int = MAX_K  # K of the scenario that runs, on which a block's drafts depend
    draft_counts: ClassVar[list[int]] = list(range(1, MAX_K + 1))  # K in turn

    @property
    @abstractmethod
    def method(self) -> str:
        """The configuration's name of it."""

    @abstractmethod
    def expected_drafts(self, text: tuple[int, ...], length: int) -> list[int]:
        """The MAX_K drafts of the definition behind the first `length` tokens of a text."""


def run_scenarios(
    world: DraftedWorld, count: int, seed: int, outcome: Outcome, plant: Plant | None = None
) -> Outcome:
    """Draw and run scenarios; outputs, drafts and accepted counts are those of the definition."""
    counts = world.draft_counts
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        run(world, draw_scenario(world, rng, counts[number % len(counts)]), outcome, plant)
    return outcome


def run(world: DraftedWorld, scenario: Scenario, outcome: Outcome, plant: Plant | None) -> None:
    method = scenario.config.method
    method.name, method.checkpoint = world.method, world.drafter
    method.weights = Weights.checkpoint
    world.num_drafts = method.most_drafts
    if scenario.config.target.max_model_len is None:  # no longer than needed: pools become tight
        scenario.config.target.max_model_len = max(
            len(request.prompt_token_ids or ()) + request.sampling.max_tokens
            for request in scenario.requests
        )
    speculator = build_speculator(scenario.config)
    speculator.load(world.target)
    if plant is not None:
        plant(speculator)
    engine = make_engine(scenario.config, world.target, speculator, scenario.cache_share)
    prompts = [tuple(request.prompt_token_ids or ()) for request in scenario.requests]
    texts = [(*prompt, *world.continuations[prompt]) for prompt in prompts]
    for event in engine.run(scenario.requests, concurrency=scenario.concurrency):
        if isinstance(event, StepRecord):
            outcome.num_preempted += event.num_preempted
            for part in event.requests:
                assert_every_draft_is_offered(scenario, part)
                if part.draft_token_ids:
                    check_drafts(world, texts[part.index], part)
                    if len(part.draft_token_ids) == method.num_speculative_tokens:
                        outcome.accepted[len(part.draft_token_ids), part.num_accepted] += 1
        else:
            tokens, reason = scenario.expected[event.index]
            assert event.output_token_ids == tokens, (scenario, event.error)
            assert event.finish_reason == reason, scenario
    outcome.num_scenarios += 1
    assert engine.parts.runner.kv.usage == 0.0, "blocks leaked"


def check_drafts(world: DraftedWorld, text: tuple[int, ...], part: RequestStep) -> None:
    drafts, newest = part.draft_token_ids, part.num_computed_tokens
    expected = world.expected_drafts(text, newest + 1)
    assert drafts == expected[: len(drafts)], (part, text[newest])
    right = 0
    while right < len(drafts) and drafts[right] == text[newest + 1 + right]:
        right += 1
    assert part.num_accepted == right


# ------------------------------------------------------------------ planted mistakes


def the_row_after(speculator: Any) -> None:
    """Rotates one position further in drafting steps than in the pass over the target's rows."""
    true_forward = speculator.head.forward

    def forward(rows: Rows, *args: Any, step: int) -> Any:
        return true_forward(replace(rows, positions=rows.positions + (step > 0)), *args, step=step)

    speculator.head.forward = forward


def no_feedback(speculator: Any) -> None:
    """Every step reads the state the first one read."""
    true_forward = speculator.head.forward

    def forward(rows: Rows, hidden: Tensor, *args: Any, step: int) -> Any:
        states, _ = true_forward(rows, hidden, *args, step=step)
        return states, hidden

    speculator.head.forward = forward

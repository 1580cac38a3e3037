"""EAGLE heads in the engine: the text is the target's own, and every draft is the plain uncached
loop's, token for token, in float64.

The loop (tests/support/eagle_oracle.py) runs whole passes over the text, fed with target states
from one fresh prefill. The scenarios mix prompts and decodes, chunk prefills, preempt, end at block
borders and at max_model_len, with K from 1 to 8.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eagle_worlds import MAX_K, WORLDS, EagleWorld, make_world
from scenarios import (
    Outcome,
    Scenario,
    assert_every_draft_is_offered,
    draw_scenario,
    make_engine,
)
from tiny_targets import run_config
from torch import Tensor

from hydraspec.config.schema import Weights
from hydraspec.models.detect import resolve
from hydraspec.speculators.registry import build_speculator
from hydraspec.types import Batch, RequestState, Rows, StepRecord, Verdict


def run(world: EagleWorld, scenario: Scenario, outcome: Outcome, plant: Any = None) -> None:
    """Run it; assert outputs, and drafts and accepted counts of every step."""
    method = scenario.config.method
    method.name, method.checkpoint = world.plain.method, world.drafter
    method.weights = Weights.checkpoint
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
    texts = []
    for request in scenario.requests:
        prompt = tuple(request.prompt_token_ids or ())
        texts.append((*prompt, *world.continuations[prompt]))
    for event in engine.run(scenario.requests, concurrency=scenario.concurrency):
        if isinstance(event, StepRecord):
            outcome.num_preempted += event.num_preempted
            for part in event.requests:
                assert_every_draft_is_offered(scenario, part)
                if part.draft_token_ids:
                    check_drafts(world, texts[part.index], part, method, outcome)
        else:
            tokens, reason = scenario.expected[event.index]
            assert event.output_token_ids == tokens, (scenario, event.error)
            assert event.finish_reason == reason, scenario
    outcome.num_scenarios += 1
    assert engine.parts.runner.kv.usage == 0.0, "blocks leaked"


def check_drafts(world: EagleWorld, text: tuple[int, ...], part, method, outcome: Outcome) -> None:  # type: ignore[no-untyped-def]
    drafts, newest = part.draft_token_ids, part.num_computed_tokens
    expected = world.expected_drafts(text, newest + 1)
    assert drafts == expected[: len(drafts)], (part, text[newest])
    right = 0
    while right < len(drafts) and drafts[right] == text[newest + 1 + right]:
        right += 1
    assert part.num_accepted == right
    if len(drafts) == method.num_speculative_tokens:
        outcome.accepted[len(drafts), right] += 1


def run_scenarios(world: EagleWorld, count: int, seed: int, plant: Any = None) -> Outcome:
    outcome = Outcome()
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        run(world, draw_scenario(world, rng, 1 + number % MAX_K), outcome, plant)
    return outcome


@pytest.mark.parametrize("name", WORLDS)
def test_drafts_and_acceptance_equal_the_plain_loop(name: str, tmp_path: Path) -> None:
    """Catches a wrong row, a stale key, a shifted token, a mask row out of place."""
    outcome = run_scenarios(make_world(tmp_path, name, num_prompts=5), 12, seed=1)
    assert {right for _, right in outcome.accepted} >= {0, 1, 2, 3}
    assert outcome.num_preempted > 0, "no scenario met cache pressure"


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_drafts_and_acceptance_equal_the_plain_loop_everywhere(name: str, tmp_path: Path) -> None:
    """320 scenarios a world. Every accepted length 0..K occurs at every K up to 4, and every length
    up to 8 at some K.
    """
    outcome = run_scenarios(make_world(tmp_path, name, num_prompts=8), 320, seed=2)
    assert outcome.num_preempted > 20
    for k in range(1, 5):
        for right in range(k + 1):
            assert outcome.accepted[k, right] > 0, (k, right)
    assert {right for _, right in outcome.accepted} == set(range(MAX_K + 1))


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


def aux_layers_off_by_one(speculator: Any) -> None:
    speculator.aux_layer_ids = tuple(i - 1 for i in speculator.aux_layer_ids)


def rejected_rows_count_as_valid(speculator: Any) -> None:
    true_layout = speculator.lay_out

    def lay_out(verdict: Verdict, batch: Batch, state: RequestState) -> Any:
        kept = replace(verdict, num_rejected=torch.zeros_like(verdict.num_rejected))
        return true_layout(kept, batch, state)

    speculator.lay_out = lay_out


def unprojected_mask(speculator: Any) -> None:
    speculator.head.mask_hidden = torch.zeros_like(speculator.head.mask_hidden)


def unshifted_tokens(speculator: Any) -> None:
    """Rows read their own token instead of the next one."""
    true_forward = speculator.head.forward

    def forward(rows: Rows, *args: Any, step: int) -> Any:
        tokens = rows.input_ids.roll(1) if step == 0 else rows.input_ids
        return true_forward(replace(rows, input_ids=tokens), *args, step=step)

    speculator.head.forward = forward


MISTAKES = [
    ("eagle3 on qwen3", the_row_after),
    ("eagle3 on qwen3", no_feedback),
    ("eagle3 on qwen3", aux_layers_off_by_one),
    ("eagle3 on gemma4", unshifted_tokens),
    ("eagle on mistral", no_feedback),
    ("peagle on gemma4", rejected_rows_count_as_valid),
    ("peagle on gemma4", unprojected_mask),
    ("peagle on gemma4", unshifted_tokens),
]


@pytest.mark.parametrize(("name", "plant"), MISTAKES)
def test_planted_mistakes_are_caught(
    name: str, plant: Callable[[Any], None], tmp_path: Path
) -> None:
    world = make_world(tmp_path, name, num_prompts=3)
    with pytest.raises(AssertionError, match=r"RequestStep|expected"):
        run_scenarios(world, 12, seed=1, plant=plant)


def test_zoo_folders_run_as_they_are() -> None:
    """Every drafter of the family that ships, in its public format, found by its folder alone."""
    for name, method in (
        ("tiny_qwen3-eagle3", "eagle3"),
        ("tiny_qwen3-peagle", "peagle"),
        ("tiny_gemma4-eagle3", "eagle3"),
        ("tiny_gemma4-peagle", "peagle"),
        ("tiny_mistral-eagle", "eagle"),
    ):
        found = resolve("zoo:" + name.split("-")[0], "zoo:" + name)
        assert found is not None
        assert found.method == method, name


def test_what_was_assumed_is_a_warning_of_the_run(tmp_path: Path) -> None:
    """A drafter that does not say norm_before_residual."""
    world = make_world(tmp_path, "eagle3 on qwen3", num_prompts=1)
    written = Path(world.drafter) / "config.json"
    config = json.loads(written.read_text())
    del config["norm_before_residual"]
    written.write_text(json.dumps(config))
    settings = run_config(world.folder, method="eagle3", drafter=world.drafter, max_model_len=64)
    settings.method.weights = Weights.checkpoint
    speculator = build_speculator(settings)
    speculator.load(world.target)
    info = make_engine(settings, world.target, speculator).info
    assert any("norm_before_residual" in warning for warning in info.warnings)
    assert info.draft_spec is not None
    assert info.draft_spec["aux_layer_ids"] == (1, 2)

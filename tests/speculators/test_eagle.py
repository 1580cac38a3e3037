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
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_worlds import WORLDS, EagleWorld, make_world
from plain_loops import MAX_K, no_feedback, run_scenarios, the_row_after
from scenarios import Outcome, make_engine
from tiny_targets import run_config

from hydraspec.config.schema import Weights
from hydraspec.speculators.registry import build_speculator
from hydraspec.types import Batch, RequestState, Rows, Verdict


@pytest.fixture(scope="module")
def world_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], EagleWorld]:
    """Worlds by name, each made once: mistakes are planted in a speculator, of which every run has
    its own."""
    return cache(lambda name: make_world(tmp_path_factory.mktemp("world"), name, num_prompts=5))


@pytest.mark.parametrize("name", WORLDS)
def test_drafts_and_acceptance_equal_the_plain_loop(
    name: str, world_of: Callable[[str], EagleWorld]
) -> None:
    """Catches a wrong row, a stale key, a shifted token, a mask row out of place."""
    outcome = run_scenarios(world_of(name), 12, 1, Outcome())
    assert {right for _, right in outcome.accepted} >= {0, 1, 2, 3}
    assert outcome.num_preempted > 0, "no scenario met cache pressure"


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_drafts_and_acceptance_equal_the_plain_loop_everywhere(name: str, tmp_path: Path) -> None:
    """320 scenarios a world. Every accepted length 0..K occurs at every K up to 4, and every length
    up to 8 at some K.
    """
    outcome = run_scenarios(make_world(tmp_path, name, num_prompts=8), 320, 2, Outcome())
    assert outcome.num_preempted > 20
    for k in range(1, 5):
        for right in range(k + 1):
            assert outcome.accepted[k, right] > 0, (k, right)
    assert {right for _, right in outcome.accepted} == set(range(MAX_K + 1))


# ------------------------------------------------------------------ planted mistakes


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
    name: str, plant: Callable[[Any], None], world_of: Callable[[str], EagleWorld]
) -> None:
    with pytest.raises(AssertionError, match=r"RequestStep|expected"):
        run_scenarios(world_of(name), MAX_K, 1, Outcome(), plant)


def test_what_was_assumed_is_a_warning_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A drafter that does not say norm_before_residual; whoever built the engine logs it."""
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
    assert not [text for text in caplog.messages if text in info.warnings]
    assert info.draft_spec is not None
    assert info.draft_spec["aux_layer_ids"] == (1, 2)

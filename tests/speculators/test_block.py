"""Block drafters in the engine: the text is the target's own, and every draft is the plain uncached
definition's, token for token, in float64.

The scenarios are those of the EAGLE heads (test_eagle.py): mixed prompts and decodes, chunked
prefills, preemption, ends at block borders and at max_model_len, K from 1 to 8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from block_worlds import WORLDS, make_world
from grids import slow_unless
from plain_loops import MAX_K, run_scenarios
from scenarios import Outcome
from torch import Tensor

from hydraspec.models.block_drafter import context
from hydraspec.types import Draft, Rows, TargetStep

QUICK = ("dflash on qwen3", "dspark on gemma4")


@pytest.fixture(autouse=True)
def as_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The context takes one product; tests/models/test_block_drafter.py has a CPU's."""
    monkeypatch.setattr(context, "SEPARATE_ON", ())


@pytest.mark.parametrize("name", slow_unless(lambda name: name in QUICK, ((n,) for n in WORLDS)))
def test_drafts_and_acceptance_equal_the_definition(name: str, tmp_path: Path) -> None:
    """Catches a wrong row, a stale key, a block that the next step's context does not replace."""
    outcome = run_scenarios(make_world(tmp_path, name, num_prompts=4), 10, 1, Outcome())
    assert {right for _, right in outcome.accepted} >= {0, 1, 2}
    assert outcome.num_preempted > 0, "no scenario met cache pressure"


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_drafts_and_acceptance_equal_the_definition_everywhere(name: str, tmp_path: Path) -> None:
    outcome = run_scenarios(make_world(tmp_path, name, num_prompts=8), 200, 2, Outcome())
    assert outcome.num_preempted > 10
    assert {right for _, right in outcome.accepted} >= set(range(MAX_K // 2))


def test_logits_of_all_drafts_come_from_one_product(tmp_path: Path) -> None:
    """Each reads the whole head, which for a large vocabulary takes as long as layers do."""
    rows_of_products, num_drafts = list[int](), list[int]()

    def count(speculator: Any) -> None:
        true_columns = speculator.head.columns

        def columns(hidden: Tensor) -> Tensor:
            rows_of_products.append(len(hidden))
            found: Tensor = true_columns(hidden)
            return found

        speculator.head.columns = columns
        true_propose = speculator.propose

        def propose(*args: Any) -> Draft | None:
            rows_of_products.clear()
            draft: Draft | None = true_propose(*args)
            if draft is not None:
                num_drafts.append(draft.tokens.numel())
            assert rows_of_products == ([] if draft is None else num_drafts[-1:])
            return draft

        speculator.propose = propose

    world = make_world(tmp_path, "dflash on qwen3", num_prompts=3)
    run_scenarios(world, 3, 1, Outcome(), count)
    assert max(num_drafts) > 1


# ------------------------------------------------------------------ planted mistakes


def aux_layers_off_by_one(speculator: Any) -> None:
    speculator.aux_layer_ids = tuple(i - 1 for i in speculator.aux_layer_ids)


def features_without_norm(speculator: Any) -> None:
    head = speculator.head

    def features(target_step: TargetStep) -> Tensor:
        return head.fc.forward(torch.cat(tuple(target_step.aux_hidden_states), -1))

    head.context_features = features


def causal_blocks(speculator: Any) -> None:
    config = speculator.head.config
    speculator.head.config = replace(config, is_causal=True, is_sliding_causal=True)


def context_a_position_late(speculator: Any) -> None:
    true_write = speculator.head.write_context

    def write_context(rows: Rows, *args: Any) -> None:
        true_write(replace(rows, positions=rows.positions + 1), *args)

    speculator.head.write_context = write_context


def context_of_the_last_rows_alone(speculator: Any) -> None:
    """As a drafter that forgets the rows of accepted drafts."""
    true_write = speculator.head.write_context

    def write_context(rows: Rows, features: Tensor, *args: Any) -> None:
        kept = torch.zeros_like(features)
        kept[rows.query_start_loc[1:] - 1] = features[rows.query_start_loc[1:] - 1]
        true_write(rows, kept, *args)

    speculator.head.write_context = write_context


MISTAKES = [
    ("dflash on qwen3", aux_layers_off_by_one),
    ("dflash on qwen3", features_without_norm),
    ("dflash on gemma4", causal_blocks),
    ("dflash on gemma4", context_a_position_late),
    ("dflash on gemma4", context_of_the_last_rows_alone),
]


@pytest.mark.parametrize(
    ("name", "plant"), slow_unless(lambda name, plant: plant is causal_blocks, MISTAKES)
)
def test_planted_mistakes_are_caught(
    name: str, plant: Callable[[Any], None], tmp_path: Path
) -> None:
    world = make_world(tmp_path, name, num_prompts=3)
    with pytest.raises(AssertionError, match=r"RequestStep|expected"):
        run_scenarios(world, 12, 1, Outcome(), plant)

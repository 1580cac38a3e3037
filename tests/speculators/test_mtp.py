"""MTP in the engine: the text is the target's own, and every draft is the plain uncached loop's.

The loop (tests/support/mtp_oracle.py) runs whole passes over the text, fed with target states from
one fresh prefill. The scenarios mix prompts and decodes, chunk prefills, preempt, end at block
borders and at max_model_len. The targets are built so that drafts are often right and often wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gemma4_oracle import PagedRun, load
from mtp_folders import agreeable
from mtp_oracle import PlainMTP
from plain_loops import MAX_K, DraftedWorld, Plant, no_feedback, run_scenarios, the_row_after
from scenarios import (
    KNOWN_TOKENS,
    Outcome,
    random_prompt,
    seeded,
    uncached_continuations,
)
from torch import Tensor

from hydraspec.types import Rows

# Layout, MTP layers, and how much weighs what is not the last token: chosen so that most drafts are
# right and every accepted length occurs up to K = 8.
WORLDS = {
    "deepseek": ("deepseek", 1, 0.8),
    "deepseek, two layers": ("deepseek", 2, 0.85),
    "mimo": ("mimo", 1, 1.4),
    "mimo, two layers": ("mimo", 2, 1.4),
}


@dataclass
class MTPWorld(DraftedWorld):
    """A world with the definition's drafts after every prefix that a run can reach."""

    plain: PlainMTP = field(default=None)  # type: ignore[assignment]
    states: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    drafts: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    method = "mtp"

    @property
    def draft_counts(self) -> list[int]:  # type: ignore[override]
        """1 to 8, of those that go with the number of layers."""
        num_mtp = len(self.plain.layers)
        return [k for k in range(1, MAX_K + 1) if k <= num_mtp or k % num_mtp == 0]

    def expected_drafts(self, text: tuple[int, ...], length: int) -> list[int]:
        """By the plain loop over the target's final-norm states of one fresh prefill."""
        if text not in self.states:
            block_size, run = self.target.block_size, PagedRun(self.target, 1, 16, max_len=128)
            self.states[text] = run.step({0: list(text)})[0][0].clone()
            self.target.kv_groups(block_size)
        key = text[:length]
        if key not in self.drafts:
            states = self.states[text][: length - 1]
            self.drafts[key] = self.plain.chain(states, list(key), MAX_K)[0]
        return self.drafts[key]


def make_world(folder: Path, name: str, num_prompts: int, seed: int = 3) -> MTPWorld:
    kind, num_mtp, weight = WORLDS[name]
    agreeable(kind, folder, num_mtp, weight, seed)
    world = MTPWorld(
        folder=str(folder),
        target=load(folder, torch.float64),
        plain=PlainMTP.read(folder, kind),
    )
    rng = seeded(12)
    lengths = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 47]
    lengths = rng.permutation(lengths)[:num_prompts]
    prompts = [random_prompt(rng, int(length), world.vocab_size) for length in lengths]
    world.continuations = uncached_continuations(world.target, prompts, KNOWN_TOKENS)
    return world


@pytest.mark.parametrize("name", WORLDS)
def test_drafts_and_acceptance_equal_the_plain_loop(name: str, tmp_path: Path) -> None:
    """Catches a wrong row, a stale key, a shifted token, the wrong layer's turn: any changes a
    draft."""
    outcome = Outcome()
    run_scenarios(make_world(tmp_path, name, num_prompts=6), 16, 1, outcome)
    assert {right for _, right in outcome.accepted} >= {0, 1, 2, 3, 4}
    assert outcome.num_preempted > 0, "no scenario met cache pressure"


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_drafts_and_acceptance_equal_the_plain_loop_everywhere(name: str, tmp_path: Path) -> None:
    """320 scenarios, on four targets; every accepted length 0..K occurs at every K."""
    outcome = Outcome()
    for seed in range(3, 7):
        world = make_world(tmp_path / str(seed), name, num_prompts=12, seed=seed)
        run_scenarios(world, 80, seed, outcome)
    assert outcome.num_scenarios == 320
    assert outcome.num_preempted > 20
    for k in world.draft_counts:
        for right in range(k + 1):
            assert outcome.accepted[k, right] > 0, (k, right)


def one_layer_for_all_turns(speculator: Any) -> None:
    speculator.head.layers[1] = speculator.head.layers[0]


def holes_between_turns(speculator: Any) -> None:
    """Only the layer whose turn it is gets the row."""
    head = speculator.head
    true_forward = head.forward

    def forward(rows: Rows, *args: Any, step: int) -> tuple[Tensor, Tensor]:
        head.num_drafts = MAX_K if step == 0 else 0
        return true_forward(rows, *args, step=step)

    head.forward = forward  # type: ignore[method-assign]


def unblanked(speculator: Any) -> None:
    config = speculator.head.config
    layout = replace(config.layout, blanks_first_position=False)
    speculator.head.config = replace(config, layout=layout)


@pytest.mark.parametrize(
    "plant", [one_layer_for_all_turns, holes_between_turns, the_row_after, no_feedback, unblanked]
)
def test_planted_mistakes_are_caught(plant: Plant, tmp_path: Path) -> None:
    world = make_world(tmp_path, "mimo, two layers", num_prompts=6)
    with pytest.raises(AssertionError):
        run_scenarios(world, 16, 1, Outcome(), plant)

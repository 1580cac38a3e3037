"""MTP in the engine: the text is the target's own, and every draft is the plain uncached loop's.

The loop (tests/support/mtp_oracle.py) runs whole passes over the text, fed with target states from
one fresh prefill. The scenarios mix prompts and decodes, chunk prefills, preempt, end at block
borders and at max_model_len. The targets are built so that drafts are often right and often wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gemma4_oracle import PagedRun, load
from mtp_folders import agreeable
from mtp_oracle import PlainMTP
from scenarios import (
    KNOWN_TOKENS,
    Outcome,
    Scenario,
    World,
    assert_every_draft_is_offered,
    draw_scenario,
    make_engine,
    random_prompt,
    seeded,
    uncached_continuation,
)
from torch import Tensor

from hydraspec.config.schema import Weights
from hydraspec.models.mtp.head import MTPHead
from hydraspec.speculators.mtp import MTPSpeculator
from hydraspec.types import Rows, StepRecord

MAX_K = 8
# Layout, MTP layers, and how much weighs what is not the last token: chosen so that most drafts are
# right and every accepted length occurs up to K = 8.
WORLDS = {
    "deepseek": ("deepseek", 1, 0.8),
    "deepseek, two layers": ("deepseek", 2, 0.85),
    "mimo": ("mimo", 1, 1.4),
    "mimo, two layers": ("mimo", 2, 1.4),
}


@dataclass
class MTPWorld(World):
    """A world with the definition's drafts after every prefix that a run can reach."""

    plain: PlainMTP = field(default=None)  # type: ignore[assignment]
    drafts: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    @property
    def num_mtp(self) -> int:
        return len(self.plain.layers)

    def expected_drafts(self, tokens: list[int], states: torch.Tensor) -> list[int]:
        """What the loop drafts after `tokens`, the last of which the target has not read yet."""
        key = tuple(tokens)
        if key not in self.drafts:
            self.drafts[key] = self.plain.chain(states, tokens, MAX_K)[0]
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
    for length in rng.permutation(lengths)[:num_prompts]:
        prompt = random_prompt(rng, int(length), world.vocab_size)
        world.continuations[prompt] = uncached_continuation(world.target, prompt, KNOWN_TOKENS)
    return world


def run(
    world: MTPWorld,
    scenario: Scenario,
    outcome: Outcome,
    plant: Callable[[MTPHead], None] | None = None,
) -> None:
    """Run it; assert outputs, and drafts and accepted counts of every step."""
    scenario.config.method.name = "mtp"
    scenario.config.method.weights = Weights.checkpoint
    if scenario.config.target.max_model_len is None:  # no longer than needed: pools become tight
        scenario.config.target.max_model_len = max(
            len(request.prompt_token_ids or ()) + request.sampling.max_tokens
            for request in scenario.requests
        )
    speculator = MTPSpeculator(scenario.config)
    speculator.load(world.target)
    if plant is not None:
        plant(speculator.head)
    engine = make_engine(scenario.config, world.target, speculator, scenario.cache_share)
    k, texts = scenario.config.method.num_speculative_tokens, []
    for request in scenario.requests:
        assert request.prompt_token_ids is not None
        prompt = tuple(request.prompt_token_ids)
        texts.append([*prompt, *world.continuations[prompt]])
    seen: list[tuple[int, int, list[int], int]] = []
    for event in engine.run(scenario.requests, concurrency=scenario.concurrency):
        if isinstance(event, StepRecord):
            outcome.num_preempted += event.num_preempted
            for part in event.requests:
                assert_every_draft_is_offered(scenario, part)
                if part.draft_token_ids:
                    step = (part.num_computed_tokens, part.draft_token_ids, part.num_accepted)
                    seen.append((part.index, *step))
        else:
            tokens, reason = scenario.expected[event.index]
            assert event.output_token_ids == tokens, (scenario, event.error)
            assert event.finish_reason == reason, scenario
    outcome.num_scenarios += 1
    assert engine.parts.runner.kv.usage == 0.0, "blocks leaked"
    states = {index: final_states(world, texts[index]) for index in {step[0] for step in seen}}
    for index, computed, drafts, accepted in seen:
        text = texts[index]
        expected = world.expected_drafts(text[: computed + 1], states[index][:computed])
        assert drafts == expected[: len(drafts)], (index, computed, scenario)
        truth = text[computed + 1 :]
        right = 0
        while right < len(drafts) and drafts[right] == truth[right]:
            right += 1
        assert accepted == right
        if len(drafts) == k:
            outcome.accepted[k, accepted] += 1


_STATES: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}


def final_states(world: MTPWorld, text: list[int]) -> torch.Tensor:
    """The target's final-norm states [len, D] of one fresh prefill of the whole text."""
    key = (world.folder, tuple(text))
    if key not in _STATES:
        block_size = world.target.block_size
        _STATES[key] = PagedRun(world.target, 1, 16, max_len=128).step({0: text})[0][0].clone()
        world.target.kv_groups(block_size)
    return _STATES[key]


def valid_k(number: int, num_mtp: int) -> int:
    """1 to 8 in turn, of those that go with the number of layers."""
    fitting = [k for k in range(1, MAX_K + 1) if k <= num_mtp or k % num_mtp == 0]
    return fitting[number % len(fitting)]


def run_scenarios(
    world: MTPWorld,
    count: int,
    seed: int,
    outcome: Outcome,
    plant: Callable[[MTPHead], None] | None = None,
) -> None:
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        run(world, draw_scenario(world, rng, valid_k(number, world.num_mtp)), outcome, plant)


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
    for k in {valid_k(number, world.num_mtp) for number in range(MAX_K)}:
        for right in range(k + 1):
            assert outcome.accepted[k, right] > 0, (k, right)


def one_layer_for_all_turns(head: MTPHead) -> None:
    head.layers[1] = head.layers[0]


def holes_between_turns(head: MTPHead) -> None:
    """Only the layer whose turn it is gets the row."""
    true_forward = head.forward

    def forward(rows: Rows, *args: Any, step: int) -> tuple[Tensor, Tensor]:
        head.num_drafts = MAX_K if step == 0 else 0
        return true_forward(rows, *args, step=step)

    head.forward = forward  # type: ignore[method-assign]


def the_row_after(head: MTPHead) -> None:
    """Rotates one position further in drafting steps than in the pass over the target's rows."""
    true_forward = head.forward

    def forward(rows: Rows, *args: Any, step: int) -> tuple[Tensor, Tensor]:
        return true_forward(replace(rows, positions=rows.positions + (step > 0)), *args, step=step)

    head.forward = forward  # type: ignore[method-assign]


def no_feedback(head: MTPHead) -> None:
    """Every step reads the target's state."""
    true_forward = head.forward

    def forward(rows: Rows, hidden: Tensor, *args: Any, step: int) -> tuple[Tensor, Tensor]:
        out, _ = true_forward(rows, hidden, *args, step=step)
        return out, hidden

    head.forward = forward  # type: ignore[method-assign]


def unblanked(head: MTPHead) -> None:
    layout = replace(head.config.layout, blanks_first_position=False)
    head.config = replace(head.config, layout=layout)


@pytest.mark.parametrize(
    "plant", [one_layer_for_all_turns, holes_between_turns, the_row_after, no_feedback, unblanked]
)
def test_planted_mistakes_are_caught(plant: Callable[[MTPHead], None], tmp_path: Path) -> None:
    world = make_world(tmp_path, "mimo, two layers", num_prompts=6)
    with pytest.raises(AssertionError):
        run_scenarios(world, 16, 1, Outcome(), plant)

"""Steps under a rule, by hand: an output of six tokens, three drafts from each of five places."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hydraspec.analysis.replay.record import Drafted, Forced
from hydraspec.analysis.replay.rules import Rule
from hydraspec.analysis.replay.steps import replay
from hydraspec.metrics.draft_figures import NEVER

RANKS = np.array([[1, 1, 2], [1, 3, 1], [2, 1, 1], [1, 1, 1], [1, 1, NEVER]])
PROBS = np.array([[0.9, 0.4, 0.9], [0.8] * 3, [0.3] * 3, [0.9, 0.9, 0.2], [0.9] * 3])
REQUEST = Drafted(
    id="a",
    category=None,
    num_output=6,
    num_prompt=10,
    ranks=RANKS,
    num_known=np.array([3, 3, 3, 3, 2]),
    forced=Forced(PROBS, PROBS, np.zeros(5)),
    starts=None,
    row={},
)


@pytest.mark.parametrize(
    ("rule", "accepted"),
    [
        # Place 0 accepts 2, so the next step starts at 3 and accepts past the end.
        (Rule(num_speculative_tokens=3), [2, 3]),
        # 0 accepts 2, 3 accepts 2.
        (Rule(num_speculative_tokens=2), [2, 2]),
        # Places 0, 2, 3.
        (Rule(num_speculative_tokens=1), [1, 0, 1]),
        # Three best: place 0 accepts all three, 4 is left, whose third is not known.
        (Rule(num_speculative_tokens=3, candidates=3), [3, 2]),
        # The second draft of place 0 is too unlikely, then place 2's first, then 3's third.
        (Rule(num_speculative_tokens=3, min_probability=0.5), [1, 0, 2]),
        (Rule(num_speculative_tokens=3, max_tokens=4), [2]),
        (Rule(num_speculative_tokens=3, max_tokens=1), []),
    ],
)
def test_each_step_starts_where_the_one_before_it_ended(rule: Rule, accepted: list[int]) -> None:
    found = replay(REQUEST, rule, None)
    assert found.accepted_per_step == accepted
    assert found.num_steps == len(accepted)
    assert found.num_accepted == sum(accepted)
    assert found.is_cut == (rule.candidates == 3)


def test_a_step_without_drafts_is_a_step() -> None:
    found = replay(REQUEST, Rule(num_speculative_tokens=3, min_probability=0.5), None)
    assert (found.num_steps, found.num_drafts) == (3, 2)  # place 2 offers none
    assert found.accepted_per_position == [2, 1, 0]
    assert found.drafted_per_position == []  # not known after a rejected draft


def test_the_model_length_leaves_room_for_every_draft_and_one_more() -> None:
    """The newest token of place 3 is number 13: with 16 tokens in all one draft fits."""
    found = replay(REQUEST, Rule(num_speculative_tokens=3), 16)
    assert found.accepted_per_step == [2, 1]
    assert found.drafted_per_position == [2, 1, 1]
    shorter = replay(replace(REQUEST, num_prompt=11), Rule(num_speculative_tokens=3), 16)
    assert shorter.drafted_per_position == [1, 1, 1]  # the last step has none
    assert (shorter.num_steps, shorter.num_drafts) == (3, 1)


def test_a_trace_has_its_own_steps_only() -> None:
    """Two steps that accepted 2 and 3 emitted 7 tokens; with one draft they emit 4."""
    traced = replace(REQUEST, starts=[0, 3], forced=None)
    found = replay(traced, Rule(num_speculative_tokens=3), None)
    assert (found.accepted_per_step, found.scale) == ([2, 3], 1.0)
    shorter = replay(traced, Rule(num_speculative_tokens=1), None)
    assert (shorter.accepted_per_step, shorter.scale) == ([1, 1], 7 / 4)

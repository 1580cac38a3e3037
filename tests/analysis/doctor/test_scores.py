"""Scores and intervals by hand, and under the null."""

from __future__ import annotations

import numpy as np

from hydraspec.analysis.doctor.scores import Scores, gain
from hydraspec.metrics.draft_figures import ceilings, replayed


def made(matches: list[list[int]], num_of: tuple[int, ...]) -> Scores:
    table = np.array(matches, bool)
    ranks = np.where(table, 1, 3)
    probs = np.where(table, 0.5, 0.1)
    return Scores(matches=table, ranks=ranks, probs=probs, log_probs=np.log(probs), num_of=num_of)


def test_replayed_steps_start_where_the_one_before_ended() -> None:
    # Text 1: starts 0 (2 accepted), 3 (0). Text 2: 0 (1), 2 (0).
    assert replayed(np.array([2, 9, 9, 0, 1, 9, 0]), (4, 3)) == 1 + 3 / 4


def test_ceilings_by_hand() -> None:
    """Step 1 of chain 0 is wrong while step 0 of chain 1 is right: the target's state would help.
    Other ranks are 3, so any of the best 5 would do.
    """
    found = ceilings(made([[1, 0], [1, 1], [0, 0]], (3,)))
    assert found["acceptance"] == 1 + 1 / 2  # starts 0 and 2
    assert found["oracle_features"] == 1 + 2 / 1  # start 0
    assert found["top_5"] == found["draft_vocabulary"] == 1 + 2 / 1


def test_intervals_hold_for_all_variants_together() -> None:
    """200 rounds of 40 null variants each: at most 10 % of the rounds have one that seems sure."""
    rng = np.random.default_rng(5)
    num_of = (20,) * 12
    alarms = 0
    for _ in range(200):
        base = rng.poisson(1.5, 240)
        noise = [
            base + rng.choice([-1, 0, 1], 240) + rng.normal(0, 0.3, 12).repeat(20)
            for _ in range(40)
        ]
        alarms += any(gain(each, base, num_of, num_compared=40).is_sure for each in noise)
    assert alarms <= 20


def test_few_texts_are_never_sure() -> None:
    found = gain(np.ones(8), np.zeros(8), (2, 2, 2, 2), num_compared=1)
    assert found.mean == 1.0
    assert not found.is_sure

"""Counting of drafts, on texts small enough to count by hand."""

from __future__ import annotations

import torch

from hydraspec.zoo.recipe.evaluate import Counts, Generation, count_drafts


def test_counts_run_from_the_first_sampled_token_to_the_last() -> None:
    # Prompt of 2; text 10 11 12 13 14 | 15 16, the last two past the end. Rows 1..5 may draft.
    text = Generation([0, 0, 10, 11, 12, 13, 14, 15, 16], prompt_length=2, end=7)
    right = torch.tensor([[11, 12], [12, 13], [13, 14], [14, 15], [15, 16]])
    assert count_drafts(text, right) == [2, 2]
    wrong = torch.zeros_like(right)
    assert count_drafts(text, wrong) == [0, 0, 0, 0]
    late = torch.tensor([[11, 0], [0, 0], [13, 14], [14, 15], [15, 16]])
    assert count_drafts(text, late) == [1, 2]


def test_an_accepted_token_after_a_hole_does_not_count() -> None:
    text = Generation([0, 10, 11, 12], prompt_length=1, end=3)
    assert count_drafts(text, torch.tensor([[9, 12]])) == [0]


def test_conditional_rates_are_over_what_was_offered() -> None:
    counts = Counts()
    for accepted in (0, 1, 2, 2):
        counts.add(accepted, 2)
    summary = counts.summary()
    assert summary["acceptance_length"] == 2.25
    assert summary["per_position"] == [0.75, 0.5]
    assert summary["conditional"] == [0.75, 0.667]

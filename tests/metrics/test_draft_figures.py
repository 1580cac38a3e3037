"""Where drafts are accepted: places, classes and shares by hand."""

from __future__ import annotations

import numpy as np
import pytest

from hydraspec.metrics.draft_figures import draft_share, teacher_forced
from hydraspec.types import PositionScores

TEXTS = {3: " 42", 4: "word", 5: "\n", 6: "+", 7: ""}


def scores(first: int, truth: list[list[int]], drafts: list[list[int]]) -> PositionScores:
    table, own = np.array(truth), np.array(drafts)
    return PositionScores(
        index=0,
        first=first,
        target_token_ids=table,
        target_ranks=np.where(table == own, 1, 2),
        target_probs=np.full(table.shape, 0.5, np.float32),
        draft_token_ids=own,
        draft_probs=np.full(table.shape, 0.5, np.float32),
        target_entropies=np.array([0.0, 0.3, 5.0][: len(table)], np.float32),
    )


FOUND = (
    # Contexts 15 and 16: the bound is between them. The last place's second token is not known.
    scores(14, [[3, 4], [4, 5], [5, -1]], [[3, 4], [4, 9], [9, 9]]),
    scores(600, [[6, 7], [7, 3]], [[9, 7], [7, 3]]),
)


def test_places_by_hand() -> None:
    """Leading drafts accepted of the four places: 2, 1 and 0, 2."""
    found = teacher_forced(FOUND, lambda ids: TEXTS[ids[0]])
    assert found is not None
    assert found["num_places"] == 4

    def rows(key: str) -> list[tuple[float | None, float | None, float | None, int]]:
        return [
            (row["from"], row["below"], row["accepted_per_start"], row["num_starts"])
            for row in found[key]  # type: ignore[literal-required]
        ]

    assert rows("by_context") == [(None, 16, 2, 1), (16, 32, 1, 1), (512, None, 1, 2)]
    assert rows("by_target_entropy") == [(None, 0.01, 1, 2), (0.1, 0.5, 1.5, 2)]
    classes = found["by_token_class"]
    assert classes is not None
    assert {name: of["accepted_per_start"] for name, of in classes.items()} == {
        "number": 2,
        "word": 1,
        "other": 1,  # "+", and the token without text
    }
    assert classes["other"]["num_starts"] == 2
    assert classes["other"]["ci95"] is None, "fewer than five texts"


def test_without_a_tokenizer_there_are_no_classes() -> None:
    found = teacher_forced(FOUND, None)
    assert found is not None
    assert found["by_token_class"] is None
    assert teacher_forced([], None) is None


@pytest.mark.parametrize(
    ("phases", "share"),
    [
        ({"forward": 3.0, "verify": None, "propose": 1.0}, 0.25),
        ({"forward": None, "propose": None}, None),
        ({"forward": 2.0}, None),
        ({"forward": 0.0, "propose": 0.0}, None),
    ],
)
def test_the_share_of_drafting(phases: dict[str, float | None], share: float | None) -> None:
    assert draft_share(phases) == share

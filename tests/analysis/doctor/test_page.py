"""doctor.html from a recorded doctor.json: aux layer ids in reverse order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checked_pages import check_page

from hydraspec.analysis.doctor.page import page_of, study_of

RECORDED = Path(__file__).parent / "recorded_doctor.json"


@pytest.fixture
def result() -> dict[str, Any]:
    return dict(json.loads(RECORDED.read_text(encoding="utf-8")))


def test_the_page_opens_with_the_verdict_and_what_to_do(result: dict[str, Any]) -> None:
    page = page_of(result)
    assert '<div class="card answer bad">' in page
    text = check_page(page).text
    verdict, to_do, evidence, tried = (
        text.index(part)
        for part in (
            "Verdict: convention",
            "Set eagle_aux_hidden_state_layer_ids of the drafter's config.json to [2, 9, 15]",
            "Evidence: conventions",
            "Conventions tried, after repair 1",
        )
    )
    assert verdict < to_do < evidence < tried
    assert page.count('<tr class="good">') == 2, "the repair as two variants, no other that gains"
    for part in ("with the causes repaired", "By tokens before the draft", "median rank"):
        assert part in text


@pytest.mark.parametrize(
    ("verdict", "kind", "to_do"),
    [
        ("weights", "bad", "convert the checkpoint again"),
        ("weak", "", "Train the drafter further"),
        ("healthy", "good", "Nothing to mend"),
        (None, "", "Give more prompts"),
    ],
)
def test_each_verdict_says_what_to_do(
    verdict: str | None, kind: str, to_do: str, result: dict[str, Any]
) -> None:
    odd = {"module": "fc", "tensor": "fc.weight", "says": "is 0 everywhere"}
    result |= {"verdict": verdict, "causes": [], "evidence": [odd], "prompts": []}
    (found,) = study_of(result).verdicts
    assert (found.kind, to_do in found.to_do[0]) == (kind, True)
    assert "fc.weight" in check_page(page_of(result)).text


def test_a_head_of_which_nothing_could_be_tried(result: dict[str, Any]) -> None:
    """Figures, tensors and folder are null, as of another package's head."""
    result |= {"verdict": None, "causes": [], "rounds": [], "prompts": [], "drafter": None}
    result |= {"figures": None, "tensors": None, "best_acceptance": None, "drafter_in_words": []}
    for acceptance in (1.8, None):
        text = check_page(page_of(result | {"acceptance": acceptance})).text
        assert "Run it beside method=none" in text
        assert ("Acceptance length" in text) == (acceptance is not None)


def test_what_files_say_is_escaped(result: dict[str, Any]) -> None:
    name = "<script>alert(1)</script>"
    result |= {"drafter": name, "sentence": name, "warnings": [name]}
    result["tensors"]["unread"] = [name]
    assert check_page(page_of(result)).text.count(name) == 4

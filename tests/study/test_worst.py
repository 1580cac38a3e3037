"""The requests accepted least: order, and rejected drafts beside the target's tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checked_pages import check_page
from fake_engine import Behaviour, FakeEngine

from hydraspec.config.schema import RunConfig
from hydraspec.lab import positions
from hydraspec.study.worst import MAX_REJECTED, worst_requests

Use = Callable[[FakeEngine], FakeEngine]
Run = Callable[[], dict[str, Any]]


def row(name: str, accepted: int, num_drafts: int) -> dict[str, Any]:
    return {
        "id": name,
        "category": None,
        "prompt_token_ids": [1, 2, 3],
        "num_drafts": num_drafts,
        "accepted_per_position": [accepted],
        "decode_tokens": 10,
        "decode_ms": 5.0,
        "baseline": {"decode_tokens": 10, "decode_ms": 10.0},
    }


def test_the_worst_come_first_and_a_rejection_is_at_its_place(tmp_path: Path) -> None:
    """The step's newest token is number 3 of the request, which is output token 0: its first draft
    is for output token 1. A target's token that a limit cut is not shown."""
    steps = [
        {
            "request": "b",
            "num_computed_tokens": 3,
            "draft_token_ids": [7, 8],
            "num_accepted": 1,
            "output_token_ids": [7, 9],
        },
        {
            "request": "b",
            "num_computed_tokens": 5,
            "draft_token_ids": [4],
            "num_accepted": 0,
            "output_token_ids": [],
        },
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(step) + "\n" for step in steps), encoding="utf-8")
    rows = [row("a", 9, 10), row("b", 1, 10), row("none", 0, 0)]
    first, second = worst_requests(rows, trace)
    assert (first.id, first.acceptance_length, first.speedup) == ("b", 1.1, 2.0)
    assert [(r.place, r.draft, r.target) for r in first.rejected] == [(2, 8, 9)]
    assert second.num_rejected == 0
    assert worst_requests(rows, None)[0].num_rejected is None
    assert worst_requests([row("none", 0, 0)], trace) == []


TEXTS = {
    " the": "8 ' the'",
    "\n\x1b[2J": r"8 '\n\x1b[2J'",
    "\u202ecod": r"8 '\u202ecod'",
    "é": "8 'é'",
    "": "8",
    "x" * 40: f"8 '{'x' * 23}…'",
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_token_has_its_text_beside_its_id(tmp_path: Path, text: str) -> None:
    """Catches control characters, and a direction override, that reach the page as they are."""
    step = {
        "request": "b",
        "num_computed_tokens": 3,
        "draft_token_ids": [8],
        "num_accepted": 0,
        "output_token_ids": [9],
    }
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps(step), encoding="utf-8")
    (found,) = worst_requests([row("b", 1, 10)], trace, lambda ids: text if ids == [8] else "a")
    assert found.rejected[0].draft_words == TEXTS[text]
    assert found.rejected[0].target_words == "9 'a'"


def test_texts_are_escaped_in_the_page(
    config: RunConfig,
    use_engine: Use,
    run_config: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(positions, "decoder", lambda config: lambda ids: "<b>\n")
    use_engine(FakeEngine(Behaviour(accepted=(0,))))
    config.metrics.trace = True
    run_config()
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert r"&#39;&lt;b&gt;\n&#39; → " in page
    assert r"'<b>\n'" in check_page(page).text


@pytest.mark.parametrize("has_trace", [True, False])
def test_the_page_lists_them(
    config: RunConfig, use_engine: Use, run_config: Run, tmp_path: Path, has_trace: bool
) -> None:
    use_engine(FakeEngine(Behaviour(accepted=(0,))))
    config.metrics.trace = has_trace
    run_config()
    text = check_page((tmp_path / "run" / "report.html").read_text(encoding="utf-8")).text
    assert "Requests with the lowest acceptance" in text
    assert ("metrics.trace=true adds the drafts" in text) == (not has_trace)
    assert (" → " in text) == has_trace
    assert (f"and {8 - MAX_REJECTED} more" in text) == has_trace

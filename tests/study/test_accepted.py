"""Tables of where drafts are accepted: on a terminal, in a run's page and in a report of runs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from checked_pages import check_page
from rich.console import Console
from studied_runs import edit

from hydraspec.study.accepted import bucket_words, parts, print_parts
from hydraspec.study.contents import study
from hydraspec.study.groups import read
from hydraspec.study.html import study_page

STEP = {"step": 0, "top_1": 0.5, "top_5": 0.75, "median_rank": 1.0, "mean_probability": 0.5}
OF = {"accepted_per_start": 1.25, "ci95": [1.0, 1.5], "num_starts": 1200}
FIGURES: dict[str, Any] = {
    "num_places": 1200,
    "by_step": [STEP],
    "by_context": [{"from": None, "below": 16, **OF}, {"from": 512, "below": None, **OF}],
    "by_target_entropy": [{"from": 0.1, "below": 0.5, **OF}],
    "by_token_class": {"white space": {**OF, "ci95": None}},
    "ceilings": dict.fromkeys(("acceptance", "oracle_features", "top_5", "draft_vocabulary"), 2.5),
}


@pytest.mark.parametrize(
    ("low", "below", "is_whole", "words"),
    [
        (None, 16, True, "below 16"),
        (16, 32, True, "16 to 31"),
        (512, None, True, "from 512"),
        (0.01, 0.1, False, "0.01 to 0.1"),
    ],
)
def test_buckets_in_words(low: float, below: float, is_whole: bool, words: str) -> None:
    assert bucket_words({"from": low, "below": below}, is_whole=is_whole) == words


def test_tables_on_a_terminal() -> None:
    """Each with its heading; what the figures lack has none."""
    stream = io.StringIO()
    print_parts(Console(file=stream, width=100), FIGURES)
    printed = stream.getvalue()
    for text in ("By tokens before the draft", "below 16", "white space", "0.1 to 0.5", "1,200"):
        assert text in printed
    assert "1.00 to 1.50" in printed
    assert "By place in the output" not in printed
    assert [part.key for part in parts({**FIGURES, "by_token_class": None})] == [
        "by_context",
        "by_target_entropy",
    ]


def test_a_report_of_runs_has_them_beside_each_other(studied: Path) -> None:
    """Job 1 has the record; job 0 is of an earlier version, without its key."""
    assert titles(studied) == {"Acceptance length by place in the output"}
    phases = {"forward": 3.0, "propose": 1.0}
    edit(studied / "1", teacher_forced=FIGURES, time_breakdown_ms=phases)
    assert titles(studied) == {
        "Acceptance length by place in the output",
        "Drafts over the target's own tokens",
        "Drafts accepted by tokens before the draft",
        "Drafts accepted by what the target's next token is",
        "Drafts accepted by entropy of the target's distribution, nats",
    }
    made = study(read([studied]))
    text = check_page(study_page(made, studied)).text
    for part in ("from 512", "1.25 (1.00 to 1.50)", "75.0 %", "25.0 %"):
        assert part in text.replace("\u00a0", " ")
    blocks = [block for section in made.sections for block in section.blocks]
    (shares,) = [block.table for block in blocks if block.title == "Where a step's time goes"]
    assert shares is not None
    assert shares.header[-1] == "drafting"
    assert sorted(line.cells[-1] for line in shares.lines) == ["-", "-", "25.0 %"]


def titles(folder: Path) -> set[str]:
    made = study(read([folder]))
    every = {block.title for section in made.sections for block in section.blocks}
    return {title for title in every if "Drafts " in title or "place in" in title}

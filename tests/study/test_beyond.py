"""Predictions for K beyond those tried, within what the drafter and the engine take."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from studied_runs import configure, copied, edit, edit_rows, summary_of
from studied_sweeps import of_drafts

from hydraspec.config.drafts import MAX_SPECULATIVE_TOKENS
from hydraspec.study.beyond import most_drafts
from hydraspec.study.decision import Decision, decide
from hydraspec.study.sweep import compare, read


@pytest.fixture
def sweep(studied: Path) -> Path:
    """Jobs of K=1 and K=3, where many more drafts would gain."""
    of_drafts(studied / "0", 1, 1.3)
    of_drafts(studied / "1", 3, 1.8)
    return studied


def holds(run: Path, rows: int, *, samples_anchor: bool = False) -> None:
    edit(run, draft_spec={"block_size": rows, "samples_anchor": samples_anchor})


def decided(sweep: Path) -> Decision:
    (group,) = read(sweep).groups
    found = decide(group)
    assert found is not None
    return found


def drafts_in(command: str) -> list[int]:
    """The K of a command."""
    (values,) = (
        word.partition("=")[2]
        for word in shlex.split(command)
        if word.startswith("method.num_speculative_tokens=")
    )
    return [int(value) for value in values.split(",")]


@pytest.mark.parametrize(("rows", "samples_anchor", "most"), [(5, False, 4), (4, True, 4)])
def test_no_k_is_predicted_that_the_drafter_does_not_hold(
    sweep: Path, rows: int, samples_anchor: bool, most: int
) -> None:
    """Catches a prediction, and a command, for K=8 with a block of five rows."""
    free = decided(sweep).predicted
    assert free is not None
    assert free.num_drafts > most
    holds(sweep / "1", rows, samples_anchor=samples_anchor)
    found = decided(sweep)
    assert found.beyond is not None
    assert found.beyond.edge == "K=3 is the largest"
    assert found.predicted is not None
    assert found.predicted.num_drafts == most
    record = found.record()
    assert record["predicted"] == {
        "num_speculative_tokens": most,
        "speedup": found.predicted.speedup,
    }
    assert f"is predicted for K={most}." in record["sentence"]
    assert drafts_in(record["next"]) == [3, most]


def test_nothing_lies_beyond_the_most_that_the_drafter_holds(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches the impossible figure in the console, compare.json and compare.html."""
    holds(sweep / "1", 4)
    compare(sweep)
    printed = capsys.readouterr().out
    assert "\nK=3 is the most that this drafter holds.\n" in printed
    answer = json.loads((sweep / "compare.json").read_text(encoding="utf-8"))["answer"]
    assert answer["predicted"] is None
    assert "K=3 is the most that this drafter holds." in answer["sentence"]
    assert drafts_in(answer["next"]) == [3]
    page = (sweep / "compare.html").read_text(encoding="utf-8")
    for text in (printed, page):
        assert "is predicted" not in text
        largest = max(int(k) for k in re.findall(r"K=(\d+)", text))
        assert largest == 3


def test_no_k_is_predicted_above_the_most_of_any_method(sweep: Path) -> None:
    """Catches the bound left out for drafters without blocks, and for runs of earlier versions."""

    def well_accepted(run: Path, k: int, speedup: float) -> None:
        of_drafts(run, k, speedup)
        edit_rows(run, lambda row: row.update(accepted_per_position=[95] * k))

    well_accepted(sweep / "0", 10, 1.3)
    well_accepted(sweep / "1", MAX_SPECULATIVE_TOKENS - 2, 3.0)
    summary = summary_of(sweep / "1")
    del summary["draft_spec"]
    (sweep / "1" / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    found = decided(sweep)
    assert found.predicted is not None
    assert found.predicted.num_drafts == MAX_SPECULATIVE_TOKENS
    assert drafts_in(found.next_command())[-1] == MAX_SPECULATIVE_TOKENS
    well_accepted(sweep / "1", MAX_SPECULATIVE_TOKENS, 3.0)
    found = decided(sweep)
    assert found.beyond is not None
    assert found.beyond.edge == f"K={MAX_SPECULATIVE_TOKENS} is the most that can be run here"
    assert found.predicted is None


def test_no_k_is_predicted_that_a_step_has_no_rows_for(sweep: Path) -> None:
    for job in "012":
        configure(sweep / job, engine__max_num_seqs=8, engine__max_num_batched_tokens=40)
        edit(sweep / job, engine="native")
    found = decided(sweep).predicted
    assert found is not None
    assert found.num_drafts == 4, "8 requests of 5 rows each"


def test_no_k_is_predicted_beyond_a_record_that_is_followed(sweep: Path) -> None:
    configure(sweep / "1", method__synthetic_trace="runs/recorded")
    assert decided(sweep).beyond is None


@pytest.mark.parametrize(
    ("spec", "most"),
    [
        ({"block_size": 8}, 7),
        ({"block_size": 8, "samples_anchor": True}, 8),
        ({"block_size": 2}, 3),
        ({"block_size": None}, MAX_SPECULATIVE_TOKENS),
        ({"drafter": "a/b", "read_by": "vllm"}, MAX_SPECULATIVE_TOKENS),
        (None, MAX_SPECULATIVE_TOKENS),
    ],
    ids=["block", "anchor", "as it ran", "no block", "vllm", "no drafter"],
)
def test_the_most_drafts_of_a_job(sweep: Path, spec: dict[str, Any] | None, most: int) -> None:
    edit(sweep / "1", draft_spec=spec)
    jobs = {each.job.name: each.job for group in read(sweep).groups for each in group.jobs}
    assert most_drafts(jobs["1"]) == most


def test_the_smallest_k_is_an_edge_too(sweep: Path) -> None:
    of_drafts(copied(sweep / "1", "3"), 6, 1.2)
    of_drafts(sweep / "0", 4, 1.3)
    holds(sweep / "1", 4)
    beyond = decided(sweep).beyond
    assert beyond is not None
    assert beyond.edge == "K=3 is the smallest"

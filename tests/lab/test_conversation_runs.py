"""Runs with conversations: their rows, their figures, and the hits of the prefix cache in them."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from records import json_lines

import hydraspec

EXACT = ("tracker=none", "target.dtype=float64")


def run(folder: Path, *typed: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run's summary, and its rows by id."""
    summary = hydraspec.run([*EXACT, *typed, f"hydra.run.dir={folder}"], quiet=True)
    rows = {row["id"]: row for row in json_lines(folder / "requests.jsonl")}
    for id_, row in rows.items():
        name, _, turn = id_.rpartition("/")
        if name and int(turn) > 1:
            before = rows[f"{name}/{int(turn) - 1}"]
            known = before["prompt_token_ids"] + before["output_token_ids"]
            assert row["prompt_token_ids"][: len(known)] == known
            assert len(row["prompt_token_ids"]) > len(known)
    return summary, rows


def test_turns_of_a_file_become_separate_rows(tmp_path: Path) -> None:
    """One conversation of text, one of token ids, and a request alone."""
    lines = [
        {"id": "talk", "turns": ["Sort these words: b a", "And d c"], "max_tokens": 20},
        {"turns": [[5, 6, 7] * 8, [8, 9], [10]], "max_tokens": 4, "category": "ids"},
        {"id": "alone", "prompt": "hello", "max_tokens": 3, "answer": "x"},
    ]
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    typed = ("target=tiny_qwen3", "method=eagle3", "workload=jsonl", f"workload.path={file}")
    summary, rows = run(tmp_path / "run", *typed)
    assert list(rows) == ["talk/1", "talk/2", "1/1", "1/2", "1/3", "alone"]
    assert rows["1/1"]["prompt_token_ids"] == [5, 6, 7] * 8
    assert rows["1/2"]["prompt_token_ids"][-2:] == [8, 9]
    assert rows["1/2"]["num_cached_tokens"] == 16, "its conversation's first block"
    assert summary["lossless"]["verdict"] == "identical"
    assert summary["lossless"]["num_requests_checked"] == 6
    turns = [(t["first"], t["last"], t["num_requests"]) for t in summary["by_turn"]]
    assert turns == [(1, 1, 3), (2, 2, 2), (3, 3, 1), (2, 3, 3)]
    assert summary["baseline"]["by_turn"][0]["mean_acceptance_length"] is None


PAIRS = [
    ("tiny_gemma4", "gemma4_mtp"),
    ("tiny_gemma4", "peagle"),
    ("tiny_gemma4_e", "gemma4_mtp"),
    ("tiny_qwen3", "eagle3"),
    ("tiny_qwen3", "peagle"),
    ("tiny_mistral", "eagle"),
    ("tiny_deepseek", "mtp"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "method"), PAIRS)
def test_later_turns_find_their_conversation_with_every_drafter(
    target: str, method: str, tmp_path: Path
) -> None:
    """All that is eligible is taken, with the drafter and without; a block of draft KV less only
    where prompts part at the end of a block. Of 16 turns that is nine tokens in ten."""
    size = ("workload=multi_turn", "workload.num_conversations=4", "workload.num_turns=16")
    typed = (f"target={target}", f"method={method}", *size)
    found, rows = run(tmp_path / "hits", *typed)
    hits, plain = found["prefix_cache"], found["baseline"]["prefix_cache"]
    assert found["lossless"]["verdict"] == "identical"
    assert found["lossless"]["num_requests_checked"] == 64
    assert hits["eligible_hit_rate"] == plain["eligible_hit_rate"] == 1.0
    assert hits["queried_tokens"] == plain["queried_tokens"]
    assert hits["hit_tokens"] + hits["border_tokens"] >= plain["hit_tokens"]
    assert hits["hit_rate"] >= 0.9
    assert hits["recomputed_tokens"] == found["num_preemptions"] == 0
    assert hits["hit_tokens"] == sum(row["num_cached_tokens"] for row in rows.values())
    page = (tmp_path / "hits" / "report.html").read_text(encoding="utf-8")
    assert "Prefix cache" in page
    assert f"{100 * hits['hit_rate']:.1f} %" in page


@pytest.mark.slow
@pytest.mark.parametrize(("target", "method"), PAIRS)
def test_hits_change_neither_tokens_nor_accepted_drafts(
    target: str, method: str, tmp_path: Path
) -> None:
    size = ("workload.num_conversations=4", "workload.num_turns=6", "sampling.max_tokens=24")
    typed = (f"target={target}", f"method={method}", "workload=multi_turn", *size)
    _, rows = run(tmp_path / "hits", *typed, "baseline=false")
    _, cold = run(tmp_path / "cold", *typed, "engine.prefix_caching=false", "baseline=false")
    same = ("output_token_ids", "accepted_per_position", "drafted_per_position")
    assert {i: [row[key] for key in same] for i, row in rows.items()} == {
        i: [row[key] for key in same] for i, row in cold.items()
    }


LONG = [
    *("workload=multi_turn", "workload.path=null", "workload.num_conversations=3"),
    *("workload.num_turns=6", "workload.turn_tokens=70", "workload.output_tokens=4"),
    *("workload.concurrency=1", "target=tiny_gemma4", "baseline=false"),
]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gemma4_mtp", "eagle3"])
def test_later_turns_wait_half_as_long_for_their_first_token(method: str, tmp_path: Path) -> None:
    """From the fourth turn on, of prompts of 290 to 440 tokens, which are read again without the
    cache."""
    waits = {}
    for caches in (True, False):
        typed = (f"method={method}", f"engine.prefix_caching={caches}".lower())
        _, rows = run(tmp_path / str(caches), *LONG, *typed)
        later = [row for id_, row in rows.items() if int(id_.rpartition("/")[2]) > 3]
        assert len(later) == 9
        assert all((row["num_cached_tokens"] > 200) == caches for row in later)
        waits[caches] = median(row["ttft_ms"] for row in later)
    assert waits[True] < waits[False] / 2, waits

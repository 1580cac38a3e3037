"""Runs with conversations: their rows, their figures, and the hits of the prefix cache in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hydraspec

EXACT = ("tracker=none", "target.dtype=float64")


def run(folder: Path, *typed: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run's summary, and its rows by id."""
    summary = hydraspec.run([*EXACT, *typed, f"hydra.run.dir={folder}"], quiet=True)
    lines = (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    rows = {row["id"]: row for row in map(json.loads, lines)}
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


PAIRS = {
    "gemma4_mtp": "tiny_gemma4",
    "eagle3": "tiny_qwen3",
    "peagle": "tiny_qwen3",
    "eagle": "tiny_mistral",
    "mtp": "tiny_deepseek",
}


@pytest.mark.slow
@pytest.mark.parametrize("method", PAIRS)
def test_later_turns_find_their_conversation_with_every_drafter(
    method: str, tmp_path: Path
) -> None:
    """Hits as often as without a drafter, and the same tokens and accepted drafts as without
    prefix caching."""
    size = ("workload.num_conversations=4", "workload.num_turns=6", "sampling.max_tokens=24")
    typed = (f"method={method}", f"target={PAIRS[method]}", "workload=multi_turn", *size)
    found, rows = run(tmp_path / "hits", *typed)
    assert found["lossless"]["verdict"] == "identical"
    assert found["lossless"]["num_requests_checked"] == 24
    hits, plain = found["prefix_cache"], found["baseline"]["prefix_cache"]
    assert hits["hit_tokens"] + hits["border_tokens"] >= plain["hit_tokens"] > 0
    assert hits["eligible_hit_rate"] >= 0.9
    _, cold = run(tmp_path / "cold", *typed, "engine.prefix_caching=false", "baseline=false")
    same = ("output_token_ids", "accepted_per_position", "drafted_per_position")
    assert {i: [row[key] for key in same] for i, row in rows.items()} == {
        i: [row[key] for key in same] for i, row in cold.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("method", PAIRS)
def test_of_sixteen_turns_nine_tokens_in_ten_are_found(method: str, tmp_path: Path) -> None:
    """A turn's prompt is the conversation so far: its new tokens and what is past the last whole
    block are read, less than a tenth of all."""
    size = ("workload.num_conversations=4", "workload.num_turns=16")
    typed = (f"method={method}", f"target={PAIRS[method]}", "workload=multi_turn", *size)
    found, _ = run(tmp_path / "run", *typed)
    hits, plain = found["prefix_cache"], found["baseline"]["prefix_cache"]
    assert hits["hit_tokens"] + hits["border_tokens"] >= plain["hit_tokens"]
    assert hits["hit_rate"] >= 0.9
    assert hits["eligible_hit_rate"] == 1
    assert found["lossless"]["verdict"] == "identical"


@pytest.mark.slow
def test_later_turns_wait_at_most_half_as_long_as_without_the_cache(tmp_path: Path) -> None:
    """Turns of 150 random tokens: without the cache each reads the whole conversation again."""
    size = ("workload.path=null", "workload.num_turns=6", "workload.turn_tokens=150")
    few = ("workload.num_conversations=3", "workload.concurrency=1", "workload.output_tokens=16")
    typed = ("workload=multi_turn", *size, *few, "baseline=false", "target.dtype=float32")
    waits = []
    for caching in ("true", "false"):
        summary, _ = run(tmp_path / caching, *typed, f"engine.prefix_caching={caching}")
        assert summary["num_errors"] == 0
        waits.append(summary["by_turn"][-1]["time_to_first_token_ms"])
    assert waits[0] <= waits[1] / 2

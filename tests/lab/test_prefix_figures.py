"""Conversations over the zoo: what the prefix cache gave, as a person sees it."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import hydraspec

PAIRS = [
    ("tiny_gemma4", "gemma4_mtp"),
    ("tiny_gemma4", "eagle3"),
    ("tiny_gemma4", "peagle"),
    ("tiny_gemma4_e", "gemma4_mtp"),
    ("tiny_mistral", "eagle"),
    ("tiny_deepseek", "mtp"),
]


def run(folder: Path, *overrides: str) -> Any:
    fixed = ["workload=multi_turn", "tracker=none", f"hydra.run.dir={folder}"]
    return hydraspec.run([*fixed, *overrides])


def rows(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "requests.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "method"), PAIRS)
def test_a_drafter_loses_no_hits(target: str, method: str, tmp_path: Path) -> None:
    """All that is eligible is taken, with the drafter and without; a block of draft KV less only
    where prompts part at the end of a block, which is counted apart."""
    summary = run(tmp_path, f"target={target}", f"method={method}", "baseline=true")
    ours, none = summary["prefix_cache"], summary["baseline"]["prefix_cache"]
    assert summary["lossless"]["verdict"] == "identical"
    assert none["eligible_hit_rate"] == ours["eligible_hit_rate"] == 1.0
    assert none["queried_tokens"] == ours["queried_tokens"] > 5000
    assert ours["hit_tokens"] + ours["border_tokens"] >= none["hit_tokens"]
    assert ours["recomputed_tokens"] == summary["num_preemptions"] == 0
    assert ours["hit_tokens"] == sum(row["num_cached_tokens"] for row in rows(tmp_path))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Prefix cache" in page
    assert f"{100 * ours['hit_rate']:.1f} %" in page


LONG = [
    *("workload.path=null", "workload.num_conversations=3", "workload.num_turns=6"),
    *("workload.turn_tokens=70", "workload.output_tokens=4", "workload.concurrency=1"),
    *("target=tiny_gemma4", "baseline=false"),
]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gemma4_mtp", "eagle3"])
def test_later_turns_wait_half_as_long_for_their_first_token(method: str, tmp_path: Path) -> None:
    """From the fourth turn on, of prompts of 290 to 440 tokens."""
    waits = {}
    for caches in (True, False):
        folder = tmp_path / str(caches)
        run(folder, *LONG, f"method={method}", f"engine.prefix_caching={caches}".lower())
        later = [row for row in rows(folder) if int(row["id"].rpartition("/")[2]) > 3]
        assert len(later) == 9
        assert all((row["num_cached_tokens"] > 200) == caches for row in later)
        waits[caches] = median(row["ttft_ms"] for row in later)
    assert waits[True] < waits[False] / 2, waits

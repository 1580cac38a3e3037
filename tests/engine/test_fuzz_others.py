"""Random configurations of engines over Qwen3, Llama, Mistral, DeepSeek and MiMo targets, and over
small random Gemma 4 ones: the twin of test_fuzz_gemma4.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from fuzz_cases import ON_CPU, OTHERS
from fuzz_engines import run_cases
from fuzz_stages import RANDOM_PAIRS, Pair

NUM_SHARDS, SHARD = 13, 24  # 312 configurations
CHOICES = replace(ON_CPU, pairs=OTHERS)
COPIED = tuple(
    Pair(f"random {name}", method)
    for method in ("ngram", "suffix")
    for name in ("mimo", "deepseek", "sliding")
)
QUICK = [p for p in RANDOM_PAIRS if "eagle" not in p.stage and p.method != "dspark"]


def test_a_few_configurations_decode_as_the_plain_engine() -> None:
    """Two of every small target."""
    tally = run_cases(range(1000, 1000 + 2 * len(QUICK)), replace(CHOICES, pairs=tuple(QUICK)))
    assert tally.num_cases == 2 * len(QUICK)
    assert tally.num_accepted > 20


@pytest.mark.slow
def test_copied_drafts_decode_as_the_plain_engine() -> None:
    """Three of each target: the number of drafts differs by request within a step."""
    tally = run_cases(range(3000, 3000 + 3 * len(COPIED)), replace(ON_CPU, pairs=COPIED))
    assert tally.num_cases == 3 * len(COPIED)
    assert tally.num_accepted > 40


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_copied_drafts_of_the_zoo_decode_as_the_plain_engine(method: str) -> None:
    targets = ("tiny_qwen3", "tiny_gemma4", "tiny_deepseek", "tiny_mistral")
    copied = tuple(Pair(name, method) for name in targets)
    tally = run_cases(range(3100, 3148), replace(ON_CPU, pairs=copied))
    assert tally.num_cases == 48
    assert tally.num_accepted > 100


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_configurations_decode_as_the_plain_engine(shard: int) -> None:
    tally = run_cases(range(shard * SHARD, (shard + 1) * SHARD), CHOICES)
    assert tally.num_cases == SHARD
    assert tally.num_accepted > 0.05 * tally.num_drafts

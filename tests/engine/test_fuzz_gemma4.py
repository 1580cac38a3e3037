"""Random configurations of engines over the zoo's Gemma 4 targets: sliding and full groups, shared
KV, per-layer inputs and experts, with every drafter. See fuzz_engines for what is checked.

The others are in test_fuzz_others.py: a file each, so that two workers share them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from fuzz_cases import GEMMA4, ON_CPU
from fuzz_engines import run_cases

NUM_SHARDS, SHARD = 11, 20  # 220 configurations
CHOICES = replace(ON_CPU, pairs=GEMMA4)


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_configurations_decode_as_the_plain_engine(shard: int) -> None:
    tally = run_cases(range(shard * SHARD, (shard + 1) * SHARD), CHOICES)
    assert tally.num_cases == SHARD
    assert tally.num_accepted > 0.1 * tally.num_drafts

"""Random configurations of engines over the zoo's quantised pairs: the twin of test_fuzz_gemma4.py.

In float64: noise of float32 may carry an input of a quantised matrix over the border between two
numbers, and logits then move by far more than the margin rule allows.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from fuzz_cases import ON_CPU
from fuzz_engines import run_cases
from fuzz_stages import QUANTISED_PAIRS, RAGGED

from hydraspec.config.schema import Dtype

NUM_SHARDS, SHARD = 5, 16  # 80 configurations
CHOICES = replace(ON_CPU, pairs=(*QUANTISED_PAIRS, RAGGED), dtypes=(Dtype.float64,))


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_configurations_decode_as_the_plain_engine(shard: int) -> None:
    tally = run_cases(range(shard * SHARD, (shard + 1) * SHARD), CHOICES)
    assert tally.num_cases == SHARD
    assert tally.num_accepted > 0.1 * tally.num_drafts

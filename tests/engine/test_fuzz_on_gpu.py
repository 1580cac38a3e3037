"""A device decodes what the CPU decodes, in float32: 100 random configurations, and engines beside
one another. Tokens, drafts and accepted counts are equal but for near ties, which are listed.

Alone: `pytest -m gpu tests/engine/test_fuzz_on_gpu.py -n 5 --dist load -s`. Five processes: kernels
are compiled for 6 targets and 9 drafters (three widths, heads of 32 and 64 and a latent row, one
vocabulary), and every worker meets most of them.
"""

from __future__ import annotations

from functools import cache

import engine_company
import pytest
from engine_company import LAUNCHES, Company
from fuzz_across import run_across
from fuzz_cases import ON_DEVICE, Case
from fuzz_engines import build
from fuzz_stages import ZOO_PAIRS

from hydraspec.engine.native import NativeEngine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

NUM_SHARDS, SHARD = 19, 10  # 190 configurations; a shard has one pair, so its kernels compile once
IN_COMPANY = [
    pair
    for pair in ZOO_PAIRS
    if (pair.stage, pair.method)
    in {("tiny_gemma4", "gemma4_mtp"), ("tiny_qwen3", "peagle"), ("tiny_deepseek", "mtp")}
]
alone = cache(engine_company.alone)


def on_cuda(case: Case) -> NativeEngine:
    return build(case, "cuda")


@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_configurations_decode_as_on_the_cpu(shard: int) -> None:
    """Case n has pair n modulo their number. What is listed of drafts and sampled tokens is held
    to one request in fifty: a draw or a drafter's choice within rounding of another."""
    assert len(ZOO_PAIRS) == NUM_SHARDS
    across = run_across(range(shard, NUM_SHARDS * SHARD, NUM_SHARDS), ON_DEVICE, on_cuda)
    assert across.num_cases == SHARD
    assert across.num_accepted > 0 or shard == 0, "nothing is accepted: no test of drafts"
    assert len(across.listed) <= 1 + across.num_requests // 50, across.listed


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("pair", IN_COMPANY, ids=lambda pair: f"{pair.stage}-{pair.method}")
def test_engines_of_one_process(pair: object, launch: str) -> None:
    """The second engine of a process once answered garbage: held against the CPU, not against
    another engine of the device."""
    company = Company(pair, launch, "cuda")  # type: ignore[arg-type]
    engine_company.baseline_takes_turns(company, alone)
    engine_company.three_step_in_between(company, ("k", "own", "none"), alone)
    engine_company.three_step_in_between(company, ("none", "k", "own"), alone)
    engine_company.one_goes_in_the_middle(company, alone)

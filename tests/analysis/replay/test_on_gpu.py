"""Drafts from every position on a device: the pass over texts runs beside captured steps, through
other kernels than theirs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hydraspec
from hydraspec.analysis.replay.run import replayed

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

NUM_REQUESTS = 8
MAX_DIFFERENT = 1  # a near tie of the drafter may fall otherwise in a pass of another size


@pytest.mark.parametrize(
    ("target", "method"),
    [
        ("tiny_gemma4_e", "gemma4_mtp"),
        ("tiny_qwen3", "eagle3"),
        ("tiny_qwen3", "peagle"),
        ("tiny_deepseek", "mtp"),
    ],
)
def test_the_record_repeats_the_run_that_made_it(target: str, method: str, tmp_path: Path) -> None:
    """Catches a pass that reads the engine's cache, its graphs' memory or another place."""
    hydraspec.run(
        [
            *(f"target={target}", f"method={method}", "method.num_speculative_tokens=3"),
            *("engine.device=cuda", "target.dtype=float32", "baseline=false", "tracker=none"),
            *("metrics.trace=true", "metrics.all_positions=true"),
            *(f"workload.limit={NUM_REQUESTS}", f"hydra.run.dir={tmp_path}"),
        ],
        quiet=True,
    )
    result = replayed(tmp_path, [])
    assert result["check"]["num_requests_different"] <= MAX_DIFFERENT
    assert result["num_requests"] == NUM_REQUESTS
    assert result["num_requests_left_out"] == 0
    lines = (tmp_path / "trace.jsonl").read_text(encoding="utf-8").splitlines()
    assert all(json.loads(line)["target_ranks"] is not None for line in lines)

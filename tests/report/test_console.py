"""The console: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import json
from typing import Any

from rich.console import Console

from hydraspec.metrics.meter import Meter
from hydraspec.metrics.sinks import Side
from hydraspec.report.console import ConsoleSink
from hydraspec.types import Completion, Request, SamplingParams, StepRecord

SUMMARY: dict[str, Any] = {
    "status": "ok",
    "engine": "native",
    "parallelism": {"tensor": 2, "pipeline": 1, "data": 2, "num_devices": 4},
    "target": "tiny [bold]",
    "method": "eagle3",
    "num_speculative_tokens": 2,
    "num_requests": 2,
    "num_errors": 1,
    "num_preemptions": 3,
    "by_turn": None,
    "prefix_cache": {
        "queried_tokens": 200,
        "hit_tokens": 96,
        "hit_rate": 0.48,
        "eligible_hit_rate": 0.75,
        "border_tokens": 0,
        "recomputed_tokens": 32,
    },
    "num_drafts": 4,
    "acceptance_length": {"mean": 2.5, "ci95": [2.25, 2.75], "mean_over_requests": 2.25},
    "acceptance_rate_per_position": [1.0, None],
    "output_tokens_per_second": 1234.5,
    "time_per_output_token_ms": 0.5,
    "time_to_first_token_ms": None,
    "accuracy": None,
    "baseline": None,
    "speedup": None,
    "assessment": {"says": "cannot_tell", "sentence": "cannot tell: [b] 1.00x"},
    "lossless": {
        "verdict": "not_checked",
        "reason": "baseline=false",
        "num_requests_checked": 0,
        "num_requests_sampled": 0,
        "first_divergence": None,
        "first_beyond_margin": None,
        "num_failed_with_method_only": 0,
    },
    "step_profile_ms": None,
    "warnings": ["a [red] warning"],
}


def play(*, terminal: bool) -> str:
    """A run of two requests, and what it printed."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    requests = [Request(index=i, id=str(i), sampling=SamplingParams()) for i in range(2)]
    sink = ConsoleSink(console, method="eagle3", sizes={Side.method: 2})
    meter = Meter(requests)
    sink.on_round(Side.method, 1, 2)
    for request in requests:
        sink.on_step(Side.method, StepRecord(step=0, phase_ms={}, total_ms=1.0, requests=[]), meter)
        done = Completion(
            index=request.index,
            prompt_token_ids=[1],
            output_token_ids=[1],
            text=None,
            finish_reason="stop",
            error=None,
            ttft_ms=1.0,
            latency_ms=1.0,
        )
        sink.on_completion(Side.method, done, meter)
    sink.on_summary(json.loads(json.dumps(SUMMARY)))
    sink.close()
    return out.getvalue()


def test_plain_lines_where_there_is_no_terminal() -> None:
    """Catches control codes in a log file, and text of the user's taken for markup."""
    text = play(terminal=False)
    assert "\x1b" not in text
    assert "\r" not in text
    assert "round 1 of 2: eagle3" in text
    ranks = "4 ranks (tensor 2, data 2)"
    assert f"tiny [bold] with eagle3, K=2 on native with {ranks}" in " ".join(text.split())
    assert "2.50 (2.25 to 2.75)" in text
    assert "Lossless: not checked (baseline=false)\n" in text
    assert "Warning: a [red] warning" in text
    assert "48.0 % (75.0 % of eligible)" in text
    assert len(text.splitlines()) < 22


def test_a_bar_on_a_terminal() -> None:
    text = play(terminal=True)
    assert "\x1b" in text
    assert "2/2" in text

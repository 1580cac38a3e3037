"""The console: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from typing import Any, cast

from rich.console import Console

from hydraspec.metrics.meter import Meter
from hydraspec.metrics.sinks import Side
from hydraspec.metrics.summary import Summary
from hydraspec.study.console import ConsoleSink, print_summary
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
    "time_breakdown_ms": {"schedule": 1.0, "forward": 2.0, "verify": None, "propose": 1.5},
    "request_rate": 2.5,
    "latency_ms": {
        "ttft": {"p50": 12.0, "p90": 34.5, "p99": 67.89},
        "inter_token": {"p50": None, "p90": None, "p99": None},
        "queue": {"p50": 0.5, "p90": 1.0, "p99": 1234.0},
    },
    "goodput": {
        "ttft_ms": 200.0,
        "inter_token_ms": 12.5,
        "share": 0.875,
        "requests_per_second": 1.75,
    },
    "accuracy": None,
    "baseline": None,
    "speedup": None,
    "prediction": None,
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


def completed(request: Request) -> Completion:
    return Completion(
        index=request.index,
        prompt_token_ids=[1],
        output_token_ids=[1],
        text=None,
        finish_reason="stop",
        error=None,
        ttft_ms=1.0,
        latency_ms=1.0,
    )


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
        sink.on_completion(Side.method, completed(request), meter)
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
    assert "48.0 %" in text
    assert "75.0 %" in text
    assert re.search(r"drafting's share of a step +│ +33.3 %", text)
    assert "12.0 / 34.5 / 67.9" in text
    assert "0.500 / 1.00 / 1,234" in text
    assert "- / - / -" in text
    assert "87.5 %" in text
    assert "first token within 200 ms, 12.5 ms per further token" in " ".join(text.split())
    assert len(text.splitlines()) < 28


def test_a_closed_load_without_limits_has_no_rows_of_latencies() -> None:
    closed = {**SUMMARY, "request_rate": None, "goodput": None}
    console = Console(file=io.StringIO(), width=100)
    print_summary(console, cast(Summary, closed))
    assert "p50" not in cast(io.StringIO, console.file).getvalue()


def test_the_bar_is_drawn_before_the_engine_waits_for_a_request() -> None:
    """The step that ended the last request was drawn just before: catches a bar that stays one
    request behind for the whole wait."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    request = Request(index=0, id="0", sampling=SamplingParams())
    meter = Meter([request])
    sink = ConsoleSink(console, method="eagle3", sizes={Side.method: 2})
    step = StepRecord(step=0, phase_ms={}, total_ms=1.0, requests=[], num_running=1)
    sink.on_step(Side.method, step, meter)
    sink.on_step(Side.method, replace(step, num_running=0), meter)
    assert "1/2" not in out.getvalue()
    sink.on_completion(Side.method, completed(request), meter)
    assert "1/2" in out.getvalue()
    sink.close()


def test_a_bar_on_a_terminal() -> None:
    text = play(terminal=True)
    assert "\x1b" in text
    assert "2/2" in text

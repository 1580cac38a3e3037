"""Sinks, whose hooks a run calls with each record, and the JSON-lines file of steps.

A sink only writes. The meter computes, and the lab decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import pairwise
from pathlib import Path

from hydraspec.metrics.counters import RequestCounters
from hydraspec.metrics.files import Json, JsonLinesFile
from hydraspec.metrics.latency import percentiles
from hydraspec.metrics.meter import Meter
from hydraspec.metrics.summary import Summary
from hydraspec.types import Completion, Request, StepRecord

OF_BASELINE = ("finish_reason", "decode_tokens", "decode_ms", "decode_steps", "correct")


class Side(Enum):
    """The engine that a record comes from: the method under study, or the same target without a
    drafter.
    """

    method = "method"
    baseline = "baseline"


class Sink:
    """Hooks of a run, in the order they are called. A sink overrides those it needs."""

    def on_round(self, side: Side, number: int, num_rounds: int) -> None:
        """Handle the start of a round of `side`, which decodes its share. Rounds count from 1."""

    def on_step(self, side: Side, record: StepRecord, meter: Meter) -> None:
        """Handle a step, after `meter` has counted it."""

    def on_completion(self, side: Side, completion: Completion, meter: Meter) -> None:
        """Handle a request that ended, after `meter` has counted it."""

    def on_requests(self, rows: Sequence[Json]) -> None:
        """Handle the rows of requests.jsonl, once the file is written."""

    def on_summary(self, summary: Summary) -> list[str]:
        """Handle the summary, once the run's files are written. Returns warnings to add to it."""
        return []

    def close(self) -> None:
        """Release files and threads; also called when the run failed."""


class StepsFile(Sink):
    """Writer of steps.jsonl: the StepRecords of the method, a line each."""

    def __init__(self, path: Path) -> None:
        self._file = JsonLinesFile(path)

    def on_step(self, side: Side, record: StepRecord, meter: Meter) -> None:
        if side is Side.method:
            self._file.write(record)

    def close(self) -> None:
        self._file.close()


def request_row(
    request: Request,
    completion: Completion,
    counters: RequestCounters,
    correct: bool | None,
    *,
    num_positions: int,
) -> dict[str, Json]:
    """A line of requests.jsonl: a completed request with its counts; lists by position have
    num_positions entries. `baseline` is None, for the OF_BASELINE keys of the baseline's row."""
    missing = [0] * (num_positions - len(counters.drafted_per_position))
    spans = {"spans": completion.spans} if completion.spans else {}
    return {
        "id": request.id,
        "category": request.category,
        "prompt_token_ids": completion.prompt_token_ids,
        **spans,
        "output_token_ids": completion.output_token_ids,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "error": completion.error,
        "num_drafts": counters.num_drafts,
        "drafted_per_position": counters.drafted_per_position + missing,
        "accepted_per_position": counters.accepted_per_position + missing,
        "reached_per_position": counters.reached_per_position + missing,
        "speculative_decoding": speculative_decoding(counters, num_positions),
        "ttft_ms": completion.ttft_ms,
        "latency_ms": completion.latency_ms,
        "num_cached_tokens": completion.num_cached_tokens,
        "num_image_tokens": counters.num_image_tokens,
        "decode_tokens": counters.decode_tokens,
        "decode_ms": counters.decode_ms,
        "decode_steps": counters.decode_steps,
        "queue_ms": completion.queue_ms,
        "inter_token_ms": percentiles(completion.inter_token_ms),
        **_logprobs(completion),
        "correct": correct,
        "baseline": None,
        "meta": request.meta,
    }


def _logprobs(completion: Completion) -> dict[str, Json]:
    """Log probabilities of output and prompt tokens, where asked for: a list per token, of the
    prompt null for the first."""
    found: dict[str, Json] = {}
    if completion.logprobs is not None:
        found["logprobs"] = [each._asdict() for each in completion.logprobs]
    if completion.prompt_logprobs is not None:
        of_prompt = [each._asdict() for each in completion.prompt_logprobs]
        found["prompt_logprobs"] = [None, *of_prompt]
    return found


def speculative_decoding(counters: RequestCounters, num_positions: int) -> dict[str, Json] | None:
    """A request's acceptance under the names of vLLM's per-request metrics; None: it verified no
    draft. Entry j of the histogram, 0 to num_positions, counts steps that accepted exactly j."""
    steps, accepted = counters.num_drafts, counters.num_accepted_tokens
    if steps == 0:
        return None
    at_least = [steps, *counters.accepted_per_position]
    at_least += [0] * (num_positions + 2 - len(at_least))
    return {
        "mean_acceptance_length": 1 + accepted / steps,
        "draft_acceptance_rate": accepted / counters.num_draft_tokens,
        "acceptance_histogram": [a - b for a, b in pairwise(at_least)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": counters.num_draft_tokens,
    }

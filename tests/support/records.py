"""Requests, completions and steps in plain numbers, whatever a test leaves out filled in."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydraspec.types import Completion, Request, RequestStep, SamplingParams, StepRecord

SAMPLING = frozenset(field.name for field in fields(SamplingParams))


def request(index: int = 0, **given: Any) -> Request:
    """A request with its index as its id; `given` are fields of it and of its sampling."""
    sampling = SamplingParams(**{name: given.pop(name) for name in SAMPLING & given.keys()})
    return Request(**{"index": index, "id": str(index), "sampling": sampling, **given})


def completion(index: int = 0, **fields: Any) -> Completion:
    """A completion of one prompt token and one output token."""
    known = {
        "prompt_token_ids": [1],
        "output_token_ids": [1],
        "text": None,
        "finish_reason": "length",
        "error": None,
        "ttft_ms": 1.0,
        "latency_ms": 1.0,
    }
    return Completion(**{"index": index, **known, **fields})


def part(
    index: int = 0,
    drafts: int = 0,
    accepted: int = 0,
    *,
    emitted: int | None = None,
    prefill_rows: int = 0,
    computed: int = 0,
) -> RequestStep:
    """A request's part in a step: a prefill of so many rows, or a verification of so many
    drafts.
    """
    return RequestStep(
        index=index,
        num_rows=prefill_rows or 1 + drafts,
        is_prefill=prefill_rows > 0,
        num_computed_tokens=computed,
        draft_token_ids=[1] * drafts,
        num_accepted=accepted,
        output_token_ids=[1] * (accepted + 1 if emitted is None else emitted),
    )


def step(*parts: RequestStep, ms: float = 1.0, **fields: Any) -> StepRecord:
    """A step of so many milliseconds."""
    known = {"step": 0, "phase_ms": {}, "total_ms": ms, "requests": list(parts)}
    return StepRecord(**{**known, **fields})


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

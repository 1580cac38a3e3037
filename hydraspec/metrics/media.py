"""Tables and histograms of a run for a tracker, as plain numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from hydraspec.metrics.files import Json
from hydraspec.metrics.statistics import ratio

MAX_ROWS = 10_000  # of the table of requests
NUM_BINS = 32
COLUMNS = (
    *("id", "category", "num_output_tokens", "num_drafts", "acceptance_length", "speedup"),
    *("ttft_ms", "latency_ms", "decode_ms_per_token", "inter_token_p99_ms", "num_cached_tokens"),
    *("num_image_tokens", "finish_reason", "correct", "error"),
)


@dataclass(slots=True, frozen=True, kw_only=True)
class PlainTable:
    """Rows with a value for each column."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(slots=True, frozen=True, kw_only=True)
class Bins:
    """A histogram: counts of values between edges, of which there is one more than counts."""

    counts: Sequence[int]
    edges: Sequence[float]


def request_table(rows: Sequence[Json]) -> PlainTable:
    """A line per row of requests.jsonl, figures only: prompts and outputs stay in that file."""
    return PlainTable(columns=COLUMNS, rows=[_request(row) for row in rows[:MAX_ROWS]])


def position_table(summary: Mapping[str, Any]) -> PlainTable | None:
    """Acceptance rate and conditional rate by position, from 1; None without drafts."""
    rates = summary["acceptance_rate_per_position"]
    if not rates:
        return None
    conditional = summary["conditional_acceptance_rate_per_position"]
    return PlainTable(
        columns=("position", "acceptance_rate", "conditional_acceptance_rate"),
        rows=[[i, *both] for i, both in enumerate(zip(rates, conditional, strict=True), start=1)],
    )


def figure_table(figures: Mapping[str, object], *, but: Sequence[str]) -> PlainTable | None:
    """Figures by name as text, without those named in `but`; None where none is left."""
    rows = [[name, str(value)] for name, value in figures.items() if name not in but]
    return PlainTable(columns=("figure", "value"), rows=rows) if rows else None


def histograms(rows: Sequence[Json], step_ms: Sequence[float]) -> Iterator[tuple[str, Bins]]:
    """Yield histograms by name: of requests the acceptance length, speedup and time to first token,
    of verifications the accepted tokens, and of the method's steps the milliseconds."""
    for name, values in (
        ("request_acceptance_length", [_length(row) for row in rows]),
        ("request_speedup", [speedup_of(row) for row in rows]),
        ("request_ttft_ms", [row["ttft_ms"] for row in rows]),
        ("step_ms", step_ms),
    ):
        known = [value for value in values if value is not None]
        if known:
            counts, edges = np.histogram(known, bins=NUM_BINS)
            yield name, Bins(counts=counts.tolist(), edges=edges.tolist())
    if accepted := _accepted_per_verification(rows):
        borders = [i - 0.5 for i in range(len(accepted) + 1)]
        yield "accepted_per_verification", Bins(counts=accepted, edges=borders)


def _accepted_per_verification(rows: Sequence[Json]) -> list[int]:
    """Verifications that accepted 0, 1, … drafts: accepted at i means all before were too."""
    num_drafts = sum(row["num_drafts"] for row in rows)
    if not num_drafts:
        return []
    at_least = np.sum([row["accepted_per_position"] for row in rows], axis=0).tolist()
    reached = [num_drafts, *at_least, 0]
    return [int(this - more) for this, more in pairwise(reached)]


def speedup_of(row: Json) -> float | None:
    """Speedup of one request: decode ms per token of its baseline / its own; None if not known."""
    baseline = row["baseline"]
    if baseline is None:
        return None
    return ratio(
        row["decode_tokens"] * baseline["decode_ms"], row["decode_ms"] * baseline["decode_tokens"]
    )


def _length(row: Json) -> float | None:
    return 1 + sum(row["accepted_per_position"]) / row["num_drafts"] if row["num_drafts"] else None


def _request(row: Json) -> list[Any]:
    return [
        *(row["id"], row["category"], len(row["output_token_ids"]), row["num_drafts"]),
        *(_length(row), speedup_of(row), row["ttft_ms"], row["latency_ms"]),
        ratio(row["decode_ms"], row["decode_tokens"]),
        *(row["inter_token_ms"]["p99"], row["num_cached_tokens"]),
        row.get("num_image_tokens", 0),
        *(row["finish_reason"], row["correct"], row["error"]),
    ]

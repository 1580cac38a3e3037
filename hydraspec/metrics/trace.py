"""Writers of the drafts of a run: trace.jsonl, a line per request and decode step, and
positions.jsonl, a line per place of an output where a step may verify drafts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hydraspec.metrics.files import Json, JsonLinesFile, write_json_lines
from hydraspec.metrics.meter import Meter
from hydraspec.metrics.sinks import Side, Sink
from hydraspec.types import PositionScores, Request, RequestStep, StepRecord

NUM_DIGITS = 6  # of probabilities


@dataclass(slots=True, frozen=True)
class _Ranks:
    """Columns of PositionScores that trace lines take."""

    first: int
    ranks: NDArray[np.int32]  # [N, K]; -1 where the target's token is not known
    probs: NDArray[np.float32]  # [N, K]


class TraceFile(Sink):
    """Writer of trace.jsonl: drafts, accepted and emitted tokens, a line per request and decode
    step of the method. Ranks and probabilities are filled in when the file is closed.
    """

    def __init__(self, path: Path, requests: Sequence[Request]) -> None:
        self._path, self._file = path, JsonLinesFile(path)
        self._ids = {request.index: request.id for request in requests}
        self._ranks: dict[str, _Ranks] = {}

    def on_step(self, side: Side, record: StepRecord, meter: Meter) -> None:
        if side is Side.method:
            for part in record.requests:
                if not part.is_prefill:
                    self._file.write(trace_row(self._ids[part.index], record.step, part))

    def add_scores(self, scores: PositionScores) -> None:
        """Keep the ranks and probabilities that `close` adds to the lines of a request."""
        ranks = np.where(scores.target_token_ids < 0, -1, scores.target_ranks).astype(np.int32)
        found = _Ranks(scores.first, ranks, scores.target_probs)
        self._ranks[self._ids[scores.index]] = found

    def close(self) -> None:
        self._file.close()
        if self._ranks:
            write_json_lines(self._path, self._filled())
            self._ranks = {}

    def _filled(self) -> Iterator[Json]:
        with self._path.open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                found = self._ranks.get(row["request"])
                if found is not None:
                    place = row["num_computed_tokens"] - found.first
                    known = found.ranks[place, : len(row["draft_token_ids"])] >= 0
                    count = int(known.sum())
                    row["target_ranks"] = _ranks(found.ranks[place, :count])
                    row["target_probabilities"] = _rounded(found.probs[place, :count])
                yield row


def trace_row(request_id: str, step: int, part: RequestStep) -> Json:
    """A line of trace.jsonl.

    The newest sampled token is number num_computed_tokens of the request, from 0.
    """
    return {
        "request": request_id,
        "step": step,
        "num_computed_tokens": part.num_computed_tokens,
        "draft_token_ids": part.draft_token_ids,
        "num_accepted": part.num_accepted,
        "jump_forward_places": part.jump_forward_places,
        "output_token_ids": part.output_token_ids,
        "target_ranks": None,
        "target_probabilities": None,
    }


class PositionsFile:
    """Writer of positions.jsonl: the drafts from every place of outputs, request by request."""

    def __init__(self, path: Path, requests: Sequence[Request]) -> None:
        self._file = JsonLinesFile(path)
        self._requests = {request.index: request for request in requests}

    def add_scores(self, scores: PositionScores) -> None:
        """Write the lines of a request, one for each place of its output."""
        request = self._requests[scores.index]
        for place in range(len(scores.target_token_ids)):
            self._file.write(position_row(request, scores, place))

    def close(self) -> None:
        """Flush and close."""
        self._file.close()


def position_row(request: Request, scores: PositionScores, place: int) -> Json:
    """A line of positions.jsonl; its lists end where the target's tokens are not known."""
    truth = scores.target_token_ids[place]
    count = int((truth >= 0).sum())
    return {
        "request": request.id,
        "temperature": request.sampling.temperature,
        "num_computed_tokens": scores.first + place,
        "target_token_ids": truth[:count],
        "target_ranks": _ranks(scores.target_ranks[place, :count]),
        "target_probabilities": _rounded(scores.target_probs[place, :count]),
        "target_entropy": _rounded(scores.target_entropies[place : place + 1])[0],
        "draft_token_ids": scores.draft_token_ids[place, :count],
        "draft_probabilities": _rounded(scores.draft_probs[place, :count]),
    }


def _ranks(ranks: NDArray[np.integer]) -> list[int | None]:
    """Ranks from 1; None for a token that the drafter cannot propose, whose rank is 0."""
    return [int(rank) or None for rank in ranks]


def _rounded(values: NDArray[np.floating]) -> list[float]:
    return [float(f"{value:.{NUM_DIGITS}g}") for value in values]

"""What a run recorded of its drafts, read from its folder: positions.jsonl if it is there, else
trace.jsonl.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hydraspec.metrics.draft_figures import NEVER
from hydraspec.metrics.draft_lengths import PER_STEP, drafts_of
from hydraspec.metrics.files import Json
from hydraspec.metrics.run_files import POSITIONS, TRACE
from hydraspec.study.runs import Run, read_run, refuse

ALLOWED = "the folder of a run that recorded its drafts"
REMEDY = "run it again with metrics.all_positions=true, or metrics.trace=true for an estimate"


@dataclass(slots=True, frozen=True)
class Forced:
    """What positions.jsonl has beside ranks."""

    draft_probs: NDArray[np.float64]  # [N, K] of the drafter's best token
    target_probs: NDArray[np.float64]  # [N, K] of the target's token in the drafter's distribution
    entropies: NDArray[np.float64]  # [N] nats, of the target's next token


@dataclass(slots=True, frozen=True, kw_only=True)
class Drafted:
    """The drafts of a request from each of its N places, K of each; places count from its first
    output token to the last but one. Of a trace only the places are known where steps started.
    """

    id: str
    category: str | None
    num_output: int
    num_prompt: int
    ranks: NDArray[np.int64]  # [N, K] of the target's token; NEVER beyond what is recorded
    num_known: NDArray[np.int64]  # [N] of K
    forced: Forced | None  # None from a trace
    starts: Sequence[int] | None  # places of a trace's steps; None: any may start a step
    row: Json  # of requests.jsonl


@dataclass(slots=True, frozen=True, kw_only=True)
class Record:
    """A run and its drafts."""

    run: Run
    source: Literal["positions", "trace"]
    num_drafts: int  # K
    requests: Sequence[Drafted]
    num_left_out: int  # requests that did not finish, or have no lines as memory ran out

    @property
    def max_model_len(self) -> int | None:
        """Tokens that a request may have; None in folders of older versions."""
        return self.run.summary.get("max_model_len")

    @property
    def is_adaptive(self) -> bool:
        """Returns whether the run chose K per step; `num_drafts` is then the largest."""
        return drafts_of(self.run.summary) == PER_STEP


def read_record(folder: Path) -> Record:
    """The record in a run's folder.

    Raises:
        ConfigurationError: no run, no record, a damaged one, or drafts that say nothing of others.
    """
    if not folder.is_dir():
        problem = "is no folder" if folder.exists() else "does not exist"
        raise refuse(folder, problem, allowed=ALLOWED, remedy=REMEDY)
    run = read_run(folder)
    _check(run, folder)
    source: Literal["positions", "trace"]
    source = "positions" if (folder / POSITIONS).is_file() else "trace"
    file = folder / (POSITIONS if source == "positions" else TRACE)
    if not file.is_file():
        raise refuse(folder, f"holds no {POSITIONS} or {TRACE}", allowed=ALLOWED, remedy=REMEDY)
    if source == "trace" and drafts_of(run.summary) == PER_STEP:
        raise refuse(
            folder,
            "ran method.num_speculative_tokens=auto: its trace lacks what was not drafted",
            allowed="such a run with metrics.all_positions=true, or a constant K",
            remedy="run it again with metrics.all_positions=true",
        )
    k = run.summary["num_speculative_tokens"]
    rows = [row for row in run.rows if row["finish_reason"] != "error"]
    try:
        lines = _by_request(file)
        if source == "positions":
            rows = [row for row in rows if row["id"] in lines or len(row["output_token_ids"]) < 2]
        drafted = _from_positions if source == "positions" else _from_trace
        requests = [drafted(row, lines.get(row["id"], []), k) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        problem = f"cannot be read: {type(error).__name__}: {str(error).splitlines()[0]}"
        raise refuse(file, problem, allowed=ALLOWED, remedy=REMEDY) from None
    left_out = len(run.rows) - len(rows)
    return Record(run=run, source=source, num_drafts=k, requests=requests, num_left_out=left_out)


def _check(run: Run, folder: Path) -> None:
    summary = run.summary
    if summary["num_speculative_tokens"] == 0:
        raise refuse(
            folder,
            f"ran method={summary['method']}, which drafts nothing",
            allowed=ALLOWED,
            remedy="give the folder of a run with a drafter",
        )
    if summary["verification"] == "synthetic":
        raise refuse(
            folder,
            "ran method.verification=synthetic: what was accepted says nothing of the drafter",
            allowed=ALLOWED,
            remedy="run it again with method.verification=standard",
        )
    sampled = summary["lossless"]["num_requests_sampled"]
    if sampled and summary["draft_sampling"] == "probabilistic":
        raise refuse(
            folder,
            f"{sampled} requests were sampled with method.draft_sampling=probabilistic: whether "
            "another draft is accepted depends on the target's probability of it, which is not "
            "recorded",
            allowed="greedy requests, or method.draft_sampling=greedy",
            remedy="run the other setting itself",
        )


def _by_request(file: Path) -> dict[str, list[Json]]:
    found: dict[str, list[Json]] = {}
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            found.setdefault(row["request"], []).append(row)
    return found


def _empty(row: Json, k: int) -> tuple[int, int, NDArray[np.int64], NDArray[np.int64]]:
    """A request's prompt length, places, ranks and known tokens."""
    num_places = max(0, len(row["output_token_ids"]) - 1)
    ranks = np.full((num_places, k), NEVER)
    return len(row["prompt_token_ids"]), num_places, ranks, np.zeros(num_places, np.int64)


def _from_positions(row: Json, lines: Sequence[Json], k: int) -> Drafted:
    num_prompt, num_places, ranks, known = _empty(row, k)
    shape = num_places, k
    forced = Forced(np.zeros(shape), np.zeros(shape), np.zeros(num_places))
    if len(lines) != num_places:
        raise ValueError(f"request {row['id']!r} has {len(lines)} of {num_places} places")
    for line in lines:
        place, count = line["num_computed_tokens"] - num_prompt, len(line["target_token_ids"])
        pairs = zip(line["draft_token_ids"], line["target_token_ids"], strict=True)
        # Of equal logits the drafter takes one: the others have its rank and are not its draft.
        for i, (own, theirs) in enumerate(pairs):
            rank = line["target_ranks"][i] or NEVER
            ranks[place, i] = 1 if own == theirs else max(2, rank)
        known[place] = count
        forced.draft_probs[place, :count] = line["draft_probabilities"]
        forced.target_probs[place, :count] = line["target_probabilities"]
        forced.entropies[place] = line["target_entropy"]
    return _drafted(row, ranks, known, forced)


def _from_trace(row: Json, lines: Sequence[Json], k: int) -> Drafted:
    num_prompt, _, ranks, known = _empty(row, k)
    starts = sorted(line["num_computed_tokens"] - num_prompt for line in lines)
    for line in lines:
        place, found = line["num_computed_tokens"] - num_prompt, _trace_ranks(line)
        ranks[place, : len(found)] = found
        known[place] = len(found)
    return _drafted(row, ranks, known, None, starts)


def _trace_ranks(step: Json) -> list[int]:
    """Of the drafts of a step. What was accepted decides; ranks of equal logits may differ."""
    drafts, accepted = step["draft_token_ids"], step["num_accepted"]
    ranks = [rank or NEVER for rank in step.get("target_ranks") or ()]
    ranks += [NEVER] * (len(drafts) - len(ranks))
    return (
        [1] * accepted
        + [max(2, rank) for rank in ranks[accepted : accepted + 1]]
        + ranks[accepted + 1 :]
    )


def _drafted(
    row: Json,
    ranks: NDArray[np.int64],
    known: NDArray[np.int64],
    forced: Forced | None = None,
    starts: Sequence[int] | None = None,
) -> Drafted:
    return Drafted(
        id=row["id"],
        category=row["category"],
        num_output=len(row["output_token_ids"]),
        num_prompt=len(row["prompt_token_ids"]),
        ranks=ranks,
        num_known=known,
        forced=forced,
        starts=starts,
        row=row,
    )


def is_greedy(record: Record) -> bool:
    """Returns whether no request was sampled."""
    lossless: Mapping[str, object] = record.run.summary["lossless"]
    return not lossless["num_requests_sampled"]

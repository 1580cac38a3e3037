"""The drafts that a run recorded in its folder: in positions.jsonl if it is there, else in
trace.jsonl.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hydraspec.metrics.draft_figures import NEVER
from hydraspec.metrics.draft_lengths import PER_STEP, drafts_of
from hydraspec.metrics.files import Json, read_json_lines
from hydraspec.metrics.run_files import POSITIONS, TRACE
from hydraspec.study.groups import check_summary
from hydraspec.study.runs import Run, read_run, refuse

ALLOWED = "the folder of a run that recorded its drafts"
REMEDY = "run it again with metrics.all_positions=true, or metrics.trace=true for an estimate"


@dataclass(slots=True, frozen=True)
class Forced:
    """Probabilities and entropies, which positions.jsonl has and a trace has not."""

    draft_probs: NDArray[np.float64]  # [N, K] of the drafter's best token
    target_probs: NDArray[np.float64]  # [N, K] of the target's token in the drafter's distribution
    entropies: NDArray[np.float64]  # [N] nats, of the target's next token


@dataclass(slots=True, frozen=True, kw_only=True)
class Drafted:
    """The drafts of a request, K from each of its N places: its output tokens but the last. A trace
    has only the drafts from places where steps started.
    """

    id: str
    category: str | None
    num_output: int
    num_prompt: int
    ranks: NDArray[np.int64]  # [N, K] of the target's token; NEVER beyond what is recorded
    num_known: NDArray[np.int64]  # [N] recorded drafts of the K
    forced: Forced | None  # None from a trace
    starts: Sequence[int] | None  # places where a trace's steps started; None: any may
    row: Json  # the line of requests.jsonl


@dataclass(slots=True, frozen=True, kw_only=True)
class Record:
    """A run and the drafts that it recorded."""

    run: Run
    source: Literal["positions", "trace"]
    num_drafts: int  # K
    requests: Sequence[Drafted]
    num_left_out: int  # requests with an error, or without lines

    @property
    def max_model_len(self) -> int | None:
        """Tokens that a request may have; None in folders of older versions."""
        return self.run.summary.get("max_model_len")

    @property
    def is_adaptive(self) -> bool:
        """Returns whether the run chose K per step; `num_drafts` is then the largest."""
        return drafts_of(self.run.summary) == PER_STEP

    @property
    def num_sampled(self) -> int:
        """Number of requests that were sampled; the others are greedy."""
        return int(self.run.summary["lossless"]["num_requests_sampled"])


def read_record(folder: Path) -> Record:
    """The recorded drafts in a run's folder.

    Raises:
        ConfigurationError: no run, no record or a damaged one, or drafts that cannot be replayed.
    """
    if not folder.is_dir():
        problem = "is no folder" if folder.exists() else "does not exist"
        raise refuse(folder, problem, allowed=ALLOWED, remedy=REMEDY)
    run = read_run(folder)
    check_summary(run)
    _check(run, folder)
    files = [folder / name for name in (POSITIONS, TRACE) if (folder / name).is_file()]
    if not files:
        raise refuse(folder, f"holds no {POSITIONS} or {TRACE}", allowed=ALLOWED, remedy=REMEDY)
    # A drafter that cannot be fed whole texts leaves positions.jsonl empty.
    file = next((each for each in files if each.stat().st_size), files[0])
    if file.stat().st_size == 0 and any(len(row["output_token_ids"]) > 1 for row in run.rows):
        problem = f"holds no drafts in {file.name}; its summary.json says why under warnings"
        raise refuse(folder, problem, allowed=ALLOWED, remedy=REMEDY)
    source: Literal["positions", "trace"] = "positions" if file.name == POSITIONS else "trace"
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
        is_trace = source == "trace"
        requests = [_drafted(row, lines.get(row["id"], []), k, is_trace=is_trace) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        problem = f"cannot be read: {type(error).__name__}: {str(error).splitlines()[0]}"
        raise refuse(file, problem, allowed=ALLOWED, remedy=REMEDY) from None
    left_out = len(run.rows) - len(rows)
    return Record(run=run, source=source, num_drafts=k, requests=requests, num_left_out=left_out)


def _check(run: Run, folder: Path) -> None:
    summary = run.summary
    if summary["status"] == "failed":
        raise refuse(
            folder,
            "is a run that failed: its record is not whole",
            allowed=ALLOWED,
            remedy="see the errors in its requests.jsonl, and run it again",
        )
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
    for row in read_json_lines(file):
        found.setdefault(row["request"], []).append(row)
    return found


def _drafted(row: Json, lines: Sequence[Json], k: int, *, is_trace: bool) -> Drafted:
    num_prompt, num_places = len(row["prompt_token_ids"]), max(0, len(row["output_token_ids"]) - 1)
    ranks, known = np.full((num_places, k), NEVER), np.zeros(num_places, np.int64)
    shape = num_places, k
    forced = Forced(np.zeros(shape), np.zeros(shape), np.zeros(num_places))
    if not is_trace and len(lines) != num_places:
        raise ValueError(f"request {row['id']!r} has {len(lines)} of {num_places} places")
    places = [line["num_computed_tokens"] - num_prompt for line in lines]
    for place, line in zip(places, lines, strict=True):
        found = _trace_ranks(line) if is_trace else _ranks(line)
        ranks[place, : len(found)] = found
        known[place] = len(found)
        if not is_trace:
            forced.draft_probs[place, : len(found)] = line["draft_probabilities"]
            forced.target_probs[place, : len(found)] = line["target_probabilities"]
            forced.entropies[place] = line["target_entropy"]
    return Drafted(
        id=row["id"],
        category=row["category"],
        num_output=len(row["output_token_ids"]),
        num_prompt=num_prompt,
        ranks=ranks,
        num_known=known,
        forced=None if is_trace else forced,
        starts=sorted(places) if is_trace else None,
        row=row,
    )


def _ranks(place: Json) -> list[int]:
    """Ranks of the target's tokens at a place of positions.jsonl; 1 for the drafted token
    alone, not for others with equal logits."""
    pairs = zip(place["draft_token_ids"], place["target_token_ids"], strict=True)
    ranks = [rank or NEVER for rank in place["target_ranks"]]
    return [
        1 if own == theirs else max(2, rank)
        for (own, theirs), rank in zip(pairs, ranks, strict=False)
    ]


def _trace_ranks(step: Json) -> list[int]:
    """Ranks of the target's tokens at a step of trace.jsonl; 1 for each accepted draft and at least
    2 for a rejected one, whatever ranks equal logits were given."""
    drafts, accepted = step["draft_token_ids"], step["num_accepted"]
    ranks = [rank or NEVER for rank in step.get("target_ranks") or ()]
    ranks += [NEVER] * (len(drafts) - len(ranks))
    rejected = [max(2, rank) for rank in ranks[accepted : accepted + 1]]
    return [1] * accepted + rejected + ranks[accepted + 1 :]

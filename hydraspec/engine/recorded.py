"""Acceptance of drafts as an earlier run recorded it, for method.synthetic_trace: read from its
folder, and written to the slots of the requests that follow it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hydraspec.config.messages import refusal
from hydraspec.config.schema import MethodConfig
from hydraspec.engine.schedule.sequence import Sequence
from hydraspec.errors import ConfigurationError
from hydraspec.types import RequestState

REQUESTS, TRACE = "requests.jsonl", "trace.jsonl"
KEY = "method.synthetic_trace"
ALLOWED = "the folder of a run with drafts, or its requests.jsonl"
FEW = 0.5  # share of a request's verifications that offer the last draft; fewer: K changed


@dataclass(slots=True, frozen=True)
class Recorded:
    """The acceptance of recorded requests, and which requests have none.

    Request i follows `counts[i % R]`: with p its output tokens so far, from 1, a verify step of it
    accepts draft j (from 0) if j < counts[i % R][(p - 1) % length] and it is offered.

    Attributes:
        counts: R arrays; entry p - 1 is how many drafts a step after p output tokens accepts.
        undraftable: share of the requests whose drafts are all rejected, spread evenly.
    """

    counts: Seq[np.ndarray]
    undraftable: float = 0.0

    def is_undraftable(self, index: int) -> bool:
        """Returns whether request `index` is one of those whose drafts are all rejected: with a
        share of 1/2 every second one."""
        return int((index + 1) * self.undraftable) > int(index * self.undraftable)

    def write(self, state: RequestState, sequence: Sequence) -> None:
        """Write the row of the request's slot in `state.accepts`. The host does not wait."""
        assert state.accepts is not None
        row = state.accepts[sequence.slot]
        index, first = sequence.request.index, sequence.num_prompt + 1
        values = np.zeros(len(row), dtype=np.int8)
        if not self.is_undraftable(index) and first < len(row):
            counts = self.counts[index % len(self.counts)]
            values[first:] = np.resize(counts, len(row) - first)
        staged = torch.from_numpy(values)
        if row.is_cuda:
            staged = staged.pin_memory()
        row.copy_(staged, non_blocking=True)


def read_recorded(method: MethodConfig) -> Recorded | None:
    """The recorded acceptance of method.synthetic_trace; None: the key is null.

    A trace.jsonl beside requests.jsonl gives the accepted drafts of every step. After a step that
    accepted a drafts, a step that began one token later is taken to accept a - 1, and so on, so
    that fewer drafts than were recorded follow the same process. Where all K were accepted nothing
    rejected the next token: in a share of these steps, the request's conditional rate at the last
    position, spread evenly, it counts as one that would have been, and the next step's after it.
    Without a trace the steps that accepted each number of drafts, which requests.jsonl counts, are
    spread evenly over the output.

    Raises:
        ConfigurationError: no such run, a damaged one, or one that does not have what is asked for.
    """
    if method.synthetic_trace is None or not method.most_drafts:
        return None
    given = Path(method.synthetic_trace)
    file = given / REQUESTS if given.is_dir() else given
    try:
        rows = [row for row in _lines(file) if row["num_drafts"]]
        traces = _traces(file.with_name(TRACE))
        _check_drafts(method, rows)
        found = [(row.get("category"), _counts(row, traces)) for row in rows]
    except OSError as error:
        raise _refusal(method, f"cannot be read ({error.strerror or error})") from None
    except ConfigurationError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        problem = f"has a line that is none of a run with drafts ({type(error).__name__}: {error})"
        raise _refusal(method, problem) from None
    categories = sorted({str(category) for category, _ in found})
    wanted = method.synthetic_category
    counts = [each for category, each in found if wanted is None or category == wanted]
    if not counts:
        raise refusal(
            "method.synthetic_category",
            wanted,
            f"is no category of {file}",
            allowed=", ".join(categories),
            remedy="choose one of these, or leave the key out",
        )
    return Recorded(counts, method.synthetic_undraftable or 0.0)


def _check_drafts(method: MethodConfig, rows: Seq[dict[str, Any]]) -> None:
    """Refuse more drafts than were recorded, and a number of them that changed from step to step:
    how many more would have been accepted is not known."""
    if not rows:
        raise _refusal(method, "holds no request that verified drafts")
    recorded = max(len(row["drafted_per_position"]) for row in rows)
    if method.most_drafts > recorded:
        problem = f"was recorded with {recorded} drafts a step, fewer than {method.most_drafts}"
        raise _refusal(method, problem)
    offered = np.array([row["drafted_per_position"] for row in rows]).sum(0)
    if offered[-1] < FEW * offered[0]:
        raise _refusal(method, "was recorded with a number of drafts that changed between steps")


def _refusal(method: MethodConfig, problem: str) -> ConfigurationError:
    return refusal(
        KEY,
        method.synthetic_trace,
        problem,
        allowed=ALLOWED,
        remedy="record one with metrics.trace=true and the largest K of interest as a number",
    )


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def _traces(file: Path) -> dict[str, list[dict[str, Any]]] | None:
    """Verify steps by request; None: no trace was recorded."""
    if not file.is_file():
        return None
    found: dict[str, list[dict[str, Any]]] = {}
    for step in _lines(file):
        found.setdefault(step["request"], []).append(step)
    return found


def _counts(row: dict[str, Any], traces: dict[str, list[dict[str, Any]]] | None) -> np.ndarray:
    """`Recorded.counts` of a line of requests.jsonl: places of `read_recorded`, at most K each."""
    steps = _spread(row) if traces is None else _traced(row, traces[row["id"]])
    last, *before = [row["num_drafts"], *row["accepted_per_position"]][::-1]
    most, rate, credit = len(before), last / max(1, before[0]), 0.5
    num_places = max(first + accepted + 1 for first, accepted in steps)
    counts = np.zeros(num_places + 1, dtype=np.int8)
    for first, accepted in reversed(steps):
        further = 0
        if accepted == most:
            credit += rate
            if credit >= 1:
                credit -= 1
                further = 1 + int(counts[first + accepted + 1])
        run = np.arange(accepted, -1, -1) + further
        counts[first : first + len(run)] = run.clip(max=most)
    return counts[:-1]


Steps = list[tuple[int, int]]  # place where each begins, and the drafts it accepted


def _traced(row: dict[str, Any], trace: Seq[dict[str, Any]]) -> Steps:
    num_prompt = len(row["prompt_token_ids"])
    return [(step["num_computed_tokens"] - num_prompt, step["num_accepted"]) for step in trace]


def _spread(row: dict[str, Any]) -> Steps:
    """Steps that accepted each number of drafts, in an order in which every number is spread
    evenly: its steps stand at the middles of equal parts of the request."""
    survivors = [row["num_drafts"], *row["accepted_per_position"], 0]
    counts = [before - after for before, after in pairwise(survivors)]  # by drafts accepted
    middles = [
        ((step + 0.5) / count, accepted)
        for accepted, count in enumerate(counts)
        for step in range(count)
    ]
    lengths = [accepted for _, accepted in sorted(middles)]
    places = accumulate((accepted + 1 for accepted in lengths), initial=0)
    return list(zip(places, lengths, strict=False))

"""The largest K that a job's drafter takes, and the speedup predicted for K beyond those tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hydraspec.metrics.draft_lengths import drafts_of
from hydraspec.study.jobs import Job
from hydraspec.study.pairs import ALL
from hydraspec.study.ranking import JobFigures

MOST_DRAFTS = 32  # of any method, by the configuration
TRACE = "method.synthetic_trace"  # a record, which has no acceptance beyond its own K


@dataclass(slots=True, frozen=True)
class Predicted:
    """A K beyond those tried, and the speedup that is predicted for it."""

    num_drafts: int
    speedup: float


@dataclass(slots=True, frozen=True, kw_only=True)
class Beyond:
    """What lies beyond the K that were tried, where the best job is at their edge.

    Attributes:
        edge: words on the best job's K: "K=5 is the largest", "K=7 is the most that …".
        is_end: whether no larger K can be run.
        predicted: the K beyond with the highest predicted speedup; None if no such K is worth
            trying.
    """

    edge: str
    is_end: bool = False
    predicted: Predicted | None = None

    def sentence(self, least: str) -> str:
        """The same as a sentence; `least` is the gain that is worth a run, such as "3 %"."""
        if self.is_end:
            return f"{self.edge}."
        end = f"{self.edge} that was tried"
        if self.predicted is None:
            return f"{end}; no K beyond is predicted to gain {least} more."
        return (
            f"{end}: {self.predicted.speedup:.2f}x is predicted for K={self.predicted.num_drafts}."
        )


def most_drafts(job: Job) -> int:
    """The largest K that the job can be run with: what a block of its drafter holds, a step of the
    engine has rows for, and any method may have. Summaries of earlier versions do not say the
    first."""
    bounds = [MOST_DRAFTS, _held(job), _rows_of_a_request(job)]
    least = min(bound for bound in bounds if bound is not None)
    return max(least, job.summary["num_speculative_tokens"])


def _held(job: Job) -> int | None:
    """The largest K that a block of the job's drafter holds; None for other drafters."""
    spec = job.summary.get("draft_spec")
    rows = spec.get("block_size") if isinstance(spec, Mapping) else None
    if not isinstance(spec, Mapping) or not isinstance(rows, int):
        return None
    return rows if spec.get("samples_anchor") else rows - 1


def _rows_of_a_request(job: Job) -> int | None:
    """The largest K that a full step of the native engine has rows for; None for others."""
    settings = job.runs[0].settings
    most, slots = (settings.get(f"engine.max_num_{key}") for key in ("batched_tokens", "seqs"))
    is_native = job.summary["engine"] == "native"
    if not is_native or not isinstance(most, int) or not isinstance(slots, int) or slots < 1:
        return None
    return most // slots - 1


def beyond_the_edge(best: JobFigures, jobs: Sequence[JobFigures], smallest: float) -> Beyond | None:
    """What lies beyond the K tried of the best job's method, if that job has the largest or the
    smallest of them; else None. A K that gains less than `smallest` is not worth trying.

    The prediction lets a step's cost grow with K at the fitted rate of the K tried, and lets each
    further position be accepted, given the one before, at the rate of the last position measured.
    """
    family = {
        k: each
        for each in jobs
        if each.job.summary["method"] == best.job.summary["method"]
        and isinstance(k := drafts_of(each.job.summary), int)
        and each.lengths[ALL]
    }
    k = drafts_of(best.job.summary)
    if not isinstance(k, int) or k not in family or len(family) < 2:
        return None
    if k == max(family):
        most = most_drafts(best.job)
        if k >= most:
            by = "this drafter holds" if _held(best.job) == k else "can be run here"
            return Beyond(edge=f"K={k} is the most that {by}", is_end=True)
        if best.job.runs[0].settings.get(TRACE) is not None:
            return None
        edge, beyond = f"K={k} is the largest", range(k + 1, min(2 * k + 2, most) + 1)
    elif k == min(family) > 1:
        edge, beyond = f"K={k} is the smallest", range(1, k)
    else:
        return None
    top = max(_predicted(best, family, beyond), key=lambda one: one.speedup)
    is_worth_it = top.speedup > (1 + smallest) * best.speedup
    return Beyond(edge=edge, predicted=top if is_worth_it else None)


def _predicted(
    best: JobFigures, family: Mapping[int, JobFigures], beyond: range
) -> list[Predicted]:
    """The predictions for each K of `beyond`, from the jobs of the best one's method by K."""
    costs = {at: _length(each) / each.speedup for at, each in family.items()}
    slope = max(0.0, float(np.polyfit(list(costs), list(costs.values()), 1)[0]))
    accepted = [rate or 0.0 for rate in best.by_position]
    last = accepted[-1] / accepted[-2] if len(accepted) > 1 and accepted[-2] else accepted[-1]
    while len(accepted) < beyond[-1]:
        accepted.append(accepted[-1] * last)
    k = drafts_of(best.job.summary)
    assert isinstance(k, int)
    return [
        Predicted(at, (1 + sum(accepted[:at])) / max(costs[k] + slope * (at - k), 1e-9))
        for at in beyond
    ]


def _length(each: JobFigures) -> float:
    length = each.lengths[ALL]
    return length["mean"] if length else 1.0

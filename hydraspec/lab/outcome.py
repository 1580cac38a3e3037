"""How a run ends: its exit status, and the last line of its output where answers are wrong.

Reads summaries only; light to import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OK, FAILED, DIVERGED, INTERRUPTED = 0, 1, 4, 130
IN_FLOAT32 = (
    "repeat the run with target.dtype=float32: if it diverges there too, rounding is not the cause"
)
WITHOUT_GRAPHS = (
    "repeat the run with cudagraph=none engine.async_scheduling=false, and report both runs"
)
WITH_A_TRACE = "repeat the run with metrics.trace=true, and report its folder"
OTHER_DTYPE = "the target's logits there are NaN or infinite: check the weights and target.dtype"
SEE_ERRORS = 'see "error" in requests.jsonl'


@dataclass(slots=True, frozen=True, kw_only=True)
class Outcome:
    """The end of one job.

    Attributes:
        status: 0, or why the process exits otherwise (README, "Exit status").
        diverged: what differs from the baseline, where and what to do; None if nothing does.
        job: the job's number in its sweep.
    """

    status: int
    diverged: str | None = None
    job: str = ""


def outcome(summary: Mapping[str, Any], job: str = "") -> Outcome:
    """The end of the run, or the benchmark, that a summary is of."""
    if summary["status"] != "ok":
        status = INTERRUPTED if summary["status"] == "interrupted" else FAILED
        return Outcome(status=status, job=job)
    if summary.get("lossless", {}).get("verdict") != "diverged":
        return Outcome(status=OK, job=job)
    return Outcome(status=DIVERGED, diverged=_what_diverged(summary), job=job)


def exit_status(outcomes: Sequence[Outcome]) -> int:
    """Of a run or a sweep: the lowest that is not 0, so 1 before 2 before 3 before 4."""
    return min((found.status for found in outcomes if found.status), default=OK)


def last_line(outcomes: Sequence[Outcome]) -> str | None:
    """What diverged in a run or a sweep, on one line; of several jobs the first is spelt out."""
    wrong = [found for found in outcomes if found.diverged is not None]
    if not wrong:
        return None
    first = wrong[0]
    if not first.job:
        return f"diverged: {first.diverged}"
    if len(wrong) == 1:
        return f"job {first.job} diverged: {first.diverged}"
    jobs = ", ".join(found.job for found in wrong)
    return (
        f"{len(wrong)} of {len(outcomes)} jobs diverged ({jobs}); "
        f"the first, job {first.job}: {first.diverged}"
    )


def _what_diverged(summary: Mapping[str, Any]) -> str:
    lossless = summary["lossless"]
    found = lossless["first_beyond_margin"]
    if found is None:
        lost = lossless["num_failed_with_method_only"]
        requests = "1 request" if lost == 1 else f"{lost} requests"
        return f"{requests} ended with an error where the baseline finished: {SEE_ERRORS}"
    num_wrong, num_checked = lossless["num_requests_diverged"], lossless["num_requests_checked"]
    if found["target_margin"] is None:
        margin = "target margin not known"
    else:
        margin = (
            f"target margin {found['target_margin']:.3g}, rounding allows "
            f"{found['allowed_margin']:.3g}"
        )
    return (
        f"request {found['request']} differs from the baseline at output token "
        f"{found['position']} ({num_wrong} of {num_checked} requests differ; {margin}): "
        f"{_what_to_do(summary)}"
    )


def _what_to_do(summary: Mapping[str, Any]) -> str:
    if summary["lossless"]["not_finite_in"] is not None:
        return OTHER_DTYPE
    if summary["dtype"] in ("bfloat16", "float16"):
        return IN_FLOAT32
    if summary["engine"] == "native" and summary["cudagraph"]["target"] != "none":
        return WITHOUT_GRAPHS
    return WITH_A_TRACE

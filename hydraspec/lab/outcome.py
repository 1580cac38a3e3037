"""The end of a run: its exit status, and the last line of its output if outputs diverged.

The module reads summaries only, and imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydraspec.metrics.lossless import what_diverged

OK, FAILED, REFUSED, DIVERGED, INTERRUPTED = 0, 1, 2, 4, 130


@dataclass(slots=True, frozen=True, kw_only=True)
class Outcome:
    """The end of one job.

    Attributes:
        status: the exit status of the process (README, "Exit status").
        diverged: what differs from the baseline, where, and what to do; None if nothing does.
        job: the job's number in its sweep.
    """

    status: int
    diverged: str | None = None
    job: str = ""


def outcome(summary: Mapping[str, Any], job: str = "") -> Outcome:
    """The end of a run, or of a benchmark, from its summary."""
    if summary["status"] == "interrupted":
        return Outcome(status=INTERRUPTED, job=job)
    if summary["status"] != "ok":
        parts = {part["status"] for part in summary.get("parts", ())}  # of a benchmark
        return Outcome(status=REFUSED if parts == {"refused"} else FAILED, job=job)
    if summary.get("lossless", {}).get("verdict") != "diverged":
        return Outcome(status=OK, job=job)
    return Outcome(status=DIVERGED, diverged=what_diverged(summary), job=job)


def exit_status(outcomes: Sequence[Outcome]) -> int:
    """The exit status of a run or a sweep: the lowest of its jobs that is not 0, else 0."""
    return min((found.status for found in outcomes if found.status), default=OK)


def last_line(outcomes: Sequence[Outcome]) -> str | None:
    """The divergence of a run or a sweep on one line, with the first job's in full; None without
    one."""
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

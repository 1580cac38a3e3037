"""The block of what runs warned of."""

from __future__ import annotations

from collections.abc import Sequence

from hydraspec.study.blocks import Block
from hydraspec.study.comparison.words import name_of
from hydraspec.study.groups import Runs

MAX_NAMED = 6  # jobs that a warning names


def warned(runs: Runs) -> Block | None:
    """Each warning once, after the jobs that gave it; what only one job said names that one."""
    of: dict[str, dict[str, None]] = {}  # warning -> names of jobs
    for job in runs.jobs:
        for run in job.runs:
            for warning in run.summary["warnings"]:
                of.setdefault(warning, {})[name_of(job)] = None
    if not of:
        return None
    num_jobs = len(runs.jobs)
    said = [f"{_names(list(names), num_jobs)}{warning}" for warning, names in of.items()]
    return Block(title="Warnings", sentences=said)


def _names(names: Sequence[str], num_jobs: int) -> str:
    if len(names) == num_jobs:
        return "All jobs: " if num_jobs > 1 else ""
    more = len(names) - MAX_NAMED
    listed = [*names[:MAX_NAMED], *([f"{more} more"] if more > 0 else [])]
    return f"{'; '.join(listed)}: "

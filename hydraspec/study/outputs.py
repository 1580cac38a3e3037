"""The gate's checks of outputs that need no further statistics: errors, lossless verdicts, and the
test of sampled outputs.
"""

from __future__ import annotations

from collections.abc import Iterator

from hydraspec.metrics.distribution import LEVEL
from hydraspec.metrics.lossless import MORE_VARIED, distribution_says
from hydraspec.study.jobs import Job
from hydraspec.study.runs import Key, Run, key_of

SAMPLED = "distribution of sampled outputs"


def broken(job: Job, reference: Job) -> Iterator[str]:
    """Yields sentences on outputs that are worse than the reference's."""
    yield from _errors(job, reference)
    yield from _verdict(job, reference)
    yield from _distribution(job, reference)


def untold(job: Job) -> Iterator[str]:
    """Yields a note where the tests of sampled outputs have no power, and so prove nothing."""
    if _lowest_p(job) is not None and not _is_told(job):
        yield f"{SAMPLED}: cannot tell, they hardly vary; {MORE_VARIED} has them vary"


def _errors(job: Job, reference: Job) -> Iterator[str]:
    """Yields a sentence per category on failed requests that all baseline runs finished."""
    finished = set.intersection(*(_ended(run, with_error=False) for run in reference.runs))
    failed = set.union(*(_ended(run, with_error=True) for run in job.runs)) & finished
    categories = {key_of(row): row["category"] for row in job.runs[0].rows}
    by_category: dict[str | None, list[str]] = {}
    for key in sorted(failed):
        by_category.setdefault(categories.get(key), []).append(key[0])
    for category, ids in by_category.items():
        where = "" if category is None else f" in {category}"
        number = f"{len(ids)} request{'s' if len(ids) > 1 else ''}"
        yield f"errors{where}: {number} that the baseline finished, {ids[0]} among them"


def _ended(run: Run, *, with_error: bool) -> set[Key]:
    return {key_of(row) for row in run.rows if (row["finish_reason"] == "error") == with_error}


def _verdict(job: Job, reference: Job) -> Iterator[str]:
    """Yields a sentence where a verdict became "diverged", or outputs are no longer checked."""
    was, now = _verdicts(reference), _verdicts(job)
    if "diverged" in now and "diverged" not in was:
        yield f"verdict: diverged, was {' and '.join(sorted(was))}"
    elif "not_checked" in now and "not_checked" not in was:
        yield f"verdict: not checked any more, was {' and '.join(sorted(was))}"


def _verdicts(job: Job) -> set[str]:
    return {run.summary["lossless"]["verdict"] for run in job.runs}


def _distribution(job: Job, reference: Job) -> Iterator[str]:
    """Yields a sentence where sampled outputs have another distribution, at the level of their
    test, or are no longer tested."""
    was, now = _lowest_p(reference), _lowest_p(job)
    before = f"had p = {was:.2g}" if was is not None and _is_told(reference) else None
    if now is None:
        if before is not None:
            yield f"{SAMPLED}: not tested any more, {before}"
    elif now <= LEVEL and (was is None or was > LEVEL):
        unknown = "was not tested" if was is None else "could not be told before"
        yield f"{SAMPLED}: not the target's, p = {now:.2g}, {before or unknown}"


def _is_told(job: Job) -> bool:
    """Returns whether a test of the runs' sampled outputs has power, or found a difference."""
    tests = [run.summary["lossless"].get("distribution") for run in job.runs]
    return any(test and distribution_says(test) != "cannot_tell" for test in tests)


def _lowest_p(job: Job) -> float | None:
    """The lowest p-value of a job's tests times their number; None where no run was tested."""
    lossless = [run.summary["lossless"] for run in job.runs]
    found = [test["p"] for each in lossless if (test := each.get("distribution"))]
    return min(1.0, min(found) * len(found)) if found else None

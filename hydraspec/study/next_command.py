"""The command of the sweep that settles an answer: which jobs it measures again, and on how many
prompts."""

from __future__ import annotations

import shlex
from collections.abc import Container, Sequence

from hydraspec.metrics.draft_lengths import PER_STEP, drafts_of
from hydraspec.metrics.run_facts import WorkloadSize
from hydraspec.study.beyond import most_drafts
from hydraspec.study.jobs import Job
from hydraspec.study.runs import POOLED
from hydraspec.study.settings import config_dir, typed_settings

K = "method.num_speculative_tokens"
LIMIT = "workload.limit"
OF_ONE_METHOD = ("method.checkpoint", "method.options")


def workload_size(job: Job) -> WorkloadSize:
    """The key that says how many prompts the job has, with those that ended; of runs of earlier
    versions, which do not say how many there are, workload.limit."""
    ended, given = job.summary["num_requests"], job.summary["num_requests_in_workload"]
    if (size := job.summary.get("workload_size")) is None:
        return {"key": LIMIT, "value": ended, "most": None}
    return {**size, "value": max(1, size["value"] * ended // max(1, given))}


def prompts_left(job: Job) -> int | None:
    """Prompts of the workload that the job did not run; None where there is no end of them, or it
    is not known."""
    size = workload_size(job)
    return None if size["most"] is None else max(0, size["most"] - size["value"])


def more_prompts(job: Job, num_more: int) -> str | None:
    """The override that adds `num_more` requests to the job's, or as many as the workload has; None
    where it has no more."""
    size, before = workload_size(job), max(1, job.summary["num_requests"])
    value = -(-size["value"] * (before + num_more) // before)
    if size["most"] is not None:
        value = min(value, size["most"])
    return f"{size['key']}={value}" if value > size["value"] else None


def sweep_command(best: Job, rivals: Sequence[Job], *, beyond: int | None, more: str | None) -> str:
    """The command that measures decoding without drafts, the best job, its rivals and the best
    job's method with K = `beyond`, all against each other.

    A sweep crosses methods and K: rivals, fastest first, and then `beyond` are left out where a
    drafter in the sweep cannot have one of its K.

    Args:
        more: the override for the number of prompts; None leaves it as it was typed.
    """
    tried, chosen = [best, *rivals], [best]
    bound = {job.name for job in tried if _is_bound(job)}
    for each in rivals:
        if _can_be_crossed([*chosen, each], tried, bound):
            chosen.append(each)
    drafts = {drafts_of(job.summary) for job in chosen}
    if beyond is not None and beyond <= min(map(most_drafts, chosen)):
        drafts.add(beyond)
    methods = dict.fromkeys(["none", *(job.summary["method"] for job in chosen)])
    dropped = () if more is None else (LIMIT, more.partition("=")[0])
    shared = [one for one in _typed(chosen) if one.partition("=")[0] not in (*dropped, "seed")]
    of_runs = [typed_settings(run.folder) for run in best.runs]
    seeds = dict.fromkeys(of["seed"] for of in of_runs if "seed" in of)
    shared += [f"seed={','.join(seeds)}"] if seeds else []
    values = ",".join(map(str, sorted(drafts, key=_place)))
    words = ["-m", f"method={','.join(methods)}", f"{K}={values}", *shared]
    return as_command([*words, *([] if more is None else [more])])


def run_command(job: Job) -> str:
    """The command that runs the job on all prompts; on as many as before where they may have no
    end."""
    size = job.summary.get("workload_size")
    is_endless = size is not None and size["key"] == LIMIT and size["most"] is None
    shared = [one for one in _typed([job]) if is_endless or not one.startswith(f"{LIMIT}=")]
    method, drafts = job.summary["method"], drafts_of(job.summary)
    return as_command([f"method={method}", f"{K}={drafts}", *shared])


def plain_command(job: Job) -> str:
    """The command that runs the job's prompts without drafts; its K keeps an experiment from
    sweeping over others."""
    typed = _typed([job])
    has_sweep = any(one.startswith("experiment=") for one in typed)
    return as_command(["method=none", *[f"{K}={drafts_of(job.summary)}"] * has_sweep, *typed])


def as_command(words: Sequence[str]) -> str:
    """The words as arguments of python -m hydraspec, quoted for a shell."""
    return " ".join(["python -m hydraspec", *map(shlex.quote, words)])


def _typed(jobs: Sequence[Job]) -> list[str]:
    """The first job's typed settings other than method and K, each with the values of all jobs;
    those that tell no jobs apart with its own."""
    typed = [typed_settings(job.folder) for job in jobs]
    shared = [
        f"{key}={','.join(dict.fromkeys(of[key] for of in typed if key in of))}"
        if key.partition(".")[0] not in POOLED
        else f"{key}={value}"
        for key, value in typed[0].items()
        if key not in ("method", K)
    ]
    return [*config_dir(jobs[0].folder), *shared]


def _is_bound(job: Job) -> bool:
    """Returns whether a drafter or options were typed for the job, which fit its method alone."""
    return any(key.startswith(OF_ONE_METHOD) for key in typed_settings(job.folder))


def _can_be_crossed(jobs: Sequence[Job], tried: Sequence[Job], bound: Container[str]) -> bool:
    """Returns whether each method of `jobs` can be run with each of their K; K=auto only where it
    was tried, and several methods only without the jobs whose names are in `bound`."""
    methods = {job.summary["method"] for job in jobs}
    if len(methods) > 1 and any(job.name in bound for job in jobs):
        return False
    largest = max(job.summary["num_speculative_tokens"] for job in jobs)
    if largest > min(map(most_drafts, jobs)):
        return False
    chosen = {job.summary["method"] for job in tried if drafts_of(job.summary) == PER_STEP}
    has_auto = any(drafts_of(job.summary) == PER_STEP for job in jobs)
    return not has_auto or methods <= chosen


def _place(drafts: int | str) -> tuple[bool, int]:
    """Sorting key of K: numbers rising, then auto."""
    return (True, 0) if isinstance(drafts, str) else (False, drafts)

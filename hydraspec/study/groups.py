"""Runs sorted into families of the same target, sampling and prompts, and within these into groups
of the same load and setup, in which jobs are ranked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import get_type_hints

from hydraspec.errors import ConfigurationError
from hydraspec.metrics.checked import mismatch
from hydraspec.metrics.run_files import BENCH, SUMMARY, job_number, read_summary, skipped_jobs
from hydraspec.metrics.summary import Summary
from hydraspec.study.job_costs import job_costs
from hydraspec.study.jobs import (
    Job,
    baseline_keys,
    by_key,
    check_alike,
    differing_keys,
    pool,
    setup_titles,
)
from hydraspec.study.ranking import Group, from_requests, from_summary, rank
from hydraspec.study.runs import Run, read_runs, refuse, short_names

READ = (  # keys of summary.json that reports, comparisons, gates and replays read
    *("status", "target", "method", "num_speculative_tokens", "engine", "dtype", "device"),
    *("workload", "num_requests", "num_errors", "concurrency", "request_rate", "burstiness"),
    *("acceptance_length", "by_category", "speedup", "assessment", "lossless", "accuracy"),
    *("time_breakdown_ms", "time_breakdown_from", "output_tokens_per_second"),
    *("time_per_output_token_ms", "baseline", "warnings"),
)
# Keys that are read too, and that summaries of earlier versions lack.
READ_IF_PRESENT = (
    *("acceptance_by_output_place", "teacher_forced", "parallelism", "draft_spec"),
    "workload_size",
)
LOAD = ("concurrency", "request_rate", "burstiness", "goodput")  # keys of the workload group
CONDITIONS = ("target", "sampling", "workload")  # config groups that say what is asked for


@dataclass(slots=True, kw_only=True)
class Family:
    """Groups of the same target, sampling and prompts, which differ in load or setup. `title` has
    the settings that tell the family from others."""

    title: str
    groups: list[Group]


@dataclass(slots=True, kw_only=True)
class Runs:
    """The runs of a report, in families; `left_out` has notes on folders without figures."""

    families: list[Family]
    left_out: list[str] = field(default_factory=list)

    @property
    def groups(self) -> list[Group]:
        """The groups of all families."""
        return [group for family in self.families for group in family.groups]

    @property
    def jobs(self) -> list[Job]:
        """The jobs of all groups."""
        return [one.job for group in self.groups for one in group.jobs]

    @property
    def runs(self) -> list[Run]:
        """The runs of all jobs."""
        return [run for job in self.jobs for run in job.runs]


def read(folders: Sequence[Path]) -> Runs:
    """The runs in these folders, in groups; a sweep's folder stands for its jobs.

    Raises:
        ConfigurationError: a folder holds no run, no run has figures, runs have nothing in common,
            or prompts within a group differ.
    """
    found = read_runs(folders)
    for run in found:
        check_summary(run)
    runs = [run for run in found if run.has_finished]
    left_out = [f"{run.name}: no request finished" for run in found if not run.has_finished]
    left_out += without_result(folders)
    if not runs:
        raise refuse(
            ", ".join(map(str, folders)),
            "no request finished in any run",
            allowed="runs with finished requests",
            remedy="see their summary.json and requests.jsonl",
        )
    _check_related(runs)
    return Runs(families=families_of(runs), left_out=left_out)


def check_summary(run: Run, keys: Sequence[str] = READ) -> None:
    """Refuse a run whose summary lacks one of `keys`, or has a value of another type there.

    Raises:
        ConfigurationError: the message names the folder and the key.
    """
    hints = get_type_hints(Summary)
    for key in (*keys, *(key for key in READ_IF_PRESENT if key in run.summary)):
        wrong = mismatch(run.summary.get(key), hints[key], key)
        if wrong is not None:
            raise refuse(
                run.folder,
                f"{SUMMARY}: {wrong}: damaged, or of an older hydraspec",
                allowed="folders of finished runs",
                remedy="leave it out, or run it again",
            )


def families_of(runs: Sequence[Run], *, is_strict: bool = True) -> list[Family]:
    """The families of these runs. A job's name is the ends of its folders' paths that differ.

    Args:
        is_strict: whether prompts that differ within a group are refused; else such a group is
            not ranked, and its `unranked` says why.
    """
    families = by_key(runs, [str(_conditions(run, load=False)) for run in runs])
    titles = _titles([members[0] for members in families.values()], load=False)
    made = [
        Family(title=title, groups=_groups(members, title, is_strict))
        for title, members in zip(titles, families.values(), strict=True)
    ]
    jobs = [one.job for family in made for group in family.groups for one in group.jobs]
    names = iter(short_names([run.folder for job in jobs for run in job.runs]))
    for job in jobs:
        job.name = "+".join(islice(names, len(job.runs)))
    return made


def _groups(runs: Sequence[Run], family: str, is_strict: bool) -> list[Group]:
    loads = [str(_conditions(run, load=True)) for run in runs]
    setups = baseline_keys(runs, load=False)
    groups = by_key(runs, zip(loads, setups, strict=True))
    of_load = _title_of(by_key(runs, loads), partial(_titles, load=True))
    of_setup = _title_of(by_key(runs, setups), setup_titles)
    made = []
    for (load, setup), members in groups.items():
        group = _group(members, is_strict)
        group.family, group.load, group.setup = family, of_load[load], of_setup[setup]
        made.append(group)
    return made


def _title_of(
    groups: Mapping[str, Sequence[Run]], titles: Callable[[Sequence[Run]], list[str]]
) -> dict[str, str]:
    """A title for each key of `groups`, from the first run of the group."""
    return dict(zip(groups, titles([runs[0] for runs in groups.values()]), strict=True))


def _group(runs: Sequence[Run], is_strict: bool) -> Group:
    """Group of runs that share load and setup, ranked where every run has a baseline.

    Raises:
        ConfigurationError: prompts differ, and `is_strict` is set.
    """
    jobs = pool(runs)
    alone = [from_summary(job) for job in jobs]
    if bare := [run.name for run in runs if not run.has_baseline]:
        why = f"Not ranked: {', '.join(bare)} ran without a baseline"
        return Group(jobs=alone, unranked=why if len(jobs) > 1 else "")
    if len(jobs) < 2:
        return Group(
            jobs=alone if len(runs) == 1 else [from_requests(jobs[0], costs=job_costs(jobs))]
        )
    try:
        check_alike(jobs)
    except ConfigurationError as error:
        if is_strict:
            raise
        return Group(jobs=alone, unranked=f"Not ranked: {str(error).splitlines()[0]}")
    return rank(jobs)


def _conditions(run: Run, *, load: bool) -> dict[str, object]:
    """The settings of a run under CONDITIONS: with `load` the keys of LOAD, else all other keys and
    the target's number format."""
    found: dict[str, object] = {}
    for key, value in run.settings.items():
        group, _, name = key.partition(".")
        if group in CONDITIONS and (name.partition(".")[0] in LOAD) == load:
            found[key] = value
    if not load and run.formats is not None:  # a folder may have been quantised between two runs
        found["target.format"] = run.formats.target
    return dict(sorted(found.items()))


def _titles(firsts: Sequence[Run], *, load: bool) -> list[str]:
    """Titles with the settings that tell each run from the others; empty for a single run."""
    conditions = [_conditions(run, load=load) for run in firsts]
    differing = differing_keys(conditions)
    return [_title(each, differing) for each in conditions]


def _title(conditions: Mapping[str, object], differing: Sequence[str]) -> str:
    """Title of a run: for each config group its name, if names differ, else its differing keys."""
    parts = []
    for group in CONDITIONS:
        if f"{group}.name" in differing:
            parts.append(f"{group} {conditions.get(f'{group}.name')}")
            continue
        for key in differing:
            if key.startswith(f"{group}."):
                value = conditions.get(key)
                parts.append(f"{key.rpartition('.')[2]} {'all' if value is None else value}")
    return ", ".join(parts)


def _check_related(runs: Sequence[Run]) -> None:
    """Refuse runs of several pairs of target and workload, if one pair has neither of the two in
    common with any other pair."""
    for run in runs:
        one = _asked(run)
        others = [other for other in runs if _asked(other) != one]
        if others and not any({*one} & {*_asked(other)} for other in others):
            two = _asked(others[0])
            raise refuse(
                f"{run.folder} and {others[0].folder}",
                f"have nothing in common: {' over '.join(one)}, and {' over '.join(two)}",
                allowed="runs that share a target or a workload",
                remedy="make a report of each",
            )


def _asked(run: Run) -> tuple[str, str]:
    """Words for the target and the workload of a run."""
    path = run.settings.get("workload.path")
    workload = f"workload {run.summary['workload']}"
    return f"target {run.summary['target']}", f"{workload} ({path})" if path else workload


def without_result(folders: Sequence[Path]) -> list[str]:
    """Notes on jobs of sweeps that left no result of a run or a benchmark, skipped ones first."""
    sweeps = [folder for folder in folders if read_summary(folder) is None]
    left_out = [
        f"{job.name}: skipped: {why}" for each in sweeps for job, why in skipped_jobs(each).items()
    ]
    return left_out + [f"{job.name}: no result" for each in sweeps for job in unfinished(each)]


def unfinished(sweep: Path) -> list[Path]:
    """The folders of a sweep's jobs that left no result and were not skipped, by number."""
    jobs = {each for each in sweep.iterdir() if each.is_dir() and each.name.isdigit()}
    jobs -= skipped_jobs(sweep).keys()
    left = (job for job in jobs if read_summary(job) is None and not (job / BENCH).is_file())
    return sorted(left, key=job_number)

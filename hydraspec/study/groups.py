"""Runs sorted into groups of the same target, sampling, workload and baseline; jobs are ranked in
each.

Reads nothing: runs reads the folders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import get_type_hints

from hydraspec.metrics.checked import mismatch
from hydraspec.metrics.run_files import BENCH, SUMMARY, job_number, read_summary
from hydraspec.metrics.summary import Summary
from hydraspec.study.figures import JobFigures, figures_of
from hydraspec.study.ranking import Ranking, rank
from hydraspec.study.runs import (
    Job,
    Run,
    by_key,
    check_alike,
    has_finished,
    pool,
    read_runs,
    refuse,
    short_names,
)
from hydraspec.study.setups import baseline_keys, setup_titles

READ = (  # keys of summary.json
    *("status", "target", "method", "num_speculative_tokens", "engine", "dtype", "device"),
    *("workload", "num_requests", "num_errors", "concurrency", "request_rate", "burstiness"),
    *("acceptance_length", "by_category", "speedup", "assessment", "lossless", "accuracy"),
    *("time_breakdown_ms", "time_breakdown_from", "output_tokens_per_second"),
    *("time_per_output_token_ms", "baseline", "warnings"),
)
# Keys that summaries of earlier versions lack.
READ_IF_PRESENT = ("acceptance_by_output_place", "teacher_forced", "parallelism")
LOAD = ("concurrency", "request_rate", "burstiness", "goodput")  # keys of the workload group
CONDITIONS = ("target", "sampling", "workload")  # config groups that say what is asked for


@dataclass(slots=True, kw_only=True)
class Group:
    """Jobs with the same target, sampling, prompts and load, that share a baseline.

    Attributes:
        jobs: best first where they are ranked, else in the order of their folders.
        ranking: None of a single job, and where `unranked` says why.
        load, setup: "", or what tells it from other groups of the same family: requests at once;
            split, device, engine and settings that its baseline depends on.
    """

    family: str
    load: str
    setup: str
    jobs: list[Job]
    ranking: Ranking | None = None
    unranked: str = ""

    @property
    def title(self) -> str:
        """The settings that tell it from other groups; empty where it is the only one."""
        return ", ".join(part for part in (self.family, self.load, self.setup) if part)

    @property
    def figures(self) -> list[JobFigures]:
        """The figures of its jobs, in their order."""
        if self.ranking:
            return [figures_of(each.job, each) for each in self.ranking.ranked]
        return [figures_of(job, None) for job in self.jobs]


@dataclass(slots=True, kw_only=True)
class Family:
    """Groups of the same target, sampling and prompts, which differ in load or setup."""

    title: str
    groups: list[Group]

    def jobs(self) -> Iterator[tuple[Group, Job]]:
        """All jobs with their groups."""
        return ((group, job) for group in self.groups for job in group.jobs)


@dataclass(slots=True, kw_only=True)
class Runs:
    """Everything a report is about; `left_out` says which folders hold no figures, and why."""

    families: list[Family]
    left_out: list[str] = field(default_factory=list)

    @property
    def groups(self) -> list[Group]:
        """The groups of all families."""
        return [group for family in self.families for group in family.groups]

    @property
    def jobs(self) -> list[Job]:
        """The jobs of all groups."""
        return [job for group in self.groups for job in group.jobs]


def read(folders: Sequence[Path]) -> Runs:
    """The runs in these folders, in groups; a sweep's folder stands for its jobs.

    Raises:
        ConfigurationError: a folder holds no run, no run has figures, or runs have nothing in
            common.
    """
    found = read_runs(folders)
    for run in found:
        _check_summary(run)
    runs = [run for run in found if has_finished(run)]
    left_out = [f"{run.name}: no request finished" for run in found if not has_finished(run)]
    left_out += without_result(folders)
    if not runs:
        raise refuse(
            ", ".join(map(str, folders)),
            "no request finished in any run",
            allowed="runs with finished requests",
            remedy="see their summary.json and requests.jsonl",
        )
    _check_related(runs)
    families = by_key(runs, [str(_conditions(run, load=False)) for run in runs])
    titles = _titles([members[0] for members in families.values()], load=False)
    made = [
        Family(title=title, groups=_groups(members, title))
        for title, members in zip(titles, families.values(), strict=True)
    ]
    found_all = Runs(families=made, left_out=left_out)
    names = short_names([job.runs[0].folder for job in found_all.jobs])
    for job, name in zip(found_all.jobs, names, strict=True):
        job.name = "+".join([name, *(run.name for run in job.runs[1:])])
    return found_all


def _check_summary(run: Run) -> None:
    """Refuse a summary without a key that a report reads, or with another type there."""
    hints = get_type_hints(Summary)
    for key in (*READ, *(key for key in READ_IF_PRESENT if key in run.summary)):
        wrong = mismatch(run.summary.get(key), hints[key], key)
        if wrong is not None:
            raise refuse(
                run.folder,
                f"{SUMMARY}: {wrong}: damaged, or of an older hydraspec",
                allowed="folders of finished runs",
                remedy="leave it out, or run it again",
            )


def _groups(runs: Sequence[Run], family: str) -> list[Group]:
    loads = [str(_conditions(run, load=True)) for run in runs]
    setups = baseline_keys(runs, load=False)
    groups = by_key(runs, zip(loads, setups, strict=True))
    of_load = _title_of(by_key(runs, loads), partial(_titles, load=True))
    of_setup = _title_of(by_key(runs, setups), setup_titles)
    return [
        _group(members, family, of_load[load], of_setup[setup])
        for (load, setup), members in groups.items()
    ]


def _title_of(
    groups: Mapping[str, Sequence[Run]], titles: Callable[[Sequence[Run]], list[str]]
) -> dict[str, str]:
    """A title for each key, from the first run that has it."""
    return dict(zip(groups, titles([runs[0] for runs in groups.values()]), strict=True))


def _group(runs: Sequence[Run], family: str, load: str, setup: str) -> Group:
    """
    Raises:
        ConfigurationError: their prompts differ.
    """
    group = Group(family=family, load=load, setup=setup, jobs=pool(runs))
    if len(group.jobs) < 2:
        return group
    bare = [run.name for run in runs if not _has_baseline(run)]
    if bare:
        group.unranked = f"Not ranked: {', '.join(bare)} ran without a baseline"
        return group
    check_alike(group.jobs)
    group.ranking = rank(group.jobs)
    group.jobs = [each.job for each in group.ranking.ranked]
    return group


def _has_baseline(run: Run) -> bool:
    return run.summary["method"] == "none" or run.summary["baseline"] is not None


def _conditions(run: Run, *, load: bool) -> dict[str, object]:
    """The settings that say what was asked for: those of the load, or the others."""
    found = {}
    for key, value in run.settings.items():
        group, _, name = key.partition(".")
        if group in CONDITIONS and (name.partition(".")[0] in LOAD) == load:
            found[key] = value
    return dict(sorted(found.items()))


def _titles(firsts: Sequence[Run], *, load: bool) -> list[str]:
    """What tells each from the others; empty for a single one."""
    conditions = [_conditions(run, load=load) for run in firsts]
    keys = dict.fromkeys(key for each in conditions for key in each)
    differing = [key for key in keys if len({str(each.get(key)) for each in conditions}) > 1]
    return [_title(run, each, differing) for run, each in zip(firsts, conditions, strict=True)]


def _title(run: Run, conditions: dict[str, object], differing: Sequence[str]) -> str:
    """A group is said by its name; its other keys where the names are equal."""
    parts = []
    for group in CONDITIONS:
        if f"{group}.name" in differing:
            parts.append(f"{group} {conditions.get(f'{group}.name')}")
            continue
        for key in differing:
            if key.startswith(f"{group}."):
                parts.append(f"{key.rpartition('.')[2]} {_shown(conditions.get(key))}")
    return ", ".join(parts)


def _shown(value: object) -> str:
    return "all" if value is None else str(value)


def _check_related(runs: Sequence[Run]) -> None:
    """Refuse a run that shares neither target nor workload with any other."""
    for run in runs:
        others = [other for other in runs if _asked(other) != _asked(run)]
        same_target = [other for other in others if _asked(other)[0] == _asked(run)[0]]
        same_workload = [other for other in others if _asked(other)[1] == _asked(run)[1]]
        if others and not same_target and not same_workload:
            one, two = _asked(run), _asked(others[0])
            raise refuse(
                f"{run.folder} and {others[0].folder}",
                f"have nothing in common: target {one[0]} over workload {one[1]}, and target "
                f"{two[0]} over workload {two[1]}",
                allowed="runs that share a target or a workload",
                remedy="make a report of each",
            )


def _asked(run: Run) -> tuple[str, str]:
    """Target and workload."""
    path = run.settings.get("workload.path")
    workload = str(run.summary["workload"])
    return run.summary["target"], f"{workload} ({path})" if path else workload


def without_result(folders: Sequence[Path]) -> list[str]:
    """What to say of the jobs of sweeps that left no result, of a run or of a benchmark."""
    sweeps = (folder for folder in folders if read_summary(folder) is None)
    return [f"{job.name}: no result" for sweep in sweeps for job in _unfinished(sweep)]


def _unfinished(sweep: Path) -> list[Path]:
    jobs = (each for each in sweep.iterdir() if each.is_dir() and each.name.isdigit())
    left = (job for job in jobs if read_summary(job) is None and not (job / BENCH).is_file())
    return sorted(left, key=job_number)

"""Blocks over all runs: warnings, the settings and the environments in which runs differ, and what
they share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from hydraspec.metrics.run_files import OVERRIDES
from hydraspec.study.blocks import Block, Line, Table
from hydraspec.study.groups import Runs
from hydraspec.study.runs import (
    Run,
    differing_settings,
    dotted,
    read_environment,
    short_names,
)
from hydraspec.study.words import name_of

CHOSEN_FROM = "target.drafters."  # what a target offers; method.checkpoint is what was chosen
SHARED = ("python", "platform", "device", "dtype", "cpu.model", "num_threads", "git.commit")


def typed_settings(folder: Path) -> dict[str, str]:
    """Key and value of each override of a job."""
    try:
        overrides = yaml.safe_load((folder / OVERRIDES).read_text(encoding="utf-8")) or []
    except (OSError, yaml.YAMLError):
        return {}
    pairs = (str(override).lstrip("+").partition("=") for override in overrides)
    return {key: value for key, _, value in pairs if not key.startswith(("hydra", "tracker"))}


def typed_labels(folders: Sequence[Path]) -> list[str]:
    """For each folder what was typed there and not for all; their names where that tells too
    little."""
    typed = [typed_settings(folder) for folder in folders]
    keys = dict.fromkeys(key for one in typed for key in one)
    differing = [key for key in keys if len({one.get(key) for one in typed}) > 1]
    labels = [", ".join(_label(key, one[key]) for key in differing if key in one) for one in typed]
    return labels if all(labels) and len(set(labels)) == len(labels) else short_names(folders)


def _label(key: str, value: str) -> str:
    name = key.rpartition(".")[2]
    return f"{'K' if name == 'num_speculative_tokens' else name}={value}"


def settings(runs: Runs) -> Block | None:
    """A line per run: the keys of config.yaml in which runs differ."""
    found = _all_runs(runs)
    keys = differing_settings([run for _, run in found])
    keys = [key for key in keys if not key.startswith(CHOSEN_FROM)]
    seeds = {str(run.settings.get("seed")) for _, run in found}
    keys += ["seed"] if len(seeds) > 1 else []
    if not keys:
        return None
    lines = [Line(cells=[name, *(_shown(run.setting(key)) for key in keys)]) for name, run in found]
    return Block(
        title="Settings that differ",
        note="Of config.yaml; all other settings are equal.",
        table=Table(header=["run", *keys], lines=lines),
    )


def environments(runs: Runs) -> Block:
    """What runs share of their environment, and a line per run where they differ."""
    found = _all_runs(runs)
    read = [_environment(run.folder) for _, run in found]
    keys = list(dict.fromkeys(key for each in read for key in each))
    differing = [key for key in keys if len({_shown(each.get(key)) for each in read}) > 1]
    shared = [
        f"{key}: {_shown(read[0][key])}"
        for key in keys
        if key not in differing and (key in SHARED or key.startswith(("versions.", "gpus")))
    ]
    table = None
    if differing:
        lines = [
            Line(cells=[name, *(_shown(each.get(key)) for key in differing)])
            for (name, _), each in zip(found, read, strict=True)
        ]
        table = Table(header=["run", *differing], lines=lines)
    note = "The same in all runs:" if len(found) > 1 else ""
    return Block(title="Environment", note=note, sentences=shared, table=table)


def _all_runs(runs: Runs) -> list[tuple[str, Run]]:
    """Names and runs of all jobs, each run once; names are the ends of their paths that differ."""
    found = [run for job in runs.jobs for run in job.runs]
    return list(zip(short_names([run.folder for run in found]), found, strict=True))


def _environment(folder: Path) -> Mapping[str, object]:
    known = dotted(read_environment(folder))
    return {key: value for key, value in known.items() if value not in (None, [], {})}


def _shown(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value))
    return "-" if value is None else str(value)


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

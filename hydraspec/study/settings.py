"""Blocks over all runs: warnings, the settings in which runs differ, and the environments that they
share or in which they differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from hydraspec.metrics.run_files import OVERRIDES
from hydraspec.study.blocks import Block, Line, Table
from hydraspec.study.groups import Runs
from hydraspec.study.jobs import differing_keys, differing_settings
from hydraspec.study.runs import Run, dotted, read_environment, short_names
from hydraspec.study.texts import some_of

CONFIG_DIR = re.compile(r"hydra\.searchpath=\['file://([^'\\]*)'\]")
CHOSEN_FROM = "target.drafters."  # drafters of a target; method.checkpoint is the chosen one
SHARED = ("python", "platform", "device", "dtype", "cpu.model", "num_threads", "git.commit")


def typed_settings(folder: Path) -> dict[str, str]:
    """The overrides of a job by key, without those of Hydra and the tracker; empty where they
    cannot be read."""
    pairs = (override.lstrip("+").partition("=") for override in _overrides(folder))
    return {key: value for key, _, value in pairs if not key.startswith(("hydra", "tracker"))}


def config_dir(folder: Path) -> list[str]:
    """The option --config-dir of a job, or hydra.searchpath if that names several folders; empty
    where the job had neither."""
    found = [each for each in _overrides(folder) if each.startswith("hydra.searchpath=")]
    return [CONFIG_DIR.sub(r"--config-dir=\1", override) for override in found]


def _overrides(folder: Path) -> list[str]:
    try:
        found = yaml.safe_load((folder / OVERRIDES).read_text(encoding="utf-8")) or []
    except (OSError, yaml.YAMLError):
        return []
    return list(map(str, found))


def typed_labels(folders: Sequence[Path]) -> list[str]:
    """Labels of job folders: the overrides in which these differ, or the names of the folders where
    overrides do not tell all apart."""
    typed = [typed_settings(folder) for folder in folders]
    differing = differing_keys(typed)
    labels = [", ".join(_label(key, one[key]) for key in differing if key in one) for one in typed]
    return labels if all(labels) and len(set(labels)) == len(labels) else short_names(folders)


def _label(key: str, value: str) -> str:
    name = key.rpartition(".")[2]
    return f"{'K' if name == 'num_speculative_tokens' else name}={value}"


def settings(runs: Runs) -> Block | None:
    """Table of the settings of config.yaml in which runs differ, a line per run; else None."""
    found = _all_runs(runs)
    keys = differing_settings([run for _, run in found])
    keys = [key for key in keys if not key.startswith(CHOSEN_FROM)]
    keys += differing_keys([{"seed": run.settings.get("seed")} for _, run in found])
    if not keys:
        return None
    lines = [Line(cells=[name, *(_shown(run.setting(key)) for key in keys)]) for name, run in found]
    return Block(
        title="Settings that differ",
        note="Of config.yaml; all other settings are equal.",
        table=Table(header=["run", *keys], lines=lines),
    )


def environments(runs: Runs) -> Block:
    """Block of the environment that runs share, with a table of what differs, a line per run."""
    found = _all_runs(runs)
    read = [_environment(run.folder) for _, run in found]
    differing = differing_keys(read)
    shared = [
        f"{key}: {_shown(value)}"
        for key, value in read[0].items()
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
    """All runs with their names, which are the ends of their paths that differ."""
    return list(zip(short_names([run.folder for run in runs.runs]), runs.runs, strict=True))


def _environment(folder: Path) -> Mapping[str, object]:
    known = dotted(read_environment(folder))
    return {key: value for key, value in known.items() if value not in (None, [], {})}


def _shown(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value))
    return "-" if value is None else str(value)


def warned(runs: Runs) -> Block | None:
    """Block of the warnings, each once, after the jobs that gave it; None without warnings."""
    of: dict[str, dict[str, None]] = {}  # warning -> names of jobs
    for job in runs.jobs:
        for run in job.runs:
            for warning in run.summary["warnings"]:
                of.setdefault(warning, {})[job.title] = None
    if not of:
        return None
    num_jobs = len(runs.jobs)
    said = [f"{_names(list(names), num_jobs)}{warning}" for warning, names in of.items()]
    return Block(title="Warnings", sentences=said)


def _names(names: Sequence[str], num_jobs: int) -> str:
    if len(names) == num_jobs:
        return "All jobs: " if num_jobs > 1 else ""
    return f"{'; '.join(some_of(names))}: "

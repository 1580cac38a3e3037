"""Reuse of results in a sweep: equal jobs run once, and a sweep resumes in its folder.

Nothing runs here. Jobs are equal if their configurations are, apart from the tracker, with
`method=auto` replaced by the method it was resolved to. The results of a finished job are not used
again once a local file of its workload or checkpoints has changed after the job began.
"""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hydraspec.cli.compose import Skipped
from hydraspec.config import RunConfig, to_dict
from hydraspec.config.benches import is_bench
from hydraspec.config.messages import refusal
from hydraspec.errors import ConfigurationError
from hydraspec.lab.resolution import resolve
from hydraspec.metrics.run_files import (
    OVERRIDES,
    RESULTS,
    SKIPPED,
    job_number,
    read_result,
    result_file,
)

log = logging.getLogger(__name__)


def record_skipped(sweep_dir: Path, jobs: Sequence[Skipped]) -> None:
    """Record in the log and in their folders which jobs of a sweep are left out, and why."""
    for job in jobs:
        reason = str(job.error).partition("\n")[0]
        log.warning("job %d is skipped: %s", job.number, reason)
        folder = sweep_dir / str(job.number)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(job.overrides, folder / OVERRIDES)
        text = json.dumps({"reason": reason}, ensure_ascii=False)
        (folder / SKIPPED).write_text(text + "\n", encoding="utf-8")


def check_folder(sweep_dir: Path, jobs: Mapping[int | None, RunConfig]) -> None:
    """Refuse a folder that holds the jobs of another sweep, which would be overwritten.

    Raises:
        ConfigurationError: naming the first job that differs.
        CheckpointError: the drafter of a job that ran cannot be read any more.
    """
    for number, config in jobs.items():
        recorded = _recorded(sweep_dir / str(number))
        if recorded is not None and recorded not in (identity(config), _resolved(config)):
            raise refusal(
                "hydra.sweep.dir",
                str(sweep_dir),
                f"holds another sweep: job {number} has a different configuration",
                allowed="a new folder, or that of the same sweep, which is then resumed",
                remedy="choose another hydra.sweep.dir, or delete this one",
            )


def find_finished(sweep_dir: Path, config: RunConfig) -> Path | None:
    """The folder of a finished job that equals `config`, which is resolved; None without one."""
    finished = {path.parent for name in RESULTS for path in sweep_dir.glob(f"*/{name}")}
    for folder in sorted(finished, key=job_number):
        summary = read_result(folder)
        if summary.get("status") != "ok" or "reused_from" in summary:
            continue
        with suppress(ConfigurationError):  # a folder in the sweep's folder that is no job's
            if _recorded(folder) == identity(config):
                changed = _changed_input(folder, config)
                if changed is None:
                    return folder
                log.info("%s has changed since job %s ran: not taken over", changed, folder.name)
    return None


def take_over(source: Path, run_dir: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Copy the results of the equal job in `source` to `run_dir`; returns the result, in which
    `reused_from` names that job."""
    if source.resolve() == run_dir.resolve():
        log.info("%s is finished: not run again", run_dir)
        return read_result(run_dir)
    log.info("%s equals the finished job %s, whose results it takes", run_dir, source.name)
    shutil.copytree(source, run_dir, dirs_exist_ok=True, ignore=shutil.ignore_patterns("wandb"))
    (run_dir / "overrides.yaml").write_text(OmegaConf.to_yaml(list(overrides)), encoding="utf-8")
    result = read_result(source) | {"reused_from": source.name}
    if "warnings" in result:
        typed = [str(override) for override in OmegaConf.load(source / "overrides.yaml")]
        result["warnings"] = _retyped(result["warnings"], typed, overrides)
    text = json.dumps(result, indent=2, ensure_ascii=False)
    copied = result_file(run_dir)
    assert copied is not None, "the source holds one"
    copied.write_text(text + "\n", encoding="utf-8")
    return result


def note_idle_seed(config: RunConfig, seeds: Sequence[int]) -> None:
    """Add a warning to config.warnings if a sweep over `seed` repeats this job's outputs; `seeds`
    are those of all jobs of the sweep.

    Raises:
        WorkloadError: the job's workload cannot be read.
    """
    seeds = list(dict.fromkeys(seeds))
    if len(seeds) < 2 or is_bench(config):
        return
    from hydraspec.workloads.reading import depends_on_seed

    if not depends_on_seed(config):
        typed = ",".join(map(str, seeds))
        config.warnings.append(
            f"seed={typed} changes nothing: no request samples, so that jobs which differ in seed "
            "alone repeat the same outputs; for others add sampling=stochastic"
        )


def group_name(sweep_dir: Path) -> str:
    """The group that trackers file a sweep under: the end of its path, by default date and time."""
    return "/".join(sweep_dir.resolve().parts[-2:])


def identity(config: RunConfig) -> dict[str, Any]:
    """Values that are the same in equal jobs: a resolved configuration without the tracker."""
    plain = to_dict(config)
    del plain["tracker"]
    return plain


def _resolved(config: RunConfig) -> dict[str, Any]:
    resolved = copy.deepcopy(config)
    resolve(resolved)
    return identity(resolved)


def _recorded(folder: Path) -> dict[str, Any] | None:
    """The configuration, without the tracker, that a job's folder records; None without one.

    Raises:
        ConfigurationError: the recorded configuration cannot be read.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        return None
    try:
        plain = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        if not isinstance(plain, dict):
            raise TypeError(f"it holds a {type(plain).__name__}")
    except Exception as error:  # OSError, UnicodeDecodeError, RecursionError, PyYAML's, OmegaConf's
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise refusal(
            "hydra.sweep.dir",
            str(folder.parent),
            f"holds a job whose configuration cannot be read: {path}: {reason}",
            allowed="a new folder, or that of the same sweep, which is then resumed",
            remedy=f"remove {folder}, whose job then runs again, or choose another folder",
        ) from None
    return {str(key): value for key, value in plain.items() if key != "tracker"}


def _changed_input(folder: Path, config: RunConfig) -> Path | None:
    """A local file of the job's input that was written or replaced after the job began, which is
    when its configuration was written; None without one.
    """
    began = (folder / "config.yaml").stat().st_mtime
    for file in _local_inputs(config):
        for found in (file.stat(), file.lstat()):
            if max(found.st_mtime, found.st_ctime) > began:
                return file
    return None


def _local_inputs(config: RunConfig) -> Iterator[Path]:
    for given in (config.workload.path, config.target.checkpoint, config.method.checkpoint):
        path = Path(given or "").expanduser()
        if given and path.is_dir():
            yield from (entry for entry in sorted(path.iterdir()) if entry.is_file())
        elif given and path.is_file():
            yield path


def _retyped(warnings: Sequence[str], before: Sequence[str], now: Sequence[str]) -> list[str]:
    """The warnings of another job with the overrides they quote replaced by this job's."""
    values = dict(override.partition("=")[::2] for override in now)
    named = []
    for warning in warnings:
        for override in before:
            key = override.partition("=")[0]
            if warning.startswith(f"{override} ") and key in values:
                warning = f"{key}={values[key]}{warning.removeprefix(override)}"
        named.append(warning)
    return named

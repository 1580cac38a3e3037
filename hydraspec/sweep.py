"""The folders of a sweep: equal jobs run once, and a sweep started again into its folder resumes.

Belongs to the command line's layer; runs nothing itself. Jobs are equal when their configurations
are, the tracker aside. What `method=auto` stands for is recorded, and compared.
"""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hydraspec.config import RunConfig, to_dict
from hydraspec.config.messages import refusal
from hydraspec.lab.resolution import resolve

log = logging.getLogger(__name__)


def check_folder(sweep_dir: Path, jobs: Sequence[RunConfig]) -> None:
    """Refuse a sweep folder whose jobs are others: they would be overwritten.

    Raises:
        ConfigurationError: naming the first job that differs.
        CheckpointError: the drafter of a job that ran cannot be read any more.
    """
    for number, config in enumerate(jobs):
        recorded = _recorded(sweep_dir / str(number))
        if recorded is not None and recorded not in (_identity(config), _resolved(config)):
            raise refusal(
                "hydra.sweep.dir",
                str(sweep_dir),
                f"holds another sweep: job {number} has a different configuration",
                allowed="a new folder, or that of the same sweep, which is then resumed",
                remedy="choose another hydra.sweep.dir, or delete this one",
            )


def find_finished(sweep_dir: Path, config: RunConfig) -> Path | None:
    """The folder of a finished job with an equal configuration; `config` is resolved."""
    for summary in sorted(sweep_dir.glob("*/summary.json"), key=_job_number):
        folder = summary.parent
        if _summary(folder).get("status") == "ok" and _recorded(folder) == _identity(config):
            return folder
    return None


def take_over(source: Path, run_dir: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Give `run_dir` the results of the equal job in `source`; its summary says whose they are."""
    if source.resolve() == run_dir.resolve():
        log.info("%s is finished: not run again", run_dir)
        return _summary(run_dir)
    log.info("%s equals the finished job %s, whose results it takes", run_dir, source.name)
    shutil.copytree(source, run_dir, dirs_exist_ok=True, ignore=shutil.ignore_patterns("wandb"))
    (run_dir / "overrides.yaml").write_text(OmegaConf.to_yaml(list(overrides)), encoding="utf-8")
    summary = _summary(source) | {"reused_from": source.name}
    text = json.dumps(summary, indent=2, ensure_ascii=False)
    (run_dir / "summary.json").write_text(text + "\n", encoding="utf-8")
    return summary


def group_name(sweep_dir: Path) -> str:
    """What trackers file a sweep under: the end of its path, by default its date and time."""
    return "/".join(sweep_dir.resolve().parts[-2:])


def _identity(config: RunConfig) -> dict[str, Any]:
    plain = to_dict(config)
    del plain["tracker"]
    return plain


def _resolved(config: RunConfig) -> dict[str, Any]:
    resolved = copy.deepcopy(config)
    resolve(resolved)
    return _identity(resolved)


def _recorded(folder: Path) -> dict[str, Any] | None:
    """The configuration a job's folder records; None where there is none that can be read."""
    path = folder / "config.yaml"
    if not path.is_file():
        return None
    plain = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    if not isinstance(plain, dict):
        return None
    return {str(key): value for key, value in plain.items() if key != "tracker"}


def _summary(folder: Path) -> dict[str, Any]:
    try:
        loaded = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except ValueError:  # cut off while being written
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _job_number(summary: Path) -> tuple[int, str]:
    name = summary.parent.name
    return (int(name) if name.isdigit() else 10**9, name)

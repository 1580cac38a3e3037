"""Composition of overrides into checked jobs. No job runs here.

A whole sweep is composed before its first job runs, so that a wrong configuration costs nothing.
Every job is composed once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra import compose, initialize_config_module
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from hydraspec.cli.folders import RUN_DIR, SWEEP_DIR
from hydraspec.cli.hydra_keys import check_launcher, check_output_subdir
from hydraspec.cli.overrides import (
    check_keys,
    for_hydra,
    leaves,
    parse,
    search_places,
    values_of,
    with_method,
)
from hydraspec.cli.translate import translated
from hydraspec.config import RunConfig, to_run_config
from hydraspec.config.benches import uncached
from hydraspec.config.build import NAME, check_own_key
from hydraspec.config.choices import SEARCH_PATH, choices_of, name_of
from hydraspec.config.messages import listing, meant_choice, refusal
from hydraspec.config.names import run_name
from hydraspec.config.vllm import is_vllm_key
from hydraspec.errors import ConfigurationError, NoDrafterError

CONFIG_MODULE = "hydraspec.conf"
CONFIG_NAME = "config"


@dataclasses.dataclass(slots=True, kw_only=True)
class Job:
    """A run or benchmark, composed and checked, with everything that it needs.

    Attributes:
        config: the configuration that runs.
        overrides: the overrides typed for this job, which are recorded with the run; of Hydra's own
            keys only hydra.searchpath.
        folder: the folder of its results.
        number: its place in a sweep, counted from 0; None for a single run.
        sweep: the folder of its sweep, whose finished jobs it may equal; None for a single run.
        composed: the configuration with Hydra's part: logging, working directory, environment.
    """

    config: RunConfig
    overrides: list[str]
    folder: Path
    number: int | None = None
    sweep: Path | None = None
    composed: DictConfig


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Skipped:
    """A job of a sweep that is left out: its target names no drafter for its method."""

    number: int
    overrides: list[str]
    error: NoDrafterError


@dataclasses.dataclass(slots=True, kw_only=True)
class Plan:
    """The jobs of a command line: one, or those of a sweep.

    Attributes:
        skipped: jobs of a sweep that cannot run, which keep their numbers.
        folder: the folder of the run, or of the sweep.
        is_named: whether the folder's name was typed; by default it is the time of day, to the
            second.
        composed: the configuration of the run, or of the sweep without the keys that it varies.
    """

    jobs: list[Job]
    skipped: list[Skipped]
    folder: Path
    is_named: bool
    is_sweep: bool
    composed: DictConfig

    def move_to(self, folder: Path) -> None:
        """Set `folder` as the place of all results; folders of jobs in it become absolute paths."""
        before, after = self.folder.absolute(), folder.absolute()
        for job in self.jobs:
            if (place := job.folder.absolute()).is_relative_to(before):
                job.folder = after / place.relative_to(before)
            job.sweep = after if self.is_sweep else None
        self.folder = folder


def plan(
    overrides: Sequence[str], *, multirun: bool = False, config_name: str = CONFIG_NAME
) -> Plan:
    """Compose and check every job of a command line.

    Args:
        multirun: whether to compose a sweep, as with -m.
        config_name: the primary configuration, as with --config-name.

    Raises:
        ConfigurationError: for the first job that cannot work.
    """
    search_places(overrides)
    typed = parse(with_method(overrides))
    with translated(), initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        check_keys(typed)
        # Hydra's own keys are kept even with several values, which Hydra then refuses.
        once = [o for o in typed if o.is_hydra_override() or not o.is_sweep_override()]
        composed = _compose(config_name, once)
        hydra = composed.hydra
        check_output_subdir(hydra.output_subdir)
        is_sweep = multirun or hydra.mode == RunMode.MULTIRUN
        check_launcher(composed, is_sweep=is_sweep)
        skipped: list[Skipped] = []
        if is_sweep:
            key, folder = SWEEP_DIR, hydra.sweep.dir
            found = list(_jobs_of_sweep(composed, typed))
            jobs = [job for job in found if isinstance(job, Job)]
            skipped = [job for job in found if isinstance(job, Skipped)]
            if not jobs:
                raise skipped[0].error
        else:
            for override in typed:
                _refuse_sweep(override)
            key, folder = RUN_DIR, hydra.run.dir
            jobs = [_job(composed, typed, Path(folder))]
        named = {leaf for override in typed for leaf, _ in leaves(override)}
        return Plan(
            jobs=jobs,
            skipped=skipped,
            folder=Path(folder),
            is_named=key in named,
            is_sweep=is_sweep,
            composed=composed,
        )


def _jobs_of_sweep(sweep: DictConfig, typed: Sequence[Override]) -> Iterator[Job | Skipped]:
    """The jobs of every combination of the values typed or in hydra.sweeper.params. A key that
    occurs twice has its last values, as with Hydra's own sweeper."""
    params = sweep.hydra.sweeper.params or {}
    swept = parse([f"{key}={value}" for key, value in params.items()])
    values = {override.get_key_element(): values_of(override) for override in [*swept, *typed]}
    for number, lines in enumerate(itertools.product(*values.values())):
        overrides = parse(lines)
        composed = _compose(sweep.hydra.job.config_name, overrides)
        OmegaConf.copy_cache(from_config=sweep, to_config=composed)  # one ${now:…} for all jobs
        with open_dict(composed):
            composed.hydra.job.num = composed.hydra.job.id = number
        folder = Path(sweep.hydra.sweep.dir) / str(composed.hydra.sweep.subdir)
        try:
            job = _job(composed, overrides, folder)
        except NoDrafterError as error:
            yield Skipped(number=number, overrides=_recorded(overrides), error=error)
            continue
        job.number = number
        if job.config.tracker.name == "wandb":
            differing = [
                line for line, of_key in zip(lines, values.values(), strict=True) if len(of_key) > 1
            ]
            job.config.tracker.name = run_name(job.config, differing) or "wandb"
        yield job


def _compose(config_name: str, overrides: Sequence[Override]) -> DictConfig:
    """Compose the configuration, with Hydra's part; `_check_names` checks names of choices."""
    lines = [for_hydra(o) for o in overrides if not _is_name(o.key_or_group)]
    return compose(config_name, lines, return_hydra_config=True)


def _job(composed: DictConfig, overrides: Sequence[Override], folder: Path) -> Job:
    _check_names(composed, overrides)
    ours = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    config = to_run_config(ours)
    for key, value in (leaf for typed in overrides for leaf in leaves(typed)):
        if is_vllm_key(key):  # refused even with the default value
            check_own_key(config, key, value)
    if ours.engine.get("prefix_caching"):
        config.warnings += uncached(config, {o.key_or_group for o in overrides})
    return Job(config=config, overrides=_recorded(overrides), folder=folder, composed=composed)


def _recorded(overrides: Sequence[Override]) -> list[str]:
    return [
        override.input_line or ""
        for override in overrides
        if override.key_or_group == SEARCH_PATH or not override.is_hydra_override()
    ]


def _check_names(composed: DictConfig, overrides: Sequence[Override]) -> None:
    """Refuse a typed `<group>.name` that differs from the name of the chosen choice."""
    for key, value in (leaf for typed in overrides for leaf in leaves(typed)):
        if not _is_name(key):
            continue
        group = key.partition(".")[0]
        chosen = name_of(group, str(composed.hydra.runtime.choices.get(group)))
        if chosen is not None and value != chosen:
            known = choices_of(group)
            meant = value if value in known else meant_choice(str(value), known)
            raise refusal(
                key,
                value,
                f"is not the name of {group}={chosen}",
                allowed=f"{chosen}; choices of {group} are {listing(known)}",
                remedy=f"choose {group}={meant or '<choice>'}, or leave the key out",
            )


def _is_name(key: str) -> bool:
    group, _, rest = key.partition(".")
    return rest == NAME and group != "tracker" and bool(choices_of(group))


def _refuse_sweep(override: Override) -> None:
    if override.is_sweep_override():
        line = override.input_line
        raise ConfigurationError(
            f"{line}: several values for one run\n"
            "  allowed: one value, or a sweep\n"
            f"  to do: for a sweep add -m; for a list write '{override.get_key_element()}=[…]'"
        )

"""Overrides → checked jobs. Nothing runs here.

A whole sweep is composed before its first job runs, so that a wrong configuration costs nothing.
Every job is composed once; errors of Hydra and OmegaConf are reported in the form of our own.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from hydraspec.cli.hydra_keys import check_hydra_key, check_output_subdir
from hydraspec.config import RunConfig, to_run_config
from hydraspec.config.build import NAME, check_key
from hydraspec.config.choices import (
    SEARCH_PATH,
    choices_of,
    choices_with,
    name_of,
    packaged_drafters,
    search,
)
from hydraspec.config.messages import listing, nearest, refusal
from hydraspec.config.schema import AUTO
from hydraspec.errors import ConfigurationError

CONFIG_MODULE = "hydraspec.conf"
CONFIG_NAME = "config"
DEFAULT_METHOD = "gemma4_mtp"  # as in conf/config.yaml
EXPERIMENT = "experiment"
MISSING_KEY = re.compile(r"Could not override '.*?'\.\s+To append .* use \+(.*?)=(.*)", re.DOTALL)


@dataclasses.dataclass(slots=True, kw_only=True)
class Job:
    """One run or benchmark, composed and checked, with everything it needs.

    Attributes:
        config: what runs.
        overrides: what was typed for this job, Hydra's own keys left out; recorded with the run.
        folder: where its results go.
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


@dataclasses.dataclass(slots=True, kw_only=True)
class Plan:
    """The jobs of a command line: one, or those of a sweep.

    Attributes:
        folder: the run's, or the sweep's.
        composed: the configuration of a sweep without what it varies; of a run, the run's.
    """

    jobs: list[Job]
    folder: Path
    is_sweep: bool
    composed: DictConfig

    def move_to(self, folder: Path) -> None:
        """Put all results below `folder`; those of jobs get absolute paths."""
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
        multirun: a sweep, as with -m.
        config_name: the primary configuration, as with --config-name.

    Raises:
        ConfigurationError: for the first job that cannot work.
    """
    search_places(overrides)
    typed = parse(with_method(overrides))
    with _messages(), initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        check_keys(typed)
        # Hydra's own keys even if they have several values, which Hydra then refuses.
        once = [o for o in typed if o.is_hydra_override() or not o.is_sweep_override()]
        composed = _compose(config_name, once)
        hydra = composed.hydra
        check_output_subdir(hydra.output_subdir)
        if multirun or hydra.mode == RunMode.MULTIRUN:
            jobs, folder = list(_jobs_of_sweep(composed, typed)), Path(hydra.sweep.dir)
            return Plan(jobs=jobs, folder=folder, is_sweep=True, composed=composed)
        for override in typed:
            _refuse_sweep(override)
        job = _job(composed, typed, Path(hydra.run.dir))
        return Plan(jobs=[job], folder=job.folder, is_sweep=False, composed=composed)


def search_places(overrides: Sequence[str]) -> None:
    """Take choices from the folders that hydra.searchpath names, and from no earlier command's.

    Raises:
        ConfigurationError: as `choices.search`.
    """
    typed = [override for override in parse(overrides) if override.key_or_group == SEARCH_PATH]
    if len(typed) > 1:
        raise ConfigurationError(
            f"{SEARCH_PATH}: given twice (--config-dir is its short form)\n"
            f"  allowed: one list of folders\n  to do: write '{SEARCH_PATH}=[…, …]'"
        )
    places = typed[0].value() if typed and not typed[0].is_sweep_override() else None
    search([str(place) for place in places] if isinstance(places, list) else [])


def search_override(places: Sequence[str]) -> str:
    """Places with further choices as an override, which every composition of the run then reads."""
    escaped = (place.replace("\\", "\\\\").replace("'", "\\'") for place in places)
    quoted = ",".join(f"'{place}'" for place in escaped)
    return f"{SEARCH_PATH}=[{quoted}]"


def with_config_dir(folder: str | None, overrides: Sequence[str]) -> list[str]:
    """`overrides`, after `--config-dir FOLDER` as an override."""
    if folder is None:
        return list(overrides)
    return [search_override([f"file://{Path(folder).expanduser().absolute()}"]), *overrides]


def _jobs_of_sweep(sweep: DictConfig, typed: Sequence[Override]) -> Iterator[Job]:
    """Every combination of the values typed or in hydra.sweeper.params. A key that occurs twice has
    its last values, as with Hydra's own sweeper."""
    params = sweep.hydra.sweeper.params or {}
    swept = parse([f"{key}={value}" for key, value in params.items()])
    values = {override.get_key_element(): _values_of(override) for override in [*swept, *typed]}
    for number, lines in enumerate(itertools.product(*values.values())):
        overrides = parse(lines)
        composed = _compose(sweep.hydra.job.config_name, overrides)
        OmegaConf.copy_cache(from_config=sweep, to_config=composed)  # one ${now:…} for all jobs
        with open_dict(composed):
            composed.hydra.job.num = composed.hydra.job.id = number
        folder = Path(sweep.hydra.sweep.dir) / str(composed.hydra.sweep.subdir)
        job = _job(composed, overrides, folder)
        job.number = number
        yield job


def _compose(config_name: str, overrides: Sequence[Override]) -> DictConfig:
    """The configuration with Hydra's part. Names of choices are left to `_check_names`."""
    lines = [o.input_line or "" for o in overrides if not _is_name(o.key_or_group)]
    return compose(config_name, lines, return_hydra_config=True)


def _job(composed: DictConfig, overrides: Sequence[Override], folder: Path) -> Job:
    _check_names(composed, overrides)
    ours = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    typed = [o.input_line or "" for o in overrides if _is_recorded(o)]
    return Job(config=to_run_config(ours), overrides=typed, folder=folder, composed=composed)


def _is_recorded(override: Override) -> bool:
    return override.key_or_group == SEARCH_PATH or not override.is_hydra_override()


def _check_names(composed: DictConfig, overrides: Sequence[Override]) -> None:
    """Refuse a typed name that is not its choice's: names may only be repeated."""
    for key, value in (leaf for override in overrides for leaf in _leaves(override)):
        if not _is_name(key):
            continue
        group = key.partition(".")[0]
        chosen = name_of(group, str(composed.hydra.runtime.choices.get(group)))
        if chosen is not None and value != chosen:
            known = choices_of(group)
            meant = value if value in known else nearest(str(value), known)
            raise refusal(
                key,
                value,
                f"is not the name of {group}={chosen}",
                allowed=f"{chosen}; choices of {group} are {listing(known)}",
                remedy=f"choose {group}={meant or '<choice>'}, or leave the key out",
            )


def _is_name(key: str) -> bool:
    group, _, rest = key.partition(".")
    return rest == NAME and bool(choices_of(group))


def with_method(overrides: Sequence[str]) -> list[str]:
    """`overrides`, and `method=auto` where what is given says more of the method than the default.

    That is a drafter's folder (method.checkpoint), a folder that may be one (target.checkpoint), or
    a target without a drafter for the default method; among several targets one such is enough, as
    `auto` is decided for each job. Who chooses a method, or an experiment, which may choose one,
    keeps the choice. `experiment=null` becomes `experiment=[]`, as which Hydra knows it.
    """
    overrides = [_without_null(typed) for typed in parse(overrides)]
    parsed = parse(overrides)
    if {"method", "method.name", EXPERIMENT} & {override.key_or_group for override in parsed}:
        return overrides
    with _messages():
        if any(_says_the_method(override) for override in parsed):
            return [*overrides, f"method={AUTO}"]
    return overrides


def _without_null(override: Override) -> str:
    if override.key_or_group != EXPERIMENT or override.is_delete():
        return override.input_line or ""
    values = [line.partition("=")[2] for line in _values_of(override)]
    chosen = ["[]" if value == "null" else value for value in values]
    return f"{override.get_key_element()}={','.join(chosen)}"


def _says_the_method(override: Override) -> bool:
    key = override.key_or_group
    if override.is_delete() or key not in ("method.checkpoint", "target.checkpoint", "target"):
        return False
    if key != "target":
        return override.is_sweep_override() or override.value() is not None
    swept = override.is_sweep_override()
    names = override.sweep_string_iterator() if swept else [str(override.value())]
    return any(
        name in choices_of("target") and DEFAULT_METHOD not in packaged_drafters(name)
        for name in names
    )


def _values_of(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [override.input_line or ""]
    key = override.get_key_element()
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def parse(overrides: Sequence[str]) -> list[Override]:
    """Typed overrides in Hydra's terms. Raises ConfigurationError for one that cannot be read."""
    parser = OverridesParser.create()
    parsed = []
    for line in overrides:
        try:
            parsed.extend(parser.parse_overrides([line]))
        except HydraException as error:
            raise _unreadable(line) from error
    return parsed


def _unreadable(line: str) -> ConfigurationError:
    remedy = "write key=value"
    if "=" in line:
        key, value = line.split("=", 1)
        remedy = f"quote a value with special characters, e.g. \"{key}='{value}'\""
    elif line.startswith("-"):
        remedy = "see the flags with --help"
    return ConfigurationError(
        f"{line}: cannot be read\n  allowed: group=choice, key=value\n  to do: {remedy}"
    )


def check_keys(overrides: Sequence[Override]) -> None:
    """Refuse keys that there are not, and those of Hydra's that name code.

    Raises:
        ConfigurationError: for the first.
    """
    for override in overrides:
        for typed in parse(_values_of(override)):
            _check_override_key(typed)


def _check_override_key(override: Override) -> None:
    key = override.key_or_group
    if override.is_hydra_override() or key.startswith("hydra/"):
        for leaf, value in _leaves(override):
            check_hydra_key(leaf, value)
        return
    if choices_of(key) and override.value() is None and not override.is_delete():
        known = listing(choices_of(key))
        raise refusal(key, None, "leaves the group empty", allowed=known)
    for leaf, value in _leaves(override):
        if not choices_of(leaf):
            check_key(leaf, value)


def _leaves(override: Override) -> Iterator[tuple[str, object]]:
    """The dotted keys that are typed, with their values; a sweep's are left out."""
    if not override.is_sweep_override():
        yield from _flat(override.key_or_group, override.value())


def _flat(key: str, value: object) -> Iterator[tuple[str, object]]:
    if not isinstance(value, dict):
        yield key, value
        return
    for name, inner in value.items():
        yield from _flat(f"{key}.{name}", inner)


def _refuse_sweep(override: Override) -> None:
    if override.is_sweep_override():
        line = override.input_line
        raise ConfigurationError(
            f"{line}: several values for one run\n"
            "  allowed: one value, or a sweep\n"
            f"  to do: for a sweep add -m; for a list write '{override.get_key_element()}=[…]'"
        )


@contextmanager
def _messages() -> Iterator[None]:
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise translate(error) from error


def translate(error: Exception) -> ConfigurationError:
    """Hydra's refusal in our words: key, what is allowed, what to do."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_choice(error)
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override)
    missing = MISSING_KEY.match(str(error))
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key = getattr(cause, "full_key", None)
    first = str(error).splitlines()[0]
    if not key:
        return ConfigurationError(
            f"{first}\n  allowed: group=choice, key=value, each once\n"
            "  to do: see groups and keys with --help"
        )
    parent, _, name = str(key).rpartition(".")
    node = getattr(cause, "parent_node", None)
    allowed = [str(known) for known in node] if isinstance(node, DictConfig) else []
    if missing and isinstance(node, DictConfig):
        return _missing_key(missing[1], missing[2], parent, node)
    meant = nearest(name, allowed)
    lines = [f"{key}: {first}"]
    if allowed:
        lines.append(f"  allowed: keys of {parent or 'the configuration'} are {listing(allowed)}")
    lines.append(f"  to do: did you mean {parent}.{meant}?" if meant else "  to do: leave it out")
    return ConfigurationError("\n".join(lines))


def _missing_key(key: str, value: str, parent: str, node: DictConfig) -> ConfigurationError:
    """The refusal of a key that the choice of its group lacks."""
    group, known = key.partition(".")[0], [str(name) for name in node if name != NAME]
    where = parent or "the configuration"
    if choices_of(group):
        where = f"{group}={node._get_root()[group][NAME]}"
    meant = nearest(key.removeprefix(f"{parent}."), known)
    remedy = f"did you mean {parent}.{meant}?" if meant else "leave it out"
    others = choices_with(key)
    if others and where not in others:
        remedy = f"choose {' or '.join(others)}, or leave it out"
    allowed = f"keys of {parent} are {listing(known)}" if known else f"{where} has no keys"
    return refusal(key, value, f"is no key of {where}", allowed=allowed, remedy=remedy)


def _unknown_choice(error: MissingConfigException) -> ConfigurationError:
    group, _, choice = str(error.missing_cfg_file).rpartition("/")
    if not group:
        return ConfigurationError(str(error).splitlines()[0])
    options = list(error.options or ())
    meant = nearest(choice, options)
    remedy = f"did you mean {group}={meant}?" if meant else f"choose {group}=<choice> from these"
    return ConfigurationError(
        f"{group}={choice} is no choice\n  allowed: {listing(options)}\n  to do: {remedy}"
    )

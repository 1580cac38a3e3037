"""Overrides as typed: parsed, completed, and checked before anything is composed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException

from hydraspec.cli.hydra_keys import check_hydra_key
from hydraspec.cli.translate import translated
from hydraspec.config.build import check_key, in_mapping
from hydraspec.config.choices import SEARCH_PATH, choices_of, packaged_drafters, search
from hydraspec.config.messages import listing, refusal, show
from hydraspec.config.rules import did_you_mean
from hydraspec.config.schema import AUTO
from hydraspec.config.vllm import is_vllm_key
from hydraspec.errors import ConfigurationError

DEFAULT_METHOD = "gemma4_mtp"  # as in conf/config.yaml
EXPERIMENT = "experiment"


def with_method(overrides: Sequence[str]) -> list[str]:
    """The overrides, with `method=auto` added if the default method does not fit them.

    It does not fit a drafter's folder (method.checkpoint), a folder that may be a drafter's
    (target.checkpoint), or a target without a drafter for the default method; one such target of
    several is enough, as `auto` is decided for each job. Nothing is added to overrides that choose
    a method, or an experiment, which may choose a method. `experiment=null` becomes
    `experiment=[]`, its form in Hydra's grammar.
    """
    overrides = [_without_null(typed) for typed in parse(overrides)]
    parsed = parse(overrides)
    if {"method", "method.name", EXPERIMENT} & {override.key_or_group for override in parsed}:
        return overrides
    with translated():
        if any(_says_the_method(override) for override in parsed):
            return [*overrides, f"method={AUTO}"]
    return overrides


def _without_null(override: Override) -> str:
    if override.key_or_group != EXPERIMENT or override.is_delete():
        return override.input_line or ""
    values = [line.partition("=")[2] for line in values_of(override)]
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


def values_of(override: Override) -> list[str]:
    """Lines of an override, one for each of its values."""
    if not override.is_sweep_override():
        return [override.input_line or ""]
    key = override.get_key_element()
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def parse(overrides: Sequence[str]) -> list[Override]:
    """Overrides parsed by Hydra's grammar.

    Raises:
        ConfigurationError: for the first override that cannot be read.
    """
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


def for_hydra(override: Override) -> str:
    """The override as typed, with "++" for a key in a mapping, or one that a benchmark passes on to
    vLLM: else Hydra refuses what the chosen YAML lacks."""
    line, key = override.input_line or "", override.key_or_group
    is_plain = override.type is OverrideType.CHANGE
    return f"++{line}" if is_plain and (in_mapping(key) or is_vllm_key(key)) else line


def check_keys(overrides: Sequence[Override]) -> None:
    """Refuse unknown keys, choices that are no names, and overrides of Hydra's keys that name code.

    Raises:
        ConfigurationError: for the first such override.
    """
    for override in (single for typed in overrides for single in parse(values_of(typed))):
        key, value = override.key_or_group, override.value()
        is_hydras = override.is_hydra_override() or key.startswith("hydra/")
        known = () if is_hydras else choices_of(key)
        if known and not isinstance(value, str | list | dict) and not override.is_delete():
            problem = "leaves the group empty" if value is None else "is no choice"
            remedy = did_you_mean(key, "none" if value is False else show(value), known)
            raise refusal(key, value, problem, allowed=listing(known), remedy=remedy)
        for leaf, inner in leaves(override):
            if is_hydras:
                check_hydra_key(leaf, inner)
            elif not choices_of(leaf):
                check_key(leaf, inner)


def leaves(override: Override) -> Iterator[tuple[str, object]]:
    """Dotted keys with the values typed for them; none for an override with several values."""
    if not override.is_sweep_override():
        yield from _flat(override.key_or_group, override.value())


def _flat(key: str, value: object) -> Iterator[tuple[str, object]]:
    if not isinstance(value, dict):
        yield key, value
        return
    for name, inner in value.items():
        yield from _flat(f"{key}.{name}", inner)


def search_places(overrides: Sequence[str]) -> None:
    """Search the folders that hydra.searchpath names for choices, instead of those of an earlier
    command.

    Raises:
        ConfigurationError: the key is given twice, or `choices.search` raises it.
    """
    typed = [override for override in parse(overrides) if override.key_or_group == SEARCH_PATH]
    if len(typed) > 1:
        raise ConfigurationError(
            f"{SEARCH_PATH}: given twice (--config-dir is its short form)\n"
            f"  allowed: one list of folders\n  to do: write '{SEARCH_PATH}=[…, …]'"
        )
    places = typed[0].value() if typed and not typed[0].is_sweep_override() else None
    search([str(place) for place in places] if isinstance(places, list) else [])


def with_config_dir(folder: str | None, overrides: Sequence[str]) -> list[str]:
    """The overrides, preceded by one of hydra.searchpath with the folder, unless that is None."""
    if folder is None:
        return list(overrides)
    place = f"file://{Path(folder).expanduser().absolute()}"
    escaped = place.replace("\\", "\\\\").replace("'", "\\'")
    return [f"{SEARCH_PATH}=['{escaped}']", *overrides]

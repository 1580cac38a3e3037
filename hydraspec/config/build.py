"""Conversion of a DictConfig into a RunConfig, with checks of keys and types.

Ranges and combinations are checked in checks.py; derive.py fills in defaults that depend on other
keys. Types are checked here and not by OmegaConf's structured configs, which convert instead of
refusing: they take baseline=1 for true, 7 for text and "3" for a number.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Sequence
from enum import Enum
from operator import attrgetter
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hydraspec import plugins
from hydraspec.config.benches import is_bench, not_passed_on
from hydraspec.config.checks import check, check_names
from hydraspec.config.choices import choices_of, has_key, keys_in, no_key
from hydraspec.config.derive import derive
from hydraspec.config.messages import listing, meant_choice, nearest, refusal, show
from hydraspec.config.options import NoOptions, check_options, is_option, options_of
from hydraspec.config.schema import BenchConfig, EngineConfig, RunConfig, WorkloadConfig
from hydraspec.config.vllm import is_vllm_key, runs_vllm
from hydraspec.errors import ConfigurationError, UserError

MISSING = "???"
OPTIONS = "options"  # key with a method's own options; left out if the method has none
NAME = "name"  # key of every group: the name of its choice
HIDDEN = {"of_choices", "of_method"}  # fields that lists of allowed keys leave out
NO_KEYS = {  # words that others have as keys, and why they are none here
    "_target_": "classes are chosen by name, never by _target_",
    "quantization": "the checkpoint says how its weights are held; targets in FP8 and in four bits "
    "are choices of target, such as gemma4_31b_fp8",
}
WITH_OWN_KEYS = {  # groups whose choices differ in their keys
    "engine": EngineConfig(name=""),
    "workload": WorkloadConfig(name=""),
    "bench": BenchConfig(name=""),
}
WORDS = {  # types in messages
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a group of keys",
    type(None): "empty",
}
MEANINGS = {  # descriptions of keys for which "text" would not help
    "target.checkpoint": "a folder, a hub id, or zoo:<name>",
    "workload.path": "a file of JSON lines",
}
PLACEHOLDERS = {"target.checkpoint": "folder or hub id", "workload.path": "file"}


def to_run_config(cfg: DictConfig) -> RunConfig:
    """The checked configuration of one run.

    Raises:
        ConfigurationError: for unknown or missing keys, wrong types, values out of range and
            combinations that cannot work; it names key, value, what is allowed and what to do.
    """
    try:
        values = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        key = error.full_key or "configuration"
        raise ConfigurationError(
            f"{key}: {reason}\n  allowed: a value, or ${{key}} with a key that there is\n"
            f"  to do: give {key} a value of its own"
        ) from error
    config: RunConfig = _build(RunConfig, values, "")
    check_names(config)
    for group, default in WITH_OWN_KEYS.items():
        _check_own_keys(config, group, default)
    derive(config)
    check(config)
    return config


def _check_own_keys(config: RunConfig, group: str, default: object) -> None:
    """Refuse the first key of a group that its choice lacks, unless the key has its default, or is
    one for vLLM that an experiment gives to another engine's part of a benchmark too."""
    is_part = is_bench(config) and not config.bench.isolate
    for key in schema_keys(type(default), group):
        value = attrgetter(key)(config)
        is_for_other = is_part and is_vllm_key(key)
        if value != attrgetter(key.partition(".")[2])(default) and not is_for_other:
            check_own_key(config, key, getattr(value, "value", value))  # plain value of an Enum


def check_own_key(config: RunConfig, key: str, value: object) -> None:
    """Raise ConfigurationError for a key that its group's choice lacks, or a key of engine.vllm
    where no vLLM runs."""
    group = key.partition(".")[0]
    name = getattr(config, group).name
    if runs_vllm(config) if is_vllm_key(key) else has_key(name, key):
        return
    if is_vllm_key(key) and is_bench(config):
        raise not_passed_on(config, key, value)
    parent = key.rpartition(".")[0]
    while not (known := keys_in(name, parent)) and parent != group:
        parent = parent.rpartition(".")[0]
    raise no_key(key, value, f"{group}={name}", parent, set(known) - {NAME})


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain YAML and JSON values; derived fields are left out."""
    plain = _plain(config)
    assert isinstance(plain, dict)
    return plain


def from_dict(plain: dict[str, Any], warnings: Sequence[str]) -> RunConfig:
    """The configuration that `to_dict` made plain, with its warnings. Ranges and combinations were
    checked before, and are not checked again."""
    config: RunConfig = _build(RunConfig, plain, "")
    config.warnings.extend(warnings)
    return config


def keys_of(schema: type) -> dict[str, Any]:
    """Types, by name, of the fields of a dataclass that YAML may hold: all but the derived ones."""
    hints = typing.get_type_hints(schema)
    fields = dataclasses.fields(schema)
    return {field.name: hints[field.name] for field in fields if not field.metadata.get("derived")}


def typed_keys(schema: type) -> list[str]:
    """Names of the fields that messages offer: all but the name of the choice, and the fields that
    are marked OF_CHOICES or OF_METHOD."""
    hidden = {f.name for f in dataclasses.fields(schema) if f.metadata.keys() & HIDDEN} | {NAME}
    return [name for name in keys_of(schema) if name not in hidden]


def check_key(path: str, value: object) -> None:
    """Raise ConfigurationError for an unknown dotted key. Hydra's own message would recommend to
    add the key with `+`."""
    schema: Any = RunConfig
    seen: list[str] = []
    for part in path.split("."):
        if schema is Any:  # options: their keys are known once the method is
            return
        if not dataclasses.is_dataclass(schema):
            if _is_mapping(schema):
                return
            own = ".".join(seen)
            allowed, remedy = f"{own} is a value itself", f"write {own}=<value>"
            raise refusal(path, value, "is no key", allowed=allowed, remedy=remedy)
        group = typing.cast(type, schema)
        known = keys_of(group)
        if part not in known or _of_choices(group, part):
            raise _unknown_key(path, part, value, ".".join(seen), group)
        seen.append(part)
        schema = known[part]


def in_mapping(path: str) -> bool:
    """Returns whether a dotted key is a mapping with arbitrary names, or is in such a mapping."""
    schema: Any = RunConfig
    for part in path.split("."):
        if not dataclasses.is_dataclass(schema):
            break
        schema = keys_of(typing.cast(type, schema)).get(part)
    return _is_mapping(schema)


def _is_mapping(kind: Any) -> bool:
    """Returns whether values of a type are mappings, or may be."""
    kinds = kind.__args__ if isinstance(kind, types.UnionType) else (kind,)
    return any(typing.get_origin(each) is dict for each in kinds)


def _of_choices(schema: type, name: str) -> bool:
    return any(f.name == name and f.metadata.get("of_choices") for f in dataclasses.fields(schema))


def _unknown_key(
    path: str, part: str, value: object, parent: str, schema: type
) -> ConfigurationError:
    names = typed_keys(schema)
    names += [] if parent else ["experiment"]
    found = None if part in keys_of(schema) else nearest(part, names)
    prefix = f"{parent}." if parent else ""
    meant = [prefix + found] if found else []
    if path == prefix + part:  # a key without its group, or with one joined to it
        meant = list(_keys_named(part, schema, prefix)) or meant
        if not meant and parent in ("", "method") and is_option(part):
            meant = [f"method.{OPTIONS}.{part}"]
    typed = " or ".join(f"{key}={show(value)}" for key in meant)
    remedy = f"did you mean {typed}?" if meant else "remove it"
    if part in NO_KEYS:
        remedy = f"remove it: {NO_KEYS[part]}"
    if schema is NoOptions:
        remedy = (
            f'remove it, or install the package that declares the method in "{plugins.OPTIONS}" '
            "(again, after its entry points changed)"
        )
    where = f"keys of {parent}" if parent else "top-level keys"
    allowed = f"{where} are {listing(names)}" if names else f"{parent} has no keys"
    return refusal(path, value, "is no key", allowed=allowed, remedy=remedy)


def _keys_named(name: str, schema: type, parent: str) -> Iterator[str]:
    """Dotted keys below `parent` whose last words, joined by underscores, are `name`."""
    offered = typed_keys(schema)
    for key, kind in keys_of(schema).items():
        if dataclasses.is_dataclass(kind):
            yield from _keys_named(name, typing.cast(type, kind), f"{parent}{key}.")
        elif key in offered:
            words = f"{parent}{key}".split(".")
            if any("_".join(words[i:]) == name for i in range(len(words))):
                yield f"{parent}{key}"


def _build(schema: type, values: object, path: str) -> Any:
    known = keys_of(schema)
    if not isinstance(values, dict):
        raise _no_group(path, values, schema)
    for name, value in values.items():
        if name not in known:
            raise _unknown_key(_join(path, name), str(name), value, path, schema)
    fields = {field.name: field for field in dataclasses.fields(schema)}
    built = {}
    for name, kind in known.items():
        key = _join(path, name)
        value = values.get(name, MISSING)
        if fields[name].metadata.get("of_method"):
            built[name] = _build_options(values.get(NAME), values.get(name), key)
        elif name in values and value != MISSING:
            built[name] = _convert(kind, value, key)
        elif name in values or _required(fields[name]):
            raise _no_value(key, kind)
    return schema(**built)


def _no_value(key: str, kind: Any) -> ConfigurationError:
    is_listed = dataclasses.is_dataclass(kind) and choices_of(key)
    value = "one of these" if is_listed else PLACEHOLDERS.get(key, "value")
    return ConfigurationError(
        f"{key} has no value\n  allowed: {_values_of(key, kind)}\n  to do: add {key}=<{value}>",
        key=key,
    )


def _no_group(path: str, value: object, schema: type) -> ConfigurationError:
    keys = listing(keys_of(schema))
    allowed = f"a choice of {path}, with the keys {keys}"
    remedy = f"see the choices with --help, e.g. {path}=<choice>"
    if "." in path:
        allowed = f"its keys: {keys}"
        taking = [key for key, kind in keys_of(schema).items() if _takes(kind, value)]
        typed = " or ".join(f"{path}.{key}={show(value)}" for key in taking)
        remedy = f"did you mean {typed}?" if typed else f"set one of them, {path}.<key>=<value>"
    return refusal(path, value, "is not a group", allowed=allowed, remedy=remedy)


def _takes(kind: Any, value: object) -> bool:
    return (
        isinstance(kind, type) and issubclass(kind, Enum) and value in [each.value for each in kind]
    )


def _build_options(method: object, values: object, path: str) -> Any:
    schema = options_of(method)
    if schema is NoOptions and not values:
        return None
    try:
        options = _build(schema, {} if values is None else values, path)
    except UserError:
        raise
    except ValueError as error:  # from the dataclass's __post_init__
        allowed = f"keys of {path} are {listing(keys_of(schema))}"
        raise refusal(path, values, f"cannot be used: {error}", allowed=allowed) from error
    check_options(options)
    return options


def _values_of(key: str, kind: Any) -> str:
    if dataclasses.is_dataclass(kind):
        return listing(choices_of(key)) or _describe(kind)
    return MEANINGS.get(key, _describe(kind))


def _required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _convert(kind: Any, value: object, key: str) -> Any:
    declared = kind
    if kind is Any:
        return value
    if isinstance(kind, types.UnionType):
        first, *others = kind.__args__
        if type(value) in others:  # None, or text in place of a mapping
            return value
        for other in others:
            if issubclass(other, Enum) and value in [each.value for each in other]:
                return other(value)
        kind = first
    if dataclasses.is_dataclass(kind):
        return _build(typing.cast(type, kind), value, key)
    origin = typing.get_origin(kind)
    if origin is list and isinstance(value, list):
        (item,) = typing.get_args(kind)
        return [_convert(item, entry, f"{key}[{i}]") for i, entry in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        _, item = typing.get_args(kind)
        return {str(k): _convert(item, entry, _join(key, k)) for k, entry in value.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _to_choice(kind, value, key)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if origin is None and type(value) is kind:
        return value
    raise refusal(
        key,
        value,
        f"is {WORDS.get(type(value), type(value).__name__)}",
        allowed=_values_of(key, declared),
        remedy=_type_remedy(kind, value, key),
    )


def _to_choice(kind: type[Enum], value: object, key: str) -> Enum:
    choices = [str(choice.value) for choice in kind]
    if value not in choices:
        meant = meant_choice(str(value), choices)
        remedy = f"did you mean {key}={meant}?" if meant else "choose one of these"
        raise refusal(key, value, "is no choice", allowed=listing(choices), remedy=remedy)
    return kind(value)


def _type_remedy(kind: Any, value: object, key: str) -> str:
    if kind is str and isinstance(value, int | float):
        return f"quote it to make it text: '{key}=\"{value}\"'"
    if typing.get_origin(kind) is list:
        return f"write a list: '{key}=[…]'"
    return ""


def _describe(kind: Any) -> str:
    if isinstance(kind, types.UnionType):
        first, *others = kind.__args__
        words = ["null" if other is type(None) else _describe(other) for other in others]
        return f"{_describe(first)}, or {', '.join(words)}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return listing(str(choice.value) for choice in kind)
    if typing.get_origin(kind) is list:
        return f"a list, each entry {_describe(typing.get_args(kind)[0])}"
    if typing.get_origin(kind) is dict:
        return f"a mapping, each value {_describe(typing.get_args(kind)[1])}"
    return WORDS.get(kind, "a group of keys")


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = {name: getattr(value, name) for name in keys_of(type(value))}
        return {name: _plain(v) for name, v in given.items() if (name, v) != (OPTIONS, None)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def schema_keys(schema: type = RunConfig, path: str = "") -> Iterator[str]:
    """Every dotted key of `schema`, leaves only; method.options is left out, as its keys depend on
    the method."""
    for name, kind in keys_of(schema).items():
        if dataclasses.is_dataclass(kind):
            yield from schema_keys(typing.cast(type, kind), _join(path, name))
        elif kind is not Any:
            yield _join(path, name)

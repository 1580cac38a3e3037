"""Errors of Hydra and OmegaConf as ConfigurationError: key, value, what is allowed, what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass

from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from hydraspec.config.build import NAME, keys_of, typed_keys
from hydraspec.config.choices import added_choices, choices_of, no_key
from hydraspec.config.messages import listing
from hydraspec.config.rules import did_you_mean
from hydraspec.config.schema import RunConfig
from hydraspec.errors import ConfigurationError

# The only place where Hydra names the override that it refuses is its message.
MISSING_KEY = re.compile(r"Could not override '.*?'\.\s+To append .* use \+(.*?)=(.*)", re.DOTALL)


@contextmanager
def translated() -> Iterator[None]:
    """Context that raises errors of Hydra and OmegaConf as ConfigurationError."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise translate(error) from error


def translate(error: Exception) -> ConfigurationError:
    """An error of Hydra or OmegaConf as a ConfigurationError."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_choice(error)
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key, node = getattr(cause, "full_key", None), getattr(cause, "parent_node", None)
    missing = MISSING_KEY.match(str(error))
    if key and missing and isinstance(node, DictConfig):
        return _missing_key(missing[1], missing[2], str(key).rpartition(".")[0], node)
    problem = str(error).splitlines()[0]
    return ConfigurationError(
        f"{f'{key}: {problem}' if key else problem}\n"
        "  allowed: group=choice, key=value, each once\n"
        "  to do: see groups and keys with --help"
    )


def _missing_key(key: str, value: str, parent: str, node: DictConfig) -> ConfigurationError:
    """The error for a key that the choice of its group lacks."""
    group = key.partition(".")[0]
    hidden = {NAME, *_keys_of_choices(group)}
    known = [str(name) for name in node if name not in hidden]
    choice = f"{group}={node._get_root()[group][NAME]}" if choices_of(group) else parent
    return no_key(key, value, choice or "the configuration", parent, known)


def _keys_of_choices(group: str) -> set[str]:
    """Keys of a group that messages do not offer, as only its choices' YAML or the method give
    them."""
    schema = keys_of(RunConfig).get(group)
    if not isinstance(schema, type) or not is_dataclass(schema):
        return set()
    return set(keys_of(schema)) - set(typed_keys(schema))


def _unknown_choice(error: MissingConfigException) -> ConfigurationError:
    group, _, choice = str(error.missing_cfg_file).rpartition("/")
    if not group:
        return ConfigurationError(str(error).splitlines()[0])
    options = list(error.options or ())
    remedy = did_you_mean(group, choice, options, f"choose {group}=<choice> from these")
    if choice in added_choices(group):
        remedy = f"add --config-dir=<folder with {group}/{choice}.yaml>: a package offers {choice}"
    return ConfigurationError(
        f"{group}={choice} is no choice\n  allowed: {listing(options)}\n  to do: {remedy}"
    )

"""Hydra's composition of a selection of choices, made once in a process.

Of a command line, Hydra reads and merges the YAML of the chosen files, then sets the values typed
for single keys. The first part is the same for every command line that chooses the same files of
the two installed packages, which do not change while tests run: it takes two thirds of a
composition. Every file is read once, too. Places that a test adds (--config-dir) are read each
time, and errors are not remembered.

Every caller gets a copy, by pickle: OmegaConf's deepcopy takes four times as long.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import (
    CachingConfigRepository,
    ConfigRepository,
    IConfigRepository,
)
from hydra._internal.defaults_list import DefaultsList, Overrides

PACKAGES = {("pkg", "hydraspec.conf"), ("pkg", "hydra.conf"), ("structured", "")}

_create_list = config_loader_impl.create_defaults_list
_merge = ConfigLoaderImpl._compose_config_from_defaults_list
_load = ConfigRepository.load_config
_files: dict[str, bytes] = {}  # pickled
_lists: dict[Any, DefaultsList] = {}
_merged: dict[int, bytes] = {}  # pickled, by the list of an entry of `_lists`, which keeps it alive


def install() -> None:
    """Replace three steps of Hydra's loader by those that remember, and its copy of all sources of
    files, of which it changes the list alone."""
    CachingConfigRepository.__init__ = _shallow  # type: ignore
    ConfigRepository.load_config = _remembered_file  # type: ignore
    config_loader_impl.create_defaults_list = _remembered_list
    ConfigLoaderImpl._compose_config_from_defaults_list = _remembered_merge  # type: ignore


def _shallow(self: CachingConfigRepository, delegate: IConfigRepository) -> None:
    self.delegate, self.cache = copy.copy(delegate), {}


def _is_packaged(repo: Any) -> bool:
    """Returns whether only the two packages are searched for files."""
    return {(source.scheme(), source.path) for source in repo.get_sources()} <= PACKAGES


def _remembered_file(self: ConfigRepository, config_path: str) -> Any:
    if not _is_packaged(self):
        return _load(self, config_path)
    if config_path not in _files:
        _files[config_path] = pickle.dumps(_load(self, config_path), -1)
    return pickle.loads(_files[config_path])


def _remembered_list(
    repo: Any, config_name: str, overrides_list: Any, prepend_hydra: bool, skip_missing: bool
) -> DefaultsList:
    arguments = (repo, config_name, overrides_list, prepend_hydra, skip_missing)
    if not _is_packaged(repo):
        return _create_list(*arguments)
    typed = Overrides(repo=repo, overrides_list=overrides_list)
    chosen = (typed.override_choices, typed.append_group_defaults, typed.deletions)
    key = (config_name, prepend_hydra, skip_missing, repr(chosen))
    if key not in _lists:
        _lists[key] = _create_list(*arguments)
    known = _lists[key]
    return DefaultsList(
        defaults=known.defaults,
        defaults_tree=known.defaults_tree,
        config_overrides=typed.config_overrides,
        overrides=known.overrides,
    )


def _remembered_merge(self: ConfigLoaderImpl, defaults: Any, repo: Any) -> Any:
    if not any(known.defaults is defaults for known in _lists.values()):
        return _merge(self, defaults, repo)
    if id(defaults) not in _merged:
        _merged[id(defaults)] = pickle.dumps(_merge(self, defaults, repo), -1)
    return pickle.loads(_merged[id(defaults)])

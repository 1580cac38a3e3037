"""The config tree: the choices of each group, and the values in a choice's YAML.

The tree ships with the package; --config-dir and hydra.searchpath add further places.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hydraspec import plugins
from hydraspec.config.messages import listing, nearest, refusal
from hydraspec.errors import ConfigurationError
from hydraspec.shipped import SHAPES

SEARCH_PATH = "hydra.searchpath"  # Hydra's key; --config-dir is its short form

_places: tuple[str, ...] = ()  # searched after the package's own tree


def search(places: Sequence[str]) -> None:
    """Search these folders and "pkg://" packages for choices too, instead of those of an earlier
    call.

    Raises:
        ConfigurationError: a place does not exist, or two places have the same YAML file.
    """
    global _places
    if tuple(places) == _places:
        return
    roots = {place: _root(place) for place in places}
    taken: dict[str, str] = dict.fromkeys(_yaml_files(_own_root()), "the package")
    for place, root in roots.items():
        for file in _yaml_files(root):
            if file in taken:
                raise refusal(
                    SEARCH_PATH,
                    place,
                    f"holds {file}, which {taken[file]} has too",
                    allowed="YAML files with names of their own",
                    remedy=f"rename {place}/{file}",
                )
            taken[file] = place
    _places = tuple(roots)
    choices_of.cache_clear()
    packaged.cache_clear()


@cache
def choices_of(group: str) -> tuple[str, ...]:
    """Names that `group=<name>` takes, sorted; empty for a group that does not exist."""
    folders = (root.joinpath(group) for root in _roots())
    names = [entry.name for folder in folders if folder.is_dir() for entry in folder.iterdir()]
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def added_workload(name: str) -> EntryPoint | None:
    """Entry point of another package's function that yields the lines of a workload; None if no
    other package has the workload.

    Raises:
        ConfigurationError: another package has a workload with the name of one of HydraSpec's.
    """
    own = [place.name for place in _own_root().joinpath("workload").iterdir()]
    ours = dict.fromkeys((file.removesuffix(".yaml") for file in own), "")  # none is loaded here
    point = plugins.offered(plugins.WORKLOADS, ours).get(name)
    return None if point is None or point.dist is None else point


def packaged_value(group: str, choice: str, key: str) -> str | None:
    """A top-level text value of a choice's YAML; None without the choice or the value."""
    value = packaged(group, choice).get(key)
    return value if isinstance(value, str) and value != "???" else None


def added_choices(group: str) -> set[str]:
    """Names that other installed packages offer for a group, even if no YAML of them is found."""
    points = {"method": plugins.SPECULATORS, "workload": plugins.WORKLOADS}
    return plugins.added(points[group]) if group in points else set()


def name_of(group: str, choice: str) -> str | None:
    """The recorded name of a choice, for an alias that of the choice it stands for; None without
    one."""
    name = packaged_value(group, choice, "name")
    aliased = packaged(group, choice).get("defaults", [])
    return name or next((name_of(group, str(base)) for base in aliased), None)


def packaged_drafters(target: str) -> dict[str, str]:
    """The drafters that a target's YAML names, method → checkpoint, in the order of the YAML."""
    drafters = packaged("target", target).get("drafters")
    return dict(drafters) if isinstance(drafters, dict) else {}


def choices_with(key: str) -> list[str]:
    """The choices of a dotted key's group that have the key, as "group=name"."""
    group = key.partition(".")[0]
    return [f"{group}={name}" for name in choices_of(group) if has_key(name, key)]


def has_key(choice: str, key: str) -> bool:
    """Returns whether a choice has the dotted `key`, which begins with the choice's group."""
    parent, _, name = key.rpartition(".")
    return not parent or name in keys_in(choice, parent)


def keys_in(choice: str, parent: str) -> list[str]:
    """Names of the keys that a choice has under `parent`, a dotted key that begins with the
    choice's group."""
    group, *parts = parent.split(".")
    values: Any = spelt(group, choice)
    for part in parts:
        values = values.get(part) if isinstance(values, dict) else None
    return list(values) if isinstance(values, dict) else []


def spelt(group: str, choice: str) -> dict[Any, Any]:
    """Keys and values in a choice's YAML. Workloads of other packages are read as JSON lines, so
    they have the keys of workload=jsonl too."""
    is_ours = group != "workload" or _own_root().joinpath(group, f"{choice}.yaml").is_file()
    return ({} if is_ours else packaged(group, "jsonl")) | packaged(group, choice)


def no_key(
    key: str, value: object, choice: str, parent: str, known: Collection[str]
) -> ConfigurationError:
    """The error for a key that `choice` ("group=name") lacks; `known` are the keys that the choice
    has in `parent`."""
    meant = nearest(key.removeprefix(f"{parent}."), known)
    remedy = f"did you mean {parent}.{meant}?" if meant else "leave it out"
    others = choices_with(key)
    if others and choice not in others:
        remedy = f"choose {' or '.join(others)}, or leave it out"
    allowed = f"keys of {parent} are {listing(known)}" if known else f"{choice} has no keys"
    return refusal(key, value, f"is no key of {choice}", allowed=allowed, remedy=remedy)


@cache
def shipped_shapes() -> tuple[str, ...]:
    """Names that "shape:<name>" takes: folders with a config.json and no weights, sorted."""
    return tuple(sorted(config.parent.name for config in SHAPES.glob("*/config.json")))


@cache
def packaged(group: str, choice: str) -> dict[Any, Any]:
    """The contents of a choice's YAML, not to be modified; empty without the choice."""
    if choice not in choices_of(group):
        return {}
    places = (root.joinpath(group, f"{choice}.yaml") for root in _roots())
    text = next(place for place in places if place.is_file()).read_text(encoding="utf-8")
    loaded = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    return loaded if isinstance(loaded, dict) else {}


def _roots() -> tuple[Traversable, ...]:
    return (_own_root(), *map(_root, _places))


def _own_root() -> Traversable:
    return files("hydraspec.conf")


def _root(place: str) -> Traversable:
    """The folder of a place, which is written as in hydra.searchpath: a folder or a package."""
    scheme, _, rest = place.rpartition("://")
    with suppress(ImportError, TypeError, ValueError):  # no such package
        root = files(rest) if scheme == "pkg" else Path(rest).expanduser()
        if scheme in ("", "file", "pkg") and root.is_dir():
            return root
    raise refusal(
        SEARCH_PATH,
        place,
        "is no folder",
        allowed="a folder with conf's layout (target/, method/, …), or pkg://<package>",
        remedy=f"give one that exists, or leave --config-dir out (seen from {Path.cwd()})",
    )


def _yaml_files(root: Traversable) -> Iterator[str]:
    """Paths of the YAML files of a place, in the folders that the package's own tree has."""
    for group in ("", *_groups(_own_root(), "")):
        folder = root.joinpath(group)
        if folder.is_dir():
            found = (entry.name for entry in folder.iterdir() if entry.name.endswith(".yaml"))
            yield from (f"{group}{name}" for name in found)


def _groups(folder: Traversable, path: str) -> Iterator[str]:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.name.startswith("__"):
            yield f"{path}{entry.name}/"
            yield from _groups(entry, f"{path}{entry.name}/")

"""Additions of other installed packages: entry points in the groups below.

A package declares them in its pyproject.toml, for example

    [project.entry-points."hydraspec.speculators"]
    bigram = "hydraspec_bigram.speculator:BigramSpeculator"

A group is read when a name is looked up in it; a module is imported when its class is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from hydraspec.errors import ConfigurationError

SPECULATORS = "hydraspec.speculators"  # method -> a subclass of BaseSpeculator
OPTIONS = "hydraspec.options"  # method -> the dataclass of method.options; imports no torch
TARGETS = "hydraspec.targets"  # model_type -> a loader, called as those in models/registry.py
WORKLOADS = "hydraspec.workloads"  # workload -> a function that yields workload lines


def offered(group: str, built_in: Mapping[str, str]) -> dict[str, EntryPoint]:
    """Entry points of a group by name: those of `built_in` (name -> "module:attribute"), then those
    of other packages.

    Raises:
        ConfigurationError: two packages, or a package and HydraSpec, offer one name.
    """
    points = {name: EntryPoint(name, value, group) for name, value in built_in.items()}
    for point in _added(group):
        if point.name in points:
            raise ConfigurationError(
                f"{_place(point)} takes a name that {_owner(points[point.name])} has\n"
                "  allowed: a name of its own for each\n"
                f"  to do: rename the entry point, or uninstall {_owner(point)}"
            )
        points[point.name] = point
    return points


def load(point: EntryPoint) -> Any:
    """The object that an entry point names.

    Raises:
        ConfigurationError: an object of another package cannot be imported. Errors of HydraSpec's
            modules pass unchanged.
    """
    if point.dist is None:
        return point.load()
    try:
        return point.load()
    except Exception as error:  # whatever importing a foreign module may raise
        raise broken(point, f"{type(error).__name__}: {error}") from error


def broken(point: EntryPoint, reason: str) -> ConfigurationError:
    """The error for another package's entry point whose object is not what its group needs."""
    return ConfigurationError(
        f"{_place(point)} cannot be used: {reason}\n"
        '  allowed: "module:attribute" of an installed module\n'
        f"  to do: mend {_owner(point)}, or uninstall it"
    )


def added(group: str) -> set[str]:
    """Names of a group that other installed packages offer."""
    return {point.name for point in _added(group)}


@cache
def _added(group: str) -> tuple[EntryPoint, ...]:
    return tuple(sorted(entry_points(group=group), key=lambda point: (point.name, _owner(point))))


def _owner(point: EntryPoint) -> str:
    return "hydraspec" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def _place(point: EntryPoint) -> str:
    return f'{_owner(point)}: entry point {point.name} = "{point.value}" of {point.group}'

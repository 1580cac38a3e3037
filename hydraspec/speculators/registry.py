"""Speculators by the names of the configuration, as a lazy table: a speculator's module is
imported when one is built."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING

from hydraspec import plugins
from hydraspec.config.messages import listing, refusal
from hydraspec.config.schema import AUTO, RunConfig

if TYPE_CHECKING:
    from hydraspec.speculators.base import BaseSpeculator

SPECULATORS = {
    "none": "hydraspec.speculators.none:NoSpeculator",
    "eagle": "hydraspec.speculators.eagle:EagleSpeculator",
    "eagle3": "hydraspec.speculators.eagle:EagleSpeculator",
    "peagle": "hydraspec.speculators.peagle:PEagleSpeculator",
    "dflash": "hydraspec.speculators.block:BlockSpeculator",
    "dspark": "hydraspec.speculators.dspark:DSparkSpeculator",
    "dflash2": "hydraspec.speculators.dflash2:DFlash2Speculator",
    "ngram": "hydraspec.speculators.ngram:NgramSpeculator",
    "suffix": "hydraspec.speculators.suffix.speculator:SuffixSpeculator",
    "mtp": "hydraspec.speculators.mtp:MTPSpeculator",
    "gemma4_mtp": "hydraspec.speculators.gemma4:Gemma4Speculator",
}


def build_speculator(config: RunConfig) -> BaseSpeculator:
    """The speculator that `method.name` names, not loaded yet.

    Raises:
        ConfigurationError: another package names a class that is no speculator.
    """
    from hydraspec.speculators.base import BaseSpeculator

    point = _speculator(config.method.name)
    found = plugins.load(point)
    if not (isinstance(found, type) and issubclass(found, BaseSpeculator)):
        raise plugins.broken(point, f"{found!r} is no subclass of BaseSpeculator")
    speculator: BaseSpeculator = found(config)
    return speculator


def check_speculator(config: RunConfig) -> None:
    """Refuse a method that has a YAML file and no class, without importing a speculator.

    Raises:
        ConfigurationError: naming the methods that have a class.
    """
    if config.method.name != AUTO:
        _speculator(config.method.name)


def _speculator(name: str) -> EntryPoint:
    points = plugins.offered(plugins.SPECULATORS, SPECULATORS)
    if name not in points:
        raise refusal(
            "method.name",
            name,
            "has no speculator",
            allowed=listing(points),
            remedy=f'install the package with the entry point {name} of "{plugins.SPECULATORS}"',
        )
    return points[name]

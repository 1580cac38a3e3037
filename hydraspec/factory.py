"""Names of the configuration → classes, one lazy table. Nothing is imported before it is built."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hydraspec.config.messages import listing, refusal
from hydraspec.config.schema import RunConfig

if TYPE_CHECKING:
    from hydraspec.engine.base import Engine
    from hydraspec.speculators.base import BaseSpeculator

ENGINES = {
    "native": "hydraspec.engine.native.engine:NativeEngine",
}
SPECULATORS = {
    "none": "hydraspec.speculators.none:NoSpeculator",
    "eagle": "hydraspec.speculators.eagle:EagleSpeculator",
    "eagle3": "hydraspec.speculators.eagle:EagleSpeculator",
    "peagle": "hydraspec.speculators.peagle:PEagleSpeculator",
    "gemma4_mtp": "hydraspec.speculators.gemma4:Gemma4Speculator",
}


def build_engine(config: RunConfig) -> Engine:
    """The engine that `engine.name` names, loaded.

    Raises:
        UserError: whatever the engine refuses while loading.
    """
    engine: Engine = _load("engine.name", config.engine.name, ENGINES)(config)
    return engine


def build_speculator(config: RunConfig) -> BaseSpeculator:
    """The speculator that `method.name` names, not loaded yet."""
    speculator: BaseSpeculator = _load("method.name", config.method.name, SPECULATORS)(config)
    return speculator


def _load(key: str, name: str, table: dict[str, str]) -> type[Any]:
    if name not in table:
        raise refusal(key, name, "is unknown", allowed=listing(table))
    module, _, attribute = table[name].partition(":")
    found: type[Any] = getattr(import_module(module), attribute)
    return found

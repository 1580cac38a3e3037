"""Names of the configuration → classes, one lazy table. Nothing is imported before it is built."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hydraspec.config.checks import check_method
from hydraspec.config.derive import named_drafter, no_drafter, take_over
from hydraspec.config.messages import listing, refusal
from hydraspec.config.schema import AUTO, Device, RunConfig

if TYPE_CHECKING:
    from hydraspec.engine.base import Engine
    from hydraspec.speculators.base import BaseSpeculator

ENGINES = {
    "native": "hydraspec.engine.native.engine:NativeEngine",
    "transformers": "hydraspec.engine.transformers.engine:TransformersEngine",
    "vllm": "hydraspec.engine.vllm.engine:VllmEngine",
}
DETECTION = "hydraspec.models.detect:resolve"
DEVICE = "hydraspec.engine.machine:pick_device"
SPECULATORS = {
    "none": "hydraspec.speculators.none:NoSpeculator",
    "eagle": "hydraspec.speculators.eagle:EagleSpeculator",
    "eagle3": "hydraspec.speculators.eagle:EagleSpeculator",
    "peagle": "hydraspec.speculators.peagle:PEagleSpeculator",
    "mtp": "hydraspec.speculators.mtp:MTPSpeculator",
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


def check_device(config: RunConfig) -> None:
    """Refuse a device that was asked for and is not there, before anything is read.

    Raises:
        ConfigurationError: from the engine's room.
    """
    if config.engine.device is Device.cuda:
        module, _, attribute = DEVICE.partition(":")
        getattr(import_module(module), attribute)(config)


def resolve_drafter(config: RunConfig) -> None:
    """Take from the checkpoints what the configuration leaves to them, in place.

    Where `method=auto`: method, K and target as the drafter's folder says. With a method: the
    drafter and the target where target.checkpoint is a drafter's folder. A target.checkpoint that
    is none gets the drafter that the target's YAML names. Asking twice changes nothing.

    Raises:
        CheckpointError: a folder that holds no drafter.
        ConfigurationError: no drafter is given or named, or its K is out of range.
    """
    method, target, drafter = config.method, config.target.checkpoint, config.method.checkpoint
    chosen = method.name != AUTO
    asks = method.name != "none" and method.needs_checkpoint and drafter in (None, target)
    if chosen and not asks:
        return
    module, _, attribute = DETECTION.partition(":")
    found = getattr(import_module(module), attribute)(target, None if chosen else drafter)
    is_target = found is None or (chosen and found.target == target)
    if is_target and drafter is None:
        method.checkpoint = named_drafter(config)
        if method.checkpoint is None:
            raise no_drafter(config)
        resolve_drafter(config)
        return
    if is_target:  # and drafts itself
        return
    name = method.name if chosen else found.method
    take_over(config, name, found.drafter, found.target, found.num_speculative_tokens)
    check_method(config)


def _load(key: str, name: str, table: dict[str, str]) -> type[Any]:
    if name not in table:
        raise refusal(key, name, "is unknown", allowed=listing(table))
    module, _, attribute = table[name].partition(":")
    found: type[Any] = getattr(import_module(module), attribute)
    return found

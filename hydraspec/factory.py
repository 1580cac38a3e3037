"""Engines and devices by the names of the configuration, as a lazy table: an engine's module is
imported when it is built. Speculators are in speculators/registry.py."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hydraspec.config.checks import check_method
from hydraspec.config.derive import named_drafter, no_drafter, take_over
from hydraspec.config.messages import listing, refusal
from hydraspec.config.schema import AUTO, Device, RunConfig

if TYPE_CHECKING:
    from hydraspec.engine.base import Engine

ENGINES = {
    "native": "hydraspec.engine.native:NativeEngine",
    "transformers": "hydraspec.adapters.transformers.engine:TransformersEngine",
    "vllm": "hydraspec.adapters.vllm.engine:VllmEngine",
}
# Rules of engines over the sizes of a target: which splits they can make of it.
SPLITS = {"vllm": "hydraspec.adapters.vllm.splits:check_shipped"}
FOLLOW = "hydraspec.adapters.vllm.follow:follow"
PARALLEL = "hydraspec.parallel.engines.engine:ParallelEngine"  # native, over several ranks
RANKS = "hydraspec.parallel.ranks:current"
DETECTION = "hydraspec.models.detect:resolve"
OF_OTHER_RANKS = "hydraspec.parallel.engines.calls:follow"
DEVICE = "hydraspec.engine.machine:pick_device"
SPLIT = "hydraspec.engine.splits:check"


def build_engine(config: RunConfig) -> Engine:
    """The engine that `engine.name` names, loaded.

    Raises:
        UserError: whatever the engine refuses while loading.
    """
    name = config.engine.name
    if name not in ENGINES:
        raise refusal("engine.name", name, "is unknown", allowed=listing(ENGINES))
    place = ENGINES[name]
    if name == "native" and _attribute(RANKS)().layout.num_ranks > 1:
        place = PARALLEL
    engine: Engine = _attribute(place)(config)
    return engine


def check_adapter_split(config: RunConfig) -> None:
    """Refuse a split that another engine cannot make of a target whose config.json ships with us.

    Raises:
        ConfigurationError: as the engine would while loading.
    """
    if config.engine.name in SPLITS and config.parallelism.num_ranks > 1:
        _attribute(SPLITS[config.engine.name])(config)


def follow(config: RunConfig) -> dict[str, Any]:
    """Lend this host's devices to a vLLM engine on another one, until that ends.

    Raises:
        UserError: whatever the engine refuses while loading.
    """
    summary: dict[str, Any] = _attribute(FOLLOW)(config)
    return summary


def follow_first_rank(config: RunConfig) -> None:
    """Make the calls that the first rank announces for its engine, until it closes it."""
    _attribute(OF_OTHER_RANKS)(config)


def device_type(config: RunConfig) -> str:
    """cpu or cuda: where this configuration runs.

    Raises:
        ConfigurationError: the device is not there, or there are too few for its ranks.
    """
    found: str = _attribute(DEVICE)(config).type
    return found


def check_device(config: RunConfig) -> None:
    """Refuse a device that was asked for and is not there, before anything is read.

    Raises:
        ConfigurationError: from the engine's room.
    """
    if config.engine.device is Device.cuda:
        _attribute(DEVICE)(config)


def check_split(config: RunConfig) -> None:
    """Refuse a split over ranks that the target or its assistant cannot have. Reads no weights.

    Raises:
        UserError: from the engine's room.
    """
    _attribute(SPLIT)(config)


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
    found = _attribute(DETECTION)(target, None if chosen else drafter)
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


def _attribute(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)

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
# Checks, by engine, that the engine can split a target of the configuration's sizes.
SPLITS = {"vllm": "hydraspec.adapters.vllm.splits:check_shipped"}
FOLLOW = "hydraspec.adapters.vllm.follow:follow"
PARALLEL = "hydraspec.parallel.engines.engine:ParallelEngine"  # native, over several ranks
RANKS = "hydraspec.parallel.ranks:current"
DETECTION = "hydraspec.models.detect:resolve"
OF_OTHER_RANKS = "hydraspec.parallel.engines.calls:follow"
DEVICE = "hydraspec.engine.machine:pick_device"
SPLIT = "hydraspec.engine.splits:check"
NOTES = "hydraspec.engine.notes:log_notes"


def build_engine(config: RunConfig) -> Engine:
    """The engine that `engine.name` names, loaded. Callers log its notes with `log_notes`.

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


def log_notes(engine: Engine, baseline: Engine | None = None) -> list[str]:
    """Log the warnings of an engine and of its baseline, each once in this process. Engines may add
    some as they run. Returns those that this call logged."""
    logged: list[str] = _attribute(NOTES)(engine.info, None if baseline is None else baseline.info)
    return logged


def check_adapter_split(config: RunConfig) -> None:
    """Refuse a split that the configured engine, if it is not the native one, cannot make of a
    target whose config.json ships with the package.

    Raises:
        ConfigurationError: the error that the engine would raise while loading.
    """
    if config.engine.name in SPLITS and config.parallelism.num_ranks > 1:
        _attribute(SPLITS[config.engine.name])(config)


def follow(config: RunConfig) -> dict[str, Any]:
    """Lend this host's devices to a vLLM engine on another host until that engine ends; returns a
    summary without results.

    Raises:
        UserError: whatever the engine refuses while loading.
    """
    summary: dict[str, Any] = _attribute(FOLLOW)(config)
    return summary


def follow_first_rank(config: RunConfig) -> None:
    """Make the calls that the first rank announces for its engine, until the engine is closed."""
    _attribute(OF_OTHER_RANKS)(config)


def device_type(config: RunConfig) -> str:
    """Type of the device that this configuration runs on: cpu or cuda.

    Raises:
        ConfigurationError: the device is not there, or there are too few for its ranks.
    """
    found: str = _attribute(DEVICE)(config).type
    return found


def check_device(config: RunConfig) -> None:
    """Refuse engine.device=cuda if it cannot be used, before anything is read.

    Raises:
        ConfigurationError: no CUDA device, fewer devices than ranks, or too little memory.
    """
    if config.engine.device is Device.cuda:
        _attribute(DEVICE)(config)


def check_split(config: RunConfig) -> None:
    """Refuse, without reading weights, a split over ranks that target or assistant cannot have.

    Raises:
        UserError: the error of `engine.splits.check`.
    """
    _attribute(SPLIT)(config)


def resolve_drafter(config: RunConfig) -> None:
    """Complete the configuration, in place, from the checkpoints that it names.

    With `method=auto` the drafter's folder gives method, K and target. With a method, a
    target.checkpoint that is a drafter's folder gives drafter and target. A target without a
    drafter gets the one that its YAML names. A second call changes nothing.

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
    if is_target:  # the target's folder holds its drafter too
        return
    name = method.name if chosen else found.method
    take_over(config, name, found.drafter, found.target, found.num_speculative_tokens)
    check_method(config)


def _attribute(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)

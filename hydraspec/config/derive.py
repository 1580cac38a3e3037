"""Defaults that depend on other keys. A warning names each of the user's values that is changed."""

from __future__ import annotations

import dataclasses
import re

from hydraspec.config.benches import UNCACHED
from hydraspec.config.choices import has_key, packaged_value, shipped_shapes
from hydraspec.config.engines import TAKEN, VLLM
from hydraspec.config.messages import refusal, show
from hydraspec.config.schema import (
    AUTO,
    MethodConfig,
    PerStep,
    RunConfig,
    TargetConfig,
    TrackerConfig,
    TrackerMode,
    Weights,
)
from hydraspec.errors import NoDrafterError
from hydraspec.shipped import SHAPE_PREFIX, ZOO_PREFIX

# Drafters' shapes that may ship beside a target's: method -> suffix in <target>-<suffix>.
BESIDE = {
    "gemma4_mtp": "assistant",
    **{name: name for name in ("eagle", "eagle3", "peagle", "dflash", "dspark", "dflash2")},
}
QUANTISED = re.compile("_(fp8|w4a16)$")  # ends a shape that has the drafters of the float one
MOST_DRAFTS = 6  # default of the largest K chosen per step; most drafters pay off at 2 to 6
DRAFTS_ITSELF = {"mtp"}  # methods whose layers come in the target's own checkpoint


def derive(config: RunConfig) -> None:
    """Fill in the target's name and the drafter; reset what plain decoding ignores.

    A method without a drafter is refused here if target.checkpoint is a shape, or the one that the
    target's choice names. Any other checkpoint may itself be a drafter's folder, which is known
    once the folder is opened; a target's folder gets the drafter of its YAML (`named_drafter`).

    Raises:
        NoDrafterError: the method has no drafter.
    """
    known = _is_own(config.target) or config.target.checkpoint.startswith(SHAPE_PREFIX)
    _name_target(config.target)
    _take_shapes(config, known)
    if config.method.name == "none":
        config.method = _plain_decoding(config)
    elif config.method.needs_checkpoint and config.method.checkpoint is None:
        config.method.checkpoint = _default_drafter(config, known)
    method = config.method
    if method.num_speculative_tokens is PerStep.auto and method.max_speculative_tokens is None:
        method.max_speculative_tokens = MOST_DRAFTS
    _draw_drafter(config)
    _drop_baseline(config)
    if config.bench.name in UNCACHED and has_key(config.engine.name, "engine.prefix_caching"):
        config.engine.prefix_caching = False
    _turn_off_tracker(config.tracker, config.warnings)


def take_over(config: RunConfig, method: str, drafter: str, target: str, proposed: int) -> None:
    """Set method, drafter and target as a drafter's folder gives them, and K if it is 0."""
    config.method.name, config.method.checkpoint = method, drafter
    config.method.num_speculative_tokens = config.method.num_speculative_tokens or proposed
    if target != config.target.checkpoint:
        config.target.checkpoint, config.target.name = target, folder_name(target)


def no_drafter(config: RunConfig) -> NoDrafterError:
    """The error for a method without a drafter: none is given, and the target names none."""
    known = ", ".join(f"{name}: {where}" for name, where in config.target.drafters.items())
    named = f"drafters the target names: {known or 'none'}"
    taken = TAKEN.get(config.engine.name, {}).get("method.name", config.target.drafters)
    fitting = [name for name in config.target.drafters if name in taken]
    choose = "choose method=none"
    if fitting:
        others = " or another of these methods" if len(fitting) > 1 else ""
        choose = f"choose method={fitting[0]}{others}, method={AUTO} or method=none"
    shape = QUANTISED.sub("", config.target.name)
    if f"{shape}-{BESIDE.get(config.method.name)}" in shipped_shapes():
        choose += ", or add target.weights=random, which draws a drafter of its shape too"
    message = refusal(
        "method.checkpoint",
        None,
        f"leaves method={config.method.name} without a drafter: target {config.target.name} "
        "names none",
        allowed=f"a folder or a hub id ({named})",
        remedy=f"add method.checkpoint=<folder or hub id>, or {choose}",
    )
    return NoDrafterError(str(message), key=message.key)


def _is_own(target: TargetConfig) -> bool:
    """Returns whether the checkpoint is that in the YAML of the choice with the target's name."""
    return packaged_value("target", target.name, "checkpoint") == target.checkpoint


def _name_target(target: TargetConfig) -> None:
    """Name a checkpoint after its folder unless it is the one of the target's choice."""
    own = packaged_value("target", target.name, "checkpoint")
    if target.name == "custom" or (own is not None and own != target.checkpoint):
        target.name = folder_name(target.checkpoint) or target.name


def folder_name(checkpoint: str) -> str:
    """The last part of a checkpoint: a folder, a hub id, or the name of a zoo model or shape."""
    path = checkpoint.removeprefix(ZOO_PREFIX).removeprefix(SHAPE_PREFIX)
    return path.rstrip("/").rpartition("/")[2]


def _take_shapes(config: RunConfig, known: bool) -> None:
    """Replace, for random weights, the hub id of the target's YAML by the shape that ships with the
    package, so that nothing is downloaded; add the drafters' shapes that ship beside a shape."""
    target = config.target
    given = target.checkpoint.startswith(SHAPE_PREFIX)
    shape = target.checkpoint.removeprefix(SHAPE_PREFIX)
    if known and not given and target.weights is Weights.random and target.name in shipped_shapes():
        shape, given = target.name, True
        config.warnings.append(
            f"target.weights=random: {target.checkpoint} is not read, its shape ships with the "
            f"package: recorded as {SHAPE_PREFIX}{shape}"
        )
        target.checkpoint = SHAPE_PREFIX + shape
    if not given:
        return
    float_shape = QUANTISED.sub("", shape)
    beside = {m: f"{float_shape}-{end}" for m, end in BESIDE.items()}
    drafters = {m: SHAPE_PREFIX + name for m, name in beside.items() if name in shipped_shapes()}
    itself = DRAFTS_ITSELF & {config.method.name, *target.drafters}
    drafters |= dict.fromkeys(itself, target.checkpoint)
    target.drafters = {**target.drafters, **drafters}


def _draw_drafter(config: RunConfig) -> None:
    """Set random weights for a drafter that the target names as a shape: shapes have no weights."""
    method = config.method
    named = named_drafter(config)
    if (method.checkpoint or "").startswith(SHAPE_PREFIX) and method.checkpoint == named:
        if method.weights is not Weights.random:
            config.warnings.append(
                "method.weights=checkpoint: the drafter of a target with random weights is drawn "
                "at random too: recorded as random"
            )
        method.weights = Weights.random


def _drop_baseline(config: RunConfig) -> None:
    """Turn the baseline off with vLLM, whose one engine takes the whole device."""
    if config.engine.name != VLLM or not config.baseline:
        return
    config.baseline = False
    if config.method.name != "none":
        config.warnings.append(
            "baseline=true is not available with engine=vllm, which takes the device for one "
            f"engine: recorded as false; to compare run -m method=none,{config.method.name}"
        )


def _turn_off_tracker(tracker: TrackerConfig, warnings: list[str]) -> None:
    """Record the mode "disabled" with tracker=none."""
    if tracker.name == "none" and tracker.mode is not TrackerMode.disabled:
        warnings.append(
            f"tracker.mode={tracker.mode.value} has no effect with tracker=none: "
            "recorded as disabled"
        )
        tracker.mode = TrackerMode.disabled


def _plain_decoding(config: RunConfig) -> MethodConfig:
    """The method group of plain decoding; adds a warning for each value that it replaces."""
    plain = MethodConfig(name="none", num_speculative_tokens=0)
    for field in dataclasses.fields(MethodConfig):
        given = getattr(config.method, field.name)
        kept = getattr(plain, field.name)
        if given != kept:
            value = show(getattr(given, "value", given))
            recorded = show(getattr(kept, "value", kept))
            config.warnings.append(
                f"method.{field.name}={value} has no effect with method=none: "
                f"recorded as {recorded}"
            )
    return plain


def named_drafter(config: RunConfig) -> str | None:
    """The drafter that the target names for the method, for `auto` the first; None without one."""
    drafters, method = config.target.drafters, config.method.name
    if method == AUTO:
        return next(iter(drafters.values()), None)
    return drafters.get(method)


def _default_drafter(config: RunConfig, known: bool) -> str | None:
    """The default of method.checkpoint: `named_drafter`, or the target itself for methods whose
    layers it contains; else None if the target is not `known`, as its folder decides once opened.

    Raises:
        NoDrafterError: a known target names no drafter for the method.
    """
    own_layers = config.method.name in DRAFTS_ITSELF
    if own_layers and not (known and config.method.name in config.target.drafters):
        return config.target.checkpoint
    if not known:
        return None
    named = named_drafter(config)
    if named is None and config.method.name != AUTO:
        raise no_drafter(config)
    return named

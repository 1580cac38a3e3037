"""The config tree that ships with the package: the choices of a group, and a value of one."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

SHAPES = Path(__file__).resolve().parent.parent / "models" / "shapes"


@cache
def choices_of(group: str) -> tuple[str, ...]:
    """Names that `group=<name>` takes, sorted; empty for a group that does not exist."""
    folder = files("hydraspec.conf").joinpath(group)
    if not folder.is_dir():
        return ()
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def packaged_value(group: str, choice: str, key: str) -> str | None:
    """A top-level text value of a choice's YAML; None without the choice or the value."""
    value = packaged(group, choice).get(key)
    return value if isinstance(value, str) and value != "???" else None


def packaged_drafters(target: str) -> dict[str, str]:
    """The drafters that a target's YAML names, method → checkpoint, in its order."""
    drafters = packaged("target", target).get("drafters")
    return dict(drafters) if isinstance(drafters, dict) else {}


def choices_with(key: str) -> list[str]:
    """The choices of a dotted key's group that have the key, as they are typed."""
    group, *parts = key.split(".")
    return [f"{group}={name}" for name in choices_of(group) if _has(packaged(group, name), parts)]


def _has(values: Any, parts: list[str]) -> bool:
    for part in parts:
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


@cache
def shipped_shapes() -> tuple[str, ...]:
    """Names that "shape:<name>" takes: folders with a config.json and no weights, sorted."""
    return tuple(sorted(config.parent.name for config in SHAPES.glob("*/config.json")))


@cache
def packaged(group: str, choice: str) -> dict[Any, Any]:
    """What a choice's YAML holds, to be read only; empty without the choice."""
    if choice not in choices_of(group):
        return {}
    text = files("hydraspec.conf").joinpath(group, f"{choice}.yaml").read_text(encoding="utf-8")
    loaded = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    return loaded if isinstance(loaded, dict) else {}

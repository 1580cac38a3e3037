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
    value = _packaged(group, choice).get(key)
    return value if isinstance(value, str) and value != "???" else None


def packaged_drafters(target: str) -> dict[str, str]:
    """The drafters that a target's YAML names, method → checkpoint, in its order."""
    drafters = _packaged("target", target).get("drafters")
    return dict(drafters) if isinstance(drafters, dict) else {}


@cache
def shipped_shapes() -> tuple[str, ...]:
    """Names that "shape:<name>" takes: folders with a config.json and no weights, sorted."""
    return tuple(sorted(config.parent.name for config in SHAPES.glob("*/config.json")))


@cache
def _packaged(group: str, choice: str) -> dict[Any, Any]:
    if choice not in choices_of(group):
        return {}
    text = files("hydraspec.conf").joinpath(group, f"{choice}.yaml").read_text(encoding="utf-8")
    loaded = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    return loaded if isinstance(loaded, dict) else {}

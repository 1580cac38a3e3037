"""The config tree that ships with the package: the choices of a group, and a value of one."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from omegaconf import OmegaConf


@cache
def choices_of(group: str) -> tuple[str, ...]:
    """Names that `group=<name>` takes, sorted; empty for a group that does not exist."""
    folder = files("hydraspec.conf").joinpath(group)
    if not folder.is_dir():
        return ()
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


@cache
def packaged_value(group: str, choice: str, key: str) -> str | None:
    """A top-level text value of a choice's YAML; None without the choice or the value."""
    if choice not in choices_of(group):
        return None
    text = files("hydraspec.conf").joinpath(group, f"{choice}.yaml").read_text(encoding="utf-8")
    loaded = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    value = loaded.get(key) if isinstance(loaded, dict) else None
    return value if isinstance(value, str) and value != "???" else None

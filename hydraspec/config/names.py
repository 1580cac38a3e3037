"""Names of runs in W&B, made of what was typed."""

from __future__ import annotations

from collections.abc import Sequence

from hydraspec.config.choices import choices_of
from hydraspec.config.schema import RunConfig

MAX_NAME = 128  # characters of a run's name in W&B
OWN = ("target", "method", "method.num_speculative_tokens")  # keys that `own` covers


def run_name(config: RunConfig, lines: Sequence[str], *, own: str = "") -> str:
    """A run's name in W&B made of overrides, such as "eagle3, K=4", with only the last part of a
    path.

    Args:
        lines: the overrides in which runs of a sweep differ, or all overrides of a single run.
        own: text of target, method and K, with which the name of a single run begins.
    """
    parts = [own] if own else []
    for line in lines:
        key, _, value = line.lstrip("+").partition("=")
        name = key.rpartition(".")[2]
        if not value.startswith(("[", "{")):
            value = value.rstrip("/").rpartition("/")[2]
        if key.startswith(("hydra", "tracker")) or (own and key in OWN):
            continue
        if key == "method.num_speculative_tokens":
            parts += [] if config.method.name == "none" else [f"K={value}"]
        elif key == "method" and config.method.name == "none":
            parts.append("no drafts")
        else:
            parts.append(value if key == name and bool(choices_of(key)) else f"{name}={value}")
    return ", ".join(parts)[:MAX_NAME]

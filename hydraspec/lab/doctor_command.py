"""The command that examines a run's drafter, as it can be pasted."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from hydraspec.config.choices import choices_of, packaged_drafters
from hydraspec.config.schema import RunConfig, TargetConfig

COMMAND = "python -m hydraspec.doctor"
# Typed keys of these groups are repeated, but for those that say how a run drafts or is loaded.
GROUPS = ("target", "method", "workload")
OF_RUNS = {
    *("method.max_speculative_tokens", "method.costs", "method.draft_sampling"),
    *("method.verification", "method.synthetic_acceptance_length"),
    *("workload.concurrency", "workload.request_rate", "workload.burstiness", "workload.limit"),
}


def doctor_command(config: RunConfig, typed: Sequence[str]) -> str:
    """With the target, the method and its checkpoint if it is not the target's own, and what was
    typed of prompts and conventions.

    Args:
        config: of the run, resolved.
        typed: its overrides.
    """
    given = {line.lstrip("+").partition("=")[0]: line for line in typed}
    keys = {**_target(config.target, given), "method": f"method={config.method.name}"}
    drafter, named = config.method.checkpoint, packaged_drafters(config.target.name)
    own = (None, config.target.checkpoint, named.get(config.method.name))
    if "method.checkpoint" in given or drafter not in own:
        keys["method.checkpoint"] = given.get("method.checkpoint", f"method.checkpoint={drafter}")
    for key, line in given.items():
        is_asked = key.partition(".")[0] in GROUPS and key not in OF_RUNS
        if is_asked and not key.startswith("workload.goodput") and not line.endswith("=auto"):
            keys.setdefault(key, line)
    return " ".join([COMMAND, *map(_quoted, keys.values())])


def _quoted(text: str) -> str:
    """As a shell takes it; text with Hydra's own quotes stays readable."""
    return shlex.quote(text) if "'" not in text or set(text) & set('"$`\\!') else f'"{text}"'


def _target(target: TargetConfig, given: dict[str, str]) -> dict[str, str]:
    """A target that has no choice's name is one whose folder was given."""
    if target.name in choices_of("target"):
        return {"target": f"target={target.name}"}
    if "target.checkpoint" in given:
        return {key: given[key] for key in ("target", "target.checkpoint") if key in given}
    return {
        "target": "target=custom",
        "target.checkpoint": f"target.checkpoint={target.checkpoint}",
    }

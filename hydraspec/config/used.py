"""The part of a configuration that affects its run, which trackers record."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from hydraspec.config.benches import is_bench
from hydraspec.config.build import to_dict
from hydraspec.config.choices import spelt
from hydraspec.config.schema import RunConfig
from hydraspec.config.workloads import WITHOUT_PATH

ONLY_SAMPLED = ("top_k", "top_p", "min_p")  # no effect at temperature 0


def used(config: RunConfig) -> dict[str, Any]:
    """The configuration without keys that its choices do not read, and without the tracker."""
    plain = to_dict(config)
    del plain["tracker"], plain["target"]["drafters"], plain["method"]["needs_checkpoint"]
    if not is_bench(config):
        del plain["bench"]
    if config.method.name == "none":
        plain["method"] = {"name": "none"}
    if config.parallelism.num_ranks == 1:
        plain["parallelism"] = {"name": config.parallelism.name}
    if config.sampling.temperature == 0:
        plain["sampling"] = _without(plain["sampling"], ONLY_SAMPLED)
    for group in ("engine", "workload"):
        plain[group] = _own_keys(plain[group], spelt(group, plain[group]["name"]))
    unread = set(WITHOUT_PATH if config.workload.path is not None else ())
    if config.workload.request_rate is None:
        unread.add("burstiness")
    if not any(plain["workload"]["goodput"].values()):
        unread.add("goodput")
    plain["workload"] = _without(plain["workload"], unread)
    return plain


def _own_keys(group: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
    """The part of `group` with the keys of `chosen`, the YAML of its choice, in subgroups too."""
    return {
        key: _own_keys(value, chosen[key]) if chosen[key] and isinstance(value, dict) else value
        for key, value in group.items()
        if key in chosen
    }


def _without(group: dict[str, Any], keys: Container[str]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in keys}

"""The part of a configuration that says something about its run: what trackers record."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from hydraspec.config.benches import is_bench
from hydraspec.config.build import to_dict
from hydraspec.config.engines import VLLM, takes
from hydraspec.config.schema import RunConfig
from hydraspec.config.workloads import KEYS, TEXT_KEYS, keys_with_meaning

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
    plain["engine"] = _engine(config, plain["engine"])
    plain["workload"] = _workload(config, plain["workload"])
    return plain


def _engine(config: RunConfig, engine: dict[str, Any]) -> dict[str, Any]:
    name = config.engine.name
    found: dict[str, Any] = {"name": name}
    for key, value in engine.items():
        if key == "vllm" and name != VLLM:
            continue
        if isinstance(value, dict):
            inner = {part: v for part, v in value.items() if takes(name, f"{key}.{part}")}
            found |= {key: inner} if inner else {}
        elif takes(name, key):
            found[key] = value
    return found


def _workload(config: RunConfig, workload: dict[str, Any]) -> dict[str, Any]:
    unread = {*KEYS, *TEXT_KEYS} - set(keys_with_meaning(config.workload))
    if config.workload.request_rate is None:
        unread.add("burstiness")
    if not any(workload["goodput"].values()):
        unread.add("goodput")
    return _without(workload, unread)


def _without(group: dict[str, Any], keys: Container[str]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in keys}

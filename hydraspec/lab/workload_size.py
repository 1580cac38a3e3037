"""The number of prompts of a run's workload: the key that sets it, and how many there are."""

from __future__ import annotations

from hydraspec.config.schema import RunConfig
from hydraspec.config.workloads import DRAWN, is_random
from hydraspec.metrics.run_facts import WorkloadSize
from hydraspec.workloads.reading import Workload


def workload_size(config: RunConfig, workload: Workload) -> WorkloadSize:
    """The size of a workload as it was run; made workloads have any number of prompts, files as
    many as they have lines."""
    load, num_requests = config.workload, len(workload.requests)
    if load.name == "multi_turn":
        lines = workload.num_lines_in_all
        most = None if load.path is None or lines is None else lines // load.num_turns
        used = num_requests // load.num_turns
        return {"key": "workload.num_conversations", "value": used, "most": most}
    if load.name == "shared_prefix":
        used = -(-num_requests // load.requests_per_prefix)
        return {"key": "workload.num_prefixes", "value": used, "most": None}
    if load.name == DRAWN or is_random(load):
        used = workload.num_lines or num_requests
        return {"key": "workload.num_requests", "value": used, "most": None}
    most = workload.num_lines_in_all
    return {"key": "workload.limit", "value": workload.num_lines, "most": most}


def limit_warnings(config: RunConfig, size: WorkloadSize) -> list[str]:
    """A warning if workload.limit is above the number of prompts of a workload of that size."""
    load = config.workload
    has, what = size["most"], "prompts"
    if load.name == "multi_turn":
        has, what = load.num_conversations, "conversations"
    elif load.name == "shared_prefix":
        has = load.num_prefixes * load.requests_per_prefix
    elif size["key"] == "workload.num_requests":
        has = load.num_requests
    if load.limit is None or has is None or load.limit <= has:
        return []
    remedy = f"a higher {size['key']}"
    if size["key"] == "workload.limit":
        remedy = "a workload with more prompts (workload, workload.path)"
    return [
        f"workload.limit={load.limit} has no effect: workload={load.name} has {has} {what}, all of "
        f"which are run; to try: {remedy}"
    ]

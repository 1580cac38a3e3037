"""The part of summary.json's schema that the run itself knows: its load, memory and workload."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class WorkloadSize(TypedDict):
    """The configuration key that sets the number of prompts, its value in the run, and the largest
    one that the workload has prompts for; None for any number, or where that is not known."""

    key: str
    value: int
    most: int | None


class RunFacts(TypedDict):
    """Facts known to the run, but to no meter and no configuration."""

    num_threads: int
    workload_size: NotRequired[WorkloadSize]  # runs of earlier versions lack it
    memory_bytes: dict[str, int]
    max_memory_bytes: dict[str, int]
    load_s: float
    run_s: float

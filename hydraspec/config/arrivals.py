"""Rules of a workload's arrivals and of the limits of its goodput."""

from __future__ import annotations

import math

from hydraspec.config.benches import is_bench
from hydraspec.config.rules import Rule, goodput_limits
from hydraspec.config.schema import RunConfig

MIN_RATE, MAX_RATE = 1e-6, 1e6  # one in 11 days; far past what an engine can take


ARRIVALS = (
    Rule(
        "workload.request_rate",
        lambda rate, c: rate is None or MIN_RATE <= rate <= MAX_RATE,
        f"requests per second above 0 ({MIN_RATE:f} to {MAX_RATE:.0f}), or null to offer all at "
        "once",
        remedy="leave the key out for a closed load",
    ),
    Rule(
        "workload.burstiness",
        lambda shape, c: 0 < shape < math.inf,
        "above 0: 1 is Poisson, below 1 in bursts, above 1 more evenly",
    ),
    *goodput_limits("workload"),
)


def without_arrivals(config: RunConfig) -> list[str]:
    """Warnings of keys that change nothing: a burstiness without a rate, a rate in a benchmark."""
    load, notes = config.workload, []
    if load.request_rate is None and load.burstiness != 1:
        notes.append(
            f"workload.burstiness={load.burstiness} has no effect without workload.request_rate"
        )
    if load.request_rate is not None and is_bench(config):
        notes.append(
            f"workload.request_rate={load.request_rate} has no effect with "
            f"bench={config.bench.name}, which has a load of its own"
        )
    return notes

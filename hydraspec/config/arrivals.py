"""Rules of a workload's arrivals and of the limits of its goodput."""

from __future__ import annotations

import math

from hydraspec.config.rules import Rule
from hydraspec.config.schema import RunConfig

MIN_RATE, MAX_RATE = 1e-6, 1e6  # one in 11 days; far past what an engine can take


def _limit(name: str) -> Rule:
    return Rule(
        f"workload.goodput.{name}",
        lambda limit, c: limit is None or 0 < limit < math.inf,
        "milliseconds above 0, or null for no limit",
    )


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
    _limit("ttft_ms"),
    _limit("inter_token_ms"),
)


def without_rate(config: RunConfig) -> list[str]:
    """A warning of a burstiness that changes nothing."""
    load = config.workload
    if load.request_rate is not None or load.burstiness == 1:
        return []
    return [f"workload.burstiness={load.burstiness} has no effect without workload.request_rate"]

"""Times of arrival: drawn for each round from the run's seed, the same for method and baseline.

The engine offers each request at its time (`Request.arrival_s`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hydraspec.types import Request

STREAM = 0x61727276  # mixed with the run's seed: other numbers than those of prompts and samples
LONG_S = 24 * 3600.0  # a run that waits for longer is warned of


@dataclass(slots=True, frozen=True, kw_only=True)
class ArrivalProcess:
    """Random arrivals of requests, as in `vllm bench serve`.

    Attributes:
        rate: requests, or conversations, per second; None: all are offered at once.
        burstiness: shape of the gamma distribution of the gaps. 1 is a Poisson process, below 1
            requests come in bursts, above 1 more evenly.
    """

    rate: float | None
    burstiness: float
    seed: int

    def offered(self, requests: Sequence[Request], round_number: int) -> Sequence[Request]:
        """The requests of a round, in order, with their times of arrival; unchanged without a rate.
        Only first turns of conversations have such times: later turns follow the answers."""
        if self.rate is None:
            return requests
        firsts = [request.index for request in requests if request.after is None]
        times = self.times(len(firsts), round_number).tolist()
        arrivals = dict(zip(firsts, times, strict=True))
        return [replace(r, arrival_s=arrivals.get(r.index)) for r in requests]

    def times(self, count: int, round_number: int) -> NDArray[np.float64]:
        """Seconds from the round's start to each arrival [count], rising.

        The gaps are stretched so that the last request arrives after count / rate seconds: every
        seed offers the same load. Ratios of gamma variables do not depend on their sum, so that the
        order and spacing of arrivals is that of the process, given its length.
        """
        assert self.rate is not None
        rng = np.random.default_rng([self.seed, STREAM, round_number])
        reached = np.cumsum(rng.gamma(self.burstiness, 1 / self.burstiness, count))
        # Gaps of an extreme burst may all round to zero.
        times: NDArray[np.float64] = reached * (count / self.rate / (reached[-1] or 1.0))
        return times

    def warnings(self, num_requests: int, num_sides: int) -> list[str]:
        """A warning if the run waits for arrivals for more than a day."""
        if self.rate is None or (waiting := num_requests * num_sides / self.rate) <= LONG_S:
            return []
        sides = "" if num_sides == 1 else ", once for the method and once for the baseline"
        return [
            f"workload.request_rate={self.rate:g} makes this run wait for arrivals for "
            f"{waiting / 86400:.1f} days: {num_requests} requests{sides}; raise it, or lower "
            "workload.limit"
        ]

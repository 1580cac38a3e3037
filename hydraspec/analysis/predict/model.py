"""The arithmetic of a prediction: acceptance, the steps of a load, and the break-even acceptance.

The module measures nothing and knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from hydraspec.engine.costs import CostTable
from hydraspec.metrics.counters import RequestCounters

SEED = 0x70726564  # of the drawn acceptances
NUM_DRAWS = 8  # simulated passes over a load, whose sums are the prediction
Array = NDArray[np.float64]


@dataclass(slots=True, frozen=True)
class Acceptance:
    """Probabilities that a step of a request accepts its drafts.

    With fewer drafts than were measured, position i is accepted as often as it was: a step accepts
    min(accepted, K). This assumes that acceptance does not depend on where steps begin in the text,
    which K shifts.

    Attributes:
        survival: [R, K] probability that a step of the request accepts more than i drafts; falls
            with i.
        pooled: [K] the same probability over the steps of all requests.
    """

    survival: Array
    pooled: Array

    @property
    def most_drafts(self) -> int:
        """The largest K whose acceptance is known."""
        return len(self.pooled)

    def length(self, num_drafts: int) -> float:
        """Acceptance length with K drafts: 1 + Σ of the first K of `pooled`."""
        return float(1 + self.pooled[:num_drafts].sum())

    def conditional(self) -> list[float]:
        """Conditional rates [K]: accepted at i / at i-1; 0 after a position never accepted."""
        before = np.concatenate([[1.0], self.pooled[:-1]])
        rates = np.divide(self.pooled, before, out=np.zeros_like(before), where=before > 0)
        return [float(rate) for rate in rates]


def measured_acceptance(counters: Sequence[RequestCounters], num_drafts: int) -> Acceptance:
    """The acceptance that a pass with `num_drafts` drafts counted; a request without a step with
    drafts has the pooled one."""
    accepted = np.zeros((len(counters), num_drafts))
    for row, counted in zip(accepted, counters, strict=True):
        row[: len(counted.accepted_per_position)] = counted.accepted_per_position
    steps = np.array([counted.num_drafts for counted in counters], float)
    pooled = accepted.sum(axis=0) / max(1.0, float(steps.sum()))
    known = steps > 0
    survival = np.where(known[:, None], accepted / np.maximum(steps, 1.0)[:, None], pooled)
    return Acceptance(survival, pooled)


def assumed_acceptance(rates: Sequence[float], num_drafts: int, num_requests: int) -> Acceptance:
    """Acceptance with the conditional `rates` in every request; positions beyond have the last."""
    filled = [*rates, *[rates[-1]] * num_drafts][:num_drafts]
    pooled = np.cumprod(np.array(filled, float))
    return Acceptance(np.tile(pooled, (num_requests, 1)), pooled)


def constant_rate(length: float, num_drafts: int) -> float | None:
    """The conditional rate that, equal at all K positions, gives an acceptance length; None where
    even K accepted drafts do not reach it."""
    if length > num_drafts + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**i for i in range(num_drafts + 1)) < length:
            low = middle
        else:
            high = middle
    return high


def break_even(
    method: CostTable,
    plain: CostTable,
    batch: int,
    num_drafts: int,
    context: int | None = None,
) -> float:
    """The acceptance length at which a step with drafts makes tokens as fast as plain steps."""
    return method.at(batch, num_drafts, context).step_ms / plain.at(batch, 0, context).step_ms


@dataclass(slots=True, frozen=True)
class Load:
    """Requests that are offered at once, of which `concurrency` run at a time.

    Attributes:
        prompts: [R] tokens of each prompt that are read.
        cached: [R] tokens of each prompt that are not.
        outputs: [R] tokens of each output.
        parts: bounds of the parts of the load that run one after another.
    """

    prompts: Sequence[int]
    cached: Sequence[int]
    outputs: Sequence[int]
    concurrency: int
    parts: Sequence[tuple[int, int]]

    def mean_context(self, running: Mapping[int, int]) -> int:
        """Mean tokens of these requests, each with so many tokens to come, in the KV cache."""
        tokens = sum(
            self.prompts[i] + self.cached[i] + self.outputs[i] - left for i, left in running.items()
        )
        return round(tokens / len(running))


@dataclass(slots=True, frozen=True)
class Speed:
    """Tokens and time of a load's decode steps, as `Meter.output_tokens_per_second` counts them: a
    step's time goes to prompts and decodes in proportion to their rows."""

    num_tokens: float
    milliseconds: float

    @property
    def tokens_per_second(self) -> float:
        """Decode throughput; 0 where nothing decodes."""
        return 1000 * self.num_tokens / self.milliseconds if self.milliseconds else 0.0


@dataclass(slots=True, frozen=True)
class Step:
    """A decode step of some requests."""

    counts: np.ndarray  # [B] int64, drafts that each verifies
    milliseconds: float


# From the requests that decode, and the mean tokens of each in the KV cache.
Steps = Callable[[Sequence[int], int], Step]


def equal_steps(costs: CostTable, num_drafts: int) -> Steps:
    """Steps in which every request verifies `num_drafts` drafts."""
    step_ms = cache(lambda batch, context: costs.at(batch, num_drafts, context).step_ms)
    return lambda requests, context: Step(
        np.full(len(requests), num_drafts), step_ms(len(requests), context)
    )


def simulate(
    load: Load,
    steps: Steps,
    *,
    ms_per_prompt_row: float,
    acceptance: Acceptance | None = None,
    max_rows: int,
) -> Speed:
    """The decode speed of a load with such steps, each at the mean context of its requests.

    A request emits one token with its prompt, then each step 1 + the accepted drafts, and leaves
    after its last token; the next one joins in the following step. Prompts read beside decodes add
    their rows' time. The load is simulated NUM_DRAWS times with drawn acceptance, or once
    without drafts.

    Args:
        acceptance: acceptance of the load's requests; None without drafts.
        max_rows: the most token rows of a step.
    """
    rng = np.random.default_rng(SEED)
    num_tokens = milliseconds = 0.0
    for _ in range(1 if acceptance is None else NUM_DRAWS):
        for first, end in load.parts:
            waiting = list(range(first, end))[::-1]
            left = {i: load.prompts[i] for i in waiting}  # prompt rows to read
            running: dict[int, int] = {}  # request → tokens to come
            reading: list[int] = []
            while waiting or reading or running:
                while waiting and len(running) + len(reading) < load.concurrency:
                    reading.append(waiting.pop())
                decodes, num_rows = list(running), 0
                if decodes:
                    step = steps(decodes, load.mean_context(running))
                    num_rows = len(decodes) + int(step.counts.sum())
                num_read, reading, done = _read(reading, left, max_rows - num_rows)
                if decodes:
                    took = step.milliseconds + num_read * ms_per_prompt_row
                    milliseconds += took * num_rows / (num_rows + num_read)
                    emitted = _emitted(decodes, acceptance, step.counts, rng)
                    for request, count in zip(decodes, emitted, strict=True):
                        count = min(count, running[request])
                        num_tokens += count
                        running[request] -= count
                        if not running[request]:
                            del running[request]
                running |= {i: load.outputs[i] - 1 for i in done if load.outputs[i] > 1}
    return Speed(num_tokens, milliseconds)


def _read(
    reading: Sequence[int], left: dict[int, int], budget: int
) -> tuple[int, list[int], list[int]]:
    """Read prompts in order, `budget` rows at most. Returns the rows read, and the requests with
    and without more to read."""
    num_read = 0
    unread: list[int] = []
    done: list[int] = []
    for request in reading:
        rows = min(left[request], max(0, budget - num_read))
        left[request] -= rows
        num_read += rows
        (unread if left[request] else done).append(request)
    return num_read, unread, done


def _emitted(
    requests: Sequence[int],
    acceptance: Acceptance | None,
    counts: np.ndarray,
    rng: np.random.Generator,
) -> list[int]:
    if acceptance is None:
        return [1] * len(requests)
    drawn = rng.random(len(requests))[:, None]
    accepted = (drawn < acceptance.survival[requests]).sum(axis=1)
    return [1 + int(count) for count in np.minimum(accepted, counts)]

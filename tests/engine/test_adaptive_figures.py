"""Drafts that are chosen per step and request against every fixed number, over the zoo's workload:
in steps times the costs measured in the same process, and in wall time. Both are logged."""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean

import numpy as np
import pytest
from graph_runs import PAIRS, graph_config, make_graph_engine
from records import request

from hydraspec.config.schema import Dtype, PerStep
from hydraspec.engine.costs import CostTable
from hydraspec.engine.native import NativeEngine
from hydraspec.metrics.meter import Meter, finished_pairs
from hydraspec.metrics.paired import PairedRatio, paired_ratio
from hydraspec.types import Completion, Request, StepRecord
from hydraspec.zoo.recipe.evaluate import read_workload

log = logging.getLogger(__name__)

MOST = 6
AUTO = -1  # beside the fixed lengths 0 to MOST
ROUNDS = 4  # every length in turn, so that all see the same machine
LEAST = 0.97  # which the 95 % interval of a ratio of speeds reaches
WORST = 0.94  # of the ratio itself in costs, whose noise is that of the table alone
NUM_REQUESTS = {1: 16, 4: 32, 16: 64}  # by requests at once; prompts of all kinds take turns


def requests() -> list[Request]:
    return [
        request(index, messages=line["messages"], max_tokens=line.get("max_tokens", 128))
        for index, line in enumerate(read_workload())
    ]


@cache
def measured_engine(method: str) -> NativeEngine:
    config = graph_config(
        method,
        "none",
        k=PerStep.auto,
        max_speculative_tokens=MOST,
        dtype=Dtype.float32,
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        max_model_len=512,
    )
    engine = make_graph_engine(config, None)
    given = requests()
    engine.tokenize(given)
    engine.prepare(given)
    return engine


@contextmanager
def of_length(engine: NativeEngine, length: int) -> Iterator[None]:
    """Every step has `length` drafts, or as many as are chosen."""
    lengths = engine.parts.scheduler.draft_lengths
    assert lengths is not None
    lengths.follow(None if length == AUTO else itertools.repeat(length))
    try:
        yield
    finally:
        lengths.follow(None)


@dataclass
class Part:
    """One round of one length. A step's cost is shared out evenly to the requests that decode."""

    meter: Meter
    tokens: dict[int, list[int]] = field(default_factory=dict)
    costs_ms: Counter[int] = field(default_factory=Counter)  # by request

    @property
    def cost_ms(self) -> float:
        return sum(self.costs_ms.values())


def run(engine: NativeEngine, given: Sequence[Request], concurrency: int, length: int) -> Part:
    table = engine.info.costs
    assert table is not None
    part = Part(Meter(given, num_speculative_tokens=MOST))
    with of_length(engine, length):
        for event in engine.run(given, concurrency=concurrency):
            if isinstance(event, Completion):
                part.meter.add_completion(event)
                part.tokens[event.index] = event.output_token_ids
            elif isinstance(event, StepRecord):
                part.meter.add_step(event)
                drafts = {p.index: p.num_rows - 1 for p in event.requests if not p.is_prefill}
                if drafts:
                    cost = cost_of(table, list(drafts.values()), event.draft_length)
                    part.costs_ms.update(dict.fromkeys(drafts, cost / len(drafts)))
    return part


def cost_of(table: CostTable, drafts: Sequence[int], length: int | None) -> float:
    """Milliseconds of a step that verifies these drafts and proposes `length`."""
    assert length is not None
    verifying, drafting = (table.at(len(drafts), n) for n in (fmean(drafts), length))
    assert verifying.verify_ms is not None
    assert drafting.draft_ms is not None
    ragged_ms = (verifying.ragged_ms or 0.0) * (len(set(drafts)) > 1)
    return verifying.verify_ms + ragged_ms + drafting.draft_ms


def speed_ratio(ours: Sequence[Part], theirs: Sequence[Part], at_once: int) -> PairedRatio:
    """Of tokens per millisecond, over all rounds: requests are paired."""
    rounds = [
        [(m.decode_tokens, m.decode_ms, b.decode_tokens, b.decode_ms) for m, b in pairs]
        for pairs in (finished_pairs(a.meter, b.meter) for a, b in zip(ours, theirs, strict=True))
    ]
    return paired_ratio(np.array(rounds, float).sum(0).T, (1, -1, -1, 1), at_once=at_once)


def cost_ratio(ours: Part, theirs: Part, at_once: int) -> PairedRatio:
    """Of costs, theirs over ours."""
    columns = [[part.costs_ms[index] for index in sorted(part.tokens)] for part in (ours, theirs)]
    return paired_ratio(np.array(columns, float), (-1, 1), at_once=at_once)


def said(found: PairedRatio) -> str:
    assert found.ratio is not None
    assert found.ci95 is not None
    return f"{found.ratio:.3f} ({found.ci95[0]:.3f} to {found.ci95[1]:.3f})"


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 4, 16])
@pytest.mark.parametrize("method", [method for method in PAIRS if method != "none"])
def test_as_good_as_the_best_fixed_length(method: str, concurrency: int) -> None:
    """And as plain decoding, which is length 0; tokens are the same with every length."""
    engine, given = measured_engine(method), requests()[: NUM_REQUESTS[concurrency]]
    engine.tokenize(given)
    parts: dict[int, list[Part]] = {length: [] for length in (AUTO, *range(MOST + 1))}
    for number in range(ROUNDS):
        lengths = deque(parts)
        lengths.rotate(-2 * number)  # no length is always the first
        for length in lengths:
            parts[length].append(run(engine, given, concurrency, length))
    plain = parts[0][0].tokens
    assert all(part.tokens == plain for of_one in parts.values() for part in of_one)
    of_auto = parts[AUTO]
    best = min(range(MOST + 1), key=lambda length: parts[length][0].cost_ms)
    speeds = {
        length: sum(part.meter.output_tokens_per_second() or 0.0 for part in of_one)
        for length, of_one in parts.items()
    }
    fastest = max(range(MOST + 1), key=speeds.__getitem__)
    in_costs = {
        length: cost_ratio(of_auto[0], parts[length][0], concurrency) for length in (best, 0)
    }
    in_time = {length: speed_ratio(of_auto, parts[length], concurrency) for length in (fastest, 0)}
    used = of_auto[0].meter.steps.draft_lengths.used(MOST)
    log.info(
        "%s, %d at once: in costs %s of K=%d, %s of none; in time %s of K=%d, %s of none; %s",
        *(method, concurrency, said(in_costs[best]), best, said(in_costs[0])),
        *(said(in_time[fastest]), fastest, said(in_time[0]), used),
    )
    for found in (*in_costs.values(), *in_time.values()):
        assert found.ci95 is not None
        assert found.ci95[1] >= LEAST
    assert all(found.ratio is not None and found.ratio >= WORST for found in in_costs.values())

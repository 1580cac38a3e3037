"""A number of drafts that is chosen per step against every fixed one, over the zoo's workload: in
steps times the costs measured in the same process, and in wall time. Both are logged."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import pytest
from graph_runs import PAIRS, graph_config, make_graph_engine

from hydraspec.config.schema import Dtype, PerStep
from hydraspec.engine.native.engine import NativeEngine
from hydraspec.metrics.meter import Meter, finished_pairs, speedup
from hydraspec.types import Completion, Request, SamplingParams, StepRecord
from hydraspec.zoo.recipe.evaluate import read_workload

log = logging.getLogger(__name__)

MOST = 6
AUTO = -1  # beside the fixed lengths 0 to MOST
ROUNDS = 2  # every length in turn, so that all see the same machine
LEAST = 0.97
NUM_REQUESTS = {1: 16, 4: 32, 16: 64}  # by requests at once; prompts of all kinds take turns


def requests() -> list[Request]:
    return [
        Request(
            index=index,
            id=str(index),
            messages=line["messages"],
            sampling=SamplingParams(max_tokens=line.get("max_tokens", 128)),
        )
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
    """One round of one length."""

    meter: Meter
    tokens: dict[int, list[int]]
    cost_ms: float


def run(engine: NativeEngine, given: Sequence[Request], concurrency: int, length: int) -> Part:
    table = engine.info.costs
    assert table is not None
    part = Part(Meter(given, num_speculative_tokens=MOST), {}, 0.0)
    with of_length(engine, length):
        for event in engine.run(given, concurrency=concurrency):
            if isinstance(event, Completion):
                part.meter.add_completion(event)
                part.tokens[event.index] = event.output_token_ids
            elif isinstance(event, StepRecord):
                part.meter.add_step(event)
                assert event.draft_length is not None
                num_decodes = sum(not step.is_prefill for step in event.requests)
                if num_decodes:
                    part.cost_ms += table.at(num_decodes, event.draft_length).step_ms
    return part


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 4, 16])
@pytest.mark.parametrize("method", [method for method in PAIRS if method != "none"])
def test_as_good_as_the_best_fixed_length(method: str, concurrency: int) -> None:
    """And as plain decoding, which is length 0; tokens are the same with every length."""
    engine, given = measured_engine(method), requests()[: NUM_REQUESTS[concurrency]]
    engine.tokenize(given)
    parts: dict[int, list[Part]] = {length: [] for length in (AUTO, *range(MOST + 1))}
    for _ in range(ROUNDS):
        for length, of_one in parts.items():
            of_one.append(run(engine, given, concurrency, length))
    plain = parts[0][0].tokens
    assert all(part.tokens == plain for of_one in parts.values() for part in of_one)
    costs = {length: of_one[0].cost_ms for length, of_one in parts.items()}
    best = min(range(MOST + 1), key=costs.__getitem__)
    in_costs = {length: costs[length] / costs[AUTO] for length in (best, 0)}
    speeds = {
        length: sum(part.meter.output_tokens_per_second() or 0.0 for part in of_one)
        for length, of_one in parts.items()
    }
    fastest = max(range(MOST + 1), key=speeds.__getitem__)
    in_time = {
        length: [
            speedup(finished_pairs(a.meter, b.meter), at_once=concurrency)
            for a, b in zip(parts[AUTO], parts[length], strict=True)
        ]
        for length in (fastest, 0)
    }
    used = parts[AUTO][0].meter.draft_lengths.used(MOST)
    found = f"costs {in_costs}, time {in_time}, used {used}"
    log.info("%s, %d at once, best %d, fastest %d: %s", method, concurrency, best, fastest, found)
    assert in_costs[best] >= LEAST
    assert in_costs[0] >= LEAST
    for pairs in in_time.values():
        assert max(pair.ci95[1] for pair in pairs if pair.ci95) >= LEAST

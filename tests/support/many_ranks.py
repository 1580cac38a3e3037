"""The lab's engine of several ranks, which are threads that each compute everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TypeVar

from graph_runs import zoo_requests
from thread_ranks import as_ranks

from hydraspec import factory
from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Engine
from hydraspec.parallel.engines.calls import follow
from hydraspec.parallel.engines.engine import ParallelEngine
from hydraspec.parallel.group import SOLO
from hydraspec.parallel.layout import Layout
from hydraspec.parallel.ranks import Ranks, acting_as
from hydraspec.types import Completion, Request, StepRecord

T = TypeVar("T")
Outputs = dict[int, tuple[list[int], str, list[tuple[list[int], int]]]]

NUM_REQUESTS = 6


def few(count: int = NUM_REQUESTS) -> list[Request]:
    """Short requests of the zoo's workload."""
    return zoo_requests(count, longest=10)


def requests_of(engine: Engine, count: int = NUM_REQUESTS) -> list[Request]:
    """The same, tokenised."""
    requests = few(count)
    engine.tokenize(requests)
    return requests


def over_ranks(
    layout: Layout, config: RunConfig, lab: Callable[[Engine], T], *, splits: bool = False
) -> T:
    """What `lab` returns on rank 0; with `splits` tensor-parallel ranks share the layers."""

    def work(ranks: Ranks) -> T | None:
        with acting_as(ranks if splits else replace(ranks, group=SOLO)):
            if ranks.rank > 0:
                follow(config)
                return None
            with closing(factory.build_engine(config)) as engine:
                assert isinstance(engine, ParallelEngine)
                return lab(engine)

    found: T = as_ranks(layout, work)[0]  # type: ignore[assignment]
    return found


def outputs(engine: Engine, requests: Sequence[Request], concurrency: int | None = None) -> Outputs:
    """By request: tokens, why it ended, and each verify step's drafts and accepted count."""
    engine.tokenize(requests)
    verified: dict[int, list[tuple[list[int], int]]] = {r.index: [] for r in requests}
    found: Outputs = {}
    for event in engine.run(requests, concurrency=concurrency):
        if isinstance(event, Completion):
            ended = event.output_token_ids, event.finish_reason
            found[event.index] = (*ended, verified[event.index])
            continue
        assert isinstance(event, StepRecord)
        for part in event.requests:
            if part.draft_token_ids:
                verified[part.index].append((part.draft_token_ids, part.num_accepted))
    return found

"""One engine for the lab, many ranks behind it: calls, early ends, errors and replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TypeVar

import pytest
from graph_runs import graph_config, zoo_requests
from thread_ranks import as_ranks

from hydraspec import factory
from hydraspec.config.schema import RunConfig
from hydraspec.distributed.group import SOLO
from hydraspec.distributed.layout import Layout
from hydraspec.distributed.ranks import Ranks, acting_as
from hydraspec.engine.base import Engine
from hydraspec.engine.native.engine import NativeEngine
from hydraspec.engine.parallel.calls import follow
from hydraspec.engine.parallel.engine import ParallelEngine
from hydraspec.types import Completion, Request

T = TypeVar("T")


def over_ranks(layout: Layout, config: RunConfig, lab: Callable[[Engine], T]) -> T:
    """What `lab` returns on rank 0. Ranks of a replica all compute everything."""

    def work(ranks: Ranks) -> T | None:
        with acting_as(replace(ranks, group=SOLO)):
            if ranks.rank > 0:
                follow(config)
                return None
            with closing(factory.build_engine(config)) as engine:
                assert isinstance(engine, ParallelEngine)
                return lab(engine)

    found = as_ranks(layout, work)[0]
    assert found is not None
    return found


def outputs(
    engine: Engine, requests: Sequence[Request], concurrency: int | None = None
) -> dict[int, tuple[list[int], str]]:
    engine.tokenize(requests)
    return {
        event.index: (event.output_token_ids, event.finish_reason)
        for event in engine.run(requests, concurrency=concurrency)
        if isinstance(event, Completion)
    }


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return graph_config("gemma4_mtp", "none")


@pytest.fixture(scope="module")
def wanted(config: RunConfig) -> dict[int, tuple[list[int], str]]:
    return outputs(NativeEngine(config), zoo_requests(8))


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(data=2), Layout(tensor=2, data=2)])
@pytest.mark.parametrize("concurrency", [None, 3, 1])
def test_ranks_give_what_one_process_gives(
    layout: Layout, concurrency: int | None, config: RunConfig, wanted: object
) -> None:
    found = over_ranks(layout, config, lambda engine: outputs(engine, zoo_requests(8), concurrency))
    assert found == wanted

"""Data parallel: replicas serve one queue, and what they give is what one process gives."""

from __future__ import annotations

import pytest
from graph_runs import PAIRS, graph_config, zoo_requests
from many_ranks import NUM_REQUESTS, Outputs, few, outputs, over_ranks, requests_of

from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Engine
from hydraspec.engine.native import NativeEngine
from hydraspec.parallel.layout import Layout
from hydraspec.types import Completion, Request, StepRecord

REPLICAS = Layout(data=2)


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return graph_config("gemma4_mtp", "none")


@pytest.fixture(scope="module")
def wanted(config: RunConfig) -> Outputs:
    return outputs(NativeEngine(config), few())


@pytest.mark.parametrize(
    ("layout", "concurrency"),
    [(Layout(tensor=2, data=2), 3), (REPLICAS, None), (REPLICAS, 1)],
    ids=["tp2_dp2-3", "dp2-all", "dp2-1"],
)
def test_ranks_give_what_one_process_gives(
    layout: Layout, concurrency: int | None, config: RunConfig, wanted: Outputs
) -> None:
    def lab(engine: Engine) -> Outputs:
        return outputs(engine, few(), concurrency)

    assert over_ranks(layout, config, lab) == wanted


def test_replicas_share_the_requests_and_the_limit(config: RunConfig, wanted: Outputs) -> None:
    def lab(engine: Engine) -> list[StepRecord | Completion]:
        return list(engine.run(requests_of(engine), concurrency=3))

    events = over_ranks(REPLICAS, config, lab)
    records = [event for event in events if isinstance(event, StepRecord)]
    assert [record.step for record in records] == list(range(len(records)))
    served = {r: {s.index for e in records if e.replica == r for s in e.requests} for r in (0, 1)}
    assert served[0] | served[1] == set(wanted)
    assert not served[0] & served[1], "a request is served by one replica"
    assert all(served.values())
    assert max(len(record.requests) for record in records) <= 2, "3 at once, over two replicas"
    assert records[0].num_replicas == 2
    assert {record.num_replicas for record in records} <= {1, 2}
    assert len({event.index for event in events if isinstance(event, Completion)}) == NUM_REQUESTS


def test_a_replica_without_requests_holds_nobody_up(config: RunConfig, wanted: Outputs) -> None:
    def lab(engine: Engine) -> Outputs:
        return outputs(engine, few(1))

    found = over_ranks(Layout(data=3), config, lab)
    assert found == {0: wanted[0]}


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("method", PAIRS)
def test_two_replicas_of_the_zoo(method: str, ahead: bool) -> None:
    """Greedy and sampled requests: tokens, drafts and accepted counts of one process."""
    config = graph_config(method, "none")
    config.engine.async_scheduling = ahead

    def requests() -> list[Request]:
        return zoo_requests(6) + zoo_requests(10, temperature=0.8, top_p=0.9)[6:]

    wanted = outputs(NativeEngine(config), requests())
    found = over_ranks(REPLICAS, config, lambda engine: outputs(engine, requests(), 5))
    assert found == wanted

"""Batches whose step costs are measured before a run: those that its requests can make."""

from __future__ import annotations

import pytest
from graph_runs import graph_config, make_graph_engine, zoo_requests

from hydraspec.config.schema import PerStep
from hydraspec.engine.costs import timed_size
from hydraspec.engine.native import NativeEngine
from hydraspec.engine.run.step_costs import Plane
from hydraspec.engine.schedule.admission import most_of_replica
from hydraspec.types import Request, StepRecord

NUM_REQUESTS = 6  # one more than there are slots


@pytest.mark.parametrize(
    ("num_conversations", "concurrency", "num_replicas", "wanted"),
    [
        (32, None, 1, 16),  # the slots
        (6, None, 1, 6),
        (6, 8, 1, 6),
        (32, 4, 1, 4),
        (32, 32, 1, 16),
        (32, 4, 2, 2),
        (32, 5, 2, 3),  # shared out as evenly as can be
        (32, 1, 2, 1),
        (3, None, 2, 2),
        (0, None, 1, 0),
    ],
)
def test_most_requests_at_once(
    num_conversations: int, concurrency: int | None, num_replicas: int, wanted: int
) -> None:
    assert most_of_replica(num_conversations, concurrency, 16, num_replicas) == wanted


def engine_of() -> tuple[NativeEngine, list[Request]]:
    config = graph_config(
        "gemma4_mtp",
        "none",
        k=PerStep.auto,
        max_speculative_tokens=2,
        max_num_batched_tokens=512,  # prompts are read in one step
    )
    engine, requests = make_graph_engine(config, None), zoo_requests(NUM_REQUESTS)
    engine.tokenize(requests)
    return engine, requests


class Watched:
    """The steps that are run to be timed, and the prompts of each run, by its batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hydraspec.engine.run.step_costs.NUM_STEPS", 2)
        monkeypatch.setattr("hydraspec.engine.run.step_costs.TOKENS_PER_RUN", 16)
        self.steps: list[tuple[int, object]] = []
        self.prompts: list[list[tuple[int, ...]]] = []
        add, time = Plane.add, Plane._time

        def added(plane: Plane, step: StepRecord) -> None:
            self.steps.append((len(step.requests), timed_size(step)))
            add(plane, step)

        def timed(plane: Plane, requests: list[Request]) -> None:
            self.prompts.append([tuple(r.prompt_token_ids or ()) for r in requests])
            time(plane, requests)

        monkeypatch.setattr(Plane, "add", added)
        monkeypatch.setattr(Plane, "_time", timed)


@pytest.mark.parametrize(
    ("concurrency", "batches"), [(1, (1,)), (3, (1, 2, 3)), (None, (1, 2, 4, 5)), (8, (1, 2, 4, 5))]
)
def test_only_batches_that_can_occur_are_measured(
    concurrency: int | None, batches: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A larger one costs time at the start and chooses nothing. It is that of the largest after."""
    watched = Watched(monkeypatch)
    engine, requests = engine_of()
    engine.prepare(requests, concurrency=concurrency)
    table = engine.info.costs
    assert table is not None
    assert table.batches == batches
    assert max(size for size, _ in watched.steps) == batches[-1]
    assert table.at(16, 2).step_ms == table.at(batches[-1], 2).step_ms


def test_the_same_steps_run_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks measure side by side, whatever their clocks say."""
    watched, found = Watched(monkeypatch), []
    for _ in range(2):
        engine, requests = engine_of()
        engine.prepare(requests, concurrency=3)
        found.append((watched.steps[:], watched.prompts[:]))
        watched.steps.clear()
        watched.prompts.clear()
    assert found[0] == found[1]


def test_requests_take_turns_where_few_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """How often drafts were accepted comes from as many requests as there are slots; of all that
    run at once each run has the same."""
    watched = Watched(monkeypatch)
    engine, requests = engine_of()
    given = [tuple(request.prompt_token_ids or ()) for request in requests]
    assert len(set(given)) == NUM_REQUESTS
    engine.prepare(requests, concurrency=2)
    in_slots = [[given[i % 5] for i in range(2 * n, 2 * n + 2)] for n in range(5)]
    pairs = [prompts for prompts in watched.prompts if len(prompts) == 2]
    assert len(pairs) > 1
    assert pairs == in_slots[: len(pairs)]
    watched.prompts.clear()
    engine, requests = engine_of()
    engine.prepare(requests)
    assert all(prompts == given[: len(prompts)] for prompts in watched.prompts)

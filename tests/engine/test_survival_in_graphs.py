"""Drafts left out by their estimated survival: alike with graphs, and a step ahead of results."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
from graph_runs import attention_as_on_devices, graph_config, make_graph_engine, zoo_requests
from grids import slow_unless
from recorded_graphs import RecordedOps

from hydraspec.config.options import DSparkOptions
from hydraspec.types import Completion, RequestStep, StepRecord

LEAST = 0.9
MODES = ("none", "full", "full_and_piecewise", "full_decode_only", "piecewise")
# Tokens by request, and of each of its verifications (by tokens before it) drafts and estimates.
Found = tuple[dict[int, list[int]], dict[tuple[int, int], tuple[list[int], list[float]]]]


@pytest.fixture(autouse=True)
def _static_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    attention_as_on_devices(monkeypatch)


def decode(mode: str, ahead: bool, least: float | None) -> tuple[Found, set[int]]:
    """The results of six requests, and the numbers of rows of their decode steps."""
    config = graph_config("dspark", mode, sizes=(5,), options=DSparkOptions(min_survival=least))
    config.engine.async_scheduling = ahead
    engine = make_graph_engine(config, None if mode == "none" else RecordedOps())
    requests = zoo_requests(6)
    engine.tokenize(requests)
    outputs, parts = {}, list[RequestStep]()
    for event in engine.run(requests, concurrency=None):
        if isinstance(event, Completion):
            outputs[event.index] = event.output_token_ids
        elif isinstance(event, StepRecord):
            parts += [part for part in event.requests if not part.is_prefill]
    verified = {
        (part.index, part.num_computed_tokens): (
            part.draft_token_ids,
            [round(each, 5) for each in part.draft_survivals or []],
        )
        for part in parts
    }
    return (outputs, verified), {part.num_rows for part in parts}


@cache
def plain(least: float | None) -> tuple[Found, set[int]]:
    """Eager steps, each scheduled once the results before it are in."""
    return decode("none", False, least)


def test_fewer_drafts_and_the_same_tokens() -> None:
    (tokens, verified), rows = plain(LEAST)
    assert tokens == plain(None)[0][0]
    assert len({len(drafts) for drafts, _ in verified.values()}) > 2
    assert len(rows) > 1, "steps have as many rows as drafts are worth"


@pytest.mark.parametrize(
    ("mode", "ahead"),
    slow_unless(lambda *case: case == ("full_and_piecewise", True), product(MODES, (False, True))),
)
def test_graphs_and_steps_ahead_change_nothing(mode: str, ahead: bool) -> None:
    """Catches estimates of another step or slot, and a graph that keeps those of its capture."""
    found, rows = decode(mode, ahead, LEAST)
    assert found == plain(LEAST)[0]
    assert (rows == {4}) == ahead

"""Logits of a prompt from an engine whose steps run as graphs, which keep none."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from graph_runs import (
    attention_as_on_devices,
    graph_config,
    make_graph_engine,
    run_requests,
    zoo_requests,
)
from recorded_graphs import RecordedOps

from hydraspec.types import Batch, TargetStep

FEW = 4


@pytest.fixture(autouse=True)
def _static_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    attention_as_on_devices(monkeypatch)


@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.slow), True])
def test_logits_of_a_prompt_are_had_beside_graphs(ahead: bool) -> None:
    """A prompt of 9 tokens would fit a mixed graph, one of 30 fits none."""
    plain = make_graph_engine(graph_config("gemma4_mtp", "none"), None)
    config = graph_config("gemma4_mtp", "full", sizes=(5,))
    config.engine.async_scheduling = ahead
    engine = make_graph_engine(config, RecordedOps())
    for length in (9, 30):
        tokens = [5 + n % 40 for n in range(length)]
        wanted = torch.from_numpy(plain.next_token_logits(tokens))
        found = torch.from_numpy(engine.next_token_logits(tokens))
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("lengths", [(1, 41), (41, 1)], ids=["of 1 first", "of 41 first"])
def test_logits_of_a_prompt_that_looks_like_a_decode(lengths: tuple[int, int]) -> None:
    """Without drafts, one row is a uniform batch: a prompt of 1 token is, and the last chunk of one
    of 41. Graphs of decodes keep no logits."""
    plain = make_graph_engine(graph_config("none", "none", k=0), None)
    backend = RecordedOps()
    engine = make_graph_engine(graph_config("none", "full", k=0, sizes=(5,)), backend)
    for length in lengths:
        tokens = [5 + n % 40 for n in range(length)]
        wanted, found = plain.next_token_logits(tokens), engine.next_token_logits(tokens)
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)
    assert backend.num_replays == 0
    run = run_requests(engine, zoo_requests(FEW))
    assert backend.num_replays > 0
    assert run.tokens == run_requests(plain, zoo_requests(FEW)).tokens


def test_logits_of_a_step_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of many requests over a large vocabulary are gigabytes."""
    engine = make_graph_engine(graph_config("gemma4_mtp", "full", sizes=(5,)), RecordedOps())
    runner, made = engine.parts.runner, []
    forward = runner.forward

    def watched(batch: Batch) -> TargetStep:
        step = forward(batch)
        made.append(weakref.ref(step.logits))
        return step

    monkeypatch.setattr(runner, "forward", watched)
    engine.next_token_logits([5, 6, 7])
    run_requests(engine, zoo_requests(FEW))
    assert len(made) > 3
    assert not [logits for logits in made if logits() is not None]

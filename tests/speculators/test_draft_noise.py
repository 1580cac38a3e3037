"""Sampled drafts of a round have separate noise, also where all steps are at one position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_runs import graph_config, make_graph_engine, run_requests, zoo_requests
from hydraspec_kernels.sampling.random_streams import DrawKey, Purpose
from torch import Tensor

from hydraspec.config.schema import DraftSampling
from hydraspec.speculators import draft_model
from hydraspec.types import Batch, RequestState


@pytest.mark.parametrize("method", ["gemma4_mtp", "eagle3", "peagle"])
def test_noise_is_keyed_by_the_predicted_position_and_the_drafts_number(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token after p is sampled, so draft i predicts p + 2 + i at any rotation of its step. The
    number tells it from what an earlier round drafted for the same position.
    """
    config = graph_config(method, "none", draft_sampling=DraftSampling.probabilistic)
    engine = make_graph_engine(config, None)
    keys: list[tuple[Tensor, int]] = []
    true_sample = draft_model.sample_with_probs

    def sample(logits: Tensor, temperature: Tensor, key: DrawKey, **rest: Any) -> Any:
        assert key.purpose is Purpose.DRAFT
        keys.append((key.position.clone(), key.index))  # type: ignore[arg-type]
        return true_sample(logits, temperature, key, **rest)

    speculator = engine.parts.runner.speculator
    true_propose, num_rounds = speculator.propose, 0

    def propose(target_step: Any, verdict: Any, batch: Batch, state: RequestState) -> Any:
        nonlocal num_rounds
        keys.clear()
        draft = true_propose(target_step, verdict, batch, state)
        newest = state.num_computed[batch.slots] - 1
        assert [index for _, index in keys] == ([] if draft is None else [0, 1, 2])
        for at, index in keys:
            assert at.equal(newest + 2 + index)
        num_rounds += len(keys) > 0
        return draft

    monkeypatch.setattr(draft_model, "sample_with_probs", sample)
    monkeypatch.setattr(speculator, "propose", propose)
    with torch.inference_mode():
        run_requests(engine, zoo_requests(2, longest=4, temperature=0.9))
    assert num_rounds > 3

"""A request meets nothing that others left in its slot or its blocks, and writes nowhere else."""

from __future__ import annotations

import pytest
import torch
from graph_runs import (
    PAIRS,
    assert_same,
    attention_as_on_devices,
    graph_config,
    make_graph_engine,
    run_requests,
)
from recorded_graphs import CalledAgain
from records import request

from hydraspec.config.schema import DraftSampling
from hydraspec.engine.native import NativeEngine
from hydraspec.types import Request, StepRecord

DRAFTERS = [name for name in PAIRS if name != "none"]
BLOCK = 4


def request_of(index: int, length: int, **sampling: object) -> Request:
    draw = torch.Generator().manual_seed(index)
    prompt = torch.randint(6, 200, (length,), generator=draw).tolist()
    return request(index, prompt_token_ids=prompt, seed=index, ignore_eos=True, **sampling)


def spoil(engine: NativeEngine) -> None:
    """Other tokens, other settings and NaN in everything that no request owns."""
    runner = engine.parts.runner
    state = runner.state
    state.token_ids.random_(6, 200)
    state.num_computed.random_(1, 50)
    for values in (state.temperature, state.top_p, state.min_p):
        values.uniform_(0.1, 0.9)
    state.top_k.random_(1, 3)
    state.seed.random_()
    if state.draft_probs is not None:
        state.draft_probs.fill_(torch.nan)
    for spec in runner.kv.specs:
        for layer in spec.layers:
            cache = runner.kv.caches[layer]
            assert cache is not None
            cache[spec.block_size :] = torch.nan


@pytest.mark.parametrize("method", DRAFTERS)
def test_slots_and_blocks_are_taken_as_they_are(method: str) -> None:
    """Three requests in two slots, sampled from drafts' distributions; a greedy one is among them.

    Catches drafts, probabilities, states or keys of a slot's last owner that are verified, drafted
    from or attended to.
    """
    config = graph_config(
        method,
        "none",
        block_size=BLOCK,
        max_num_seqs=2,
        max_num_batched_tokens=12,
        draft_sampling=DraftSampling.probabilistic,
    )
    engine = make_graph_engine(config, None)
    hot = {"temperature": 0.8, "max_tokens": 7}
    cut = hot | {"top_k": 90, "top_p": 0.99, "min_p": 0.001}
    requests = [request_of(0, 9, **hot), request_of(1, 14, **cut), request_of(2, 3, max_tokens=9)]
    clean = run_requests(engine, requests, concurrency=None)
    assert {len(tokens) for tokens in clean.tokens} == {7, 9}
    spoil(engine)
    assert_same(run_requests(engine, requests, concurrency=None), clean)


@pytest.mark.parametrize(
    ("method", "k", "on_a_device"),
    [
        ("eagle3", 3, False),
        ("peagle", 6, False),
        ("peagle", 3, True),
        ("mtp", 4, False),
    ],
)
def test_drafting_to_the_last_position_stays_in_the_requests_blocks(
    method: str, k: int, on_a_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests end by max_model_len, which stands at every place of a block in turn.

    What has no block would go to block 0, which no request owns and which stays zero.
    No draft is offered that could be emitted past the end.
    """
    if on_a_device:
        attention_as_on_devices(monkeypatch)
    prompts = (13, 20)
    longest = 29 + k % BLOCK
    config = graph_config(method, "none", k=k, block_size=BLOCK, max_model_len=longest)
    engine = make_graph_engine(config, CalledAgain() if on_a_device else None)
    requests = [request_of(i, length, max_tokens=99) for i, length in enumerate(prompts)]
    num_short = 0
    for event in engine.run(requests, concurrency=None):
        if isinstance(event, StepRecord):
            for part in event.requests:
                room = longest - part.num_computed_tokens - 2
                assert len(part.draft_token_ids) <= max(0, room)
                num_short += not part.is_prefill and room < k
            continue
        assert event.error is None
        assert len(event.output_token_ids) == longest - prompts[event.index]
        assert event.finish_reason == "length"
    assert num_short > 0, "no request came near the end"
    for cache in engine.parts.runner.kv.caches:
        assert cache is None or not cache[:BLOCK].any()
        assert cache is None or cache[BLOCK:].any()

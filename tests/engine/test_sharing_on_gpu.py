"""Requests of one step that share the blocks it fills, on a device: a read before the write would
give other tokens."""

from __future__ import annotations

import pytest
from graph_runs import PAIRS, graph_config, zoo_requests
from records import request

from hydraspec import factory
from hydraspec.config.schema import Device, Dtype
from hydraspec.types import Completion

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

NUM_REQUESTS, COMMON, BLOCK = 6, 75, 16


def answers(method: str, mode: str, *, caches: bool) -> list[Completion]:
    """Of one text's first tokens with another end each; all requests at once."""
    config = graph_config(
        *(method, mode),
        device=Device.cuda,
        dtype=Dtype.float32,
        sizes=(1, 2, 4, 6),
        max_num_seqs=NUM_REQUESTS,
        max_num_batched_tokens=700,
        max_model_len=160,
        block_size=BLOCK,
    )
    config.engine.prefix_caching = caches
    config.engine.kv_cache.memory_gib = 0.25
    engine = factory.build_engine(config)
    texts = zoo_requests(40)
    engine.tokenize(texts)
    words = [token for text in texts for token in text.prompt_token_ids or ()]
    prompts = [words[:COMMON] + words[200 + 9 * i : 203 + 14 * i] for i in range(NUM_REQUESTS)]
    requests = [
        request(i, prompt_token_ids=prompt, max_tokens=24, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]
    found = [e for e in engine.run(requests, concurrency=None) if isinstance(e, Completion)]
    engine.close()
    return sorted(found, key=lambda completion: completion.index)


@pytest.mark.parametrize("mode", ["none", "full_and_piecewise"])
@pytest.mark.parametrize("method", PAIRS)
def test_what_a_step_shares_was_written(method: str, mode: str) -> None:
    shared = answers(method, mode, caches=True)
    alone = answers(method, mode, caches=False)
    assert [c.error for c in shared] == [None] * NUM_REQUESTS
    cached = [completion.num_cached_tokens for completion in shared]
    assert cached[0] == 0
    assert min(cached[1:]) >= COMMON // BLOCK * BLOCK - BLOCK
    assert [c.output_token_ids for c in shared] == [c.output_token_ids for c in alone]

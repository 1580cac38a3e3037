"""Runs of one engine split over ranks, held against the run of one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache

import torch
from fuzz_stages import Pair, stage
from side_by_side import run_alone
from step_ahead import Watch, outputs
from thread_ranks import as_ranks

from hydraspec.config.schema import DraftSampling, Dtype, RunConfig
from hydraspec.engine.native import NativeEngine
from hydraspec.parallel.layout import Layout
from hydraspec.types import Request, SamplingParams

K = 3


def config_of(pair: Pair, dtype: Dtype = Dtype.float64, **changes: object) -> RunConfig:
    """Small steps: prompts are read in chunks, and more requests are offered than run."""
    found = stage(pair.stage, dtype)
    fields = {
        "max_model_len": min(200, found.target.max_position_embeddings),
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,
        "block_size": 8,
        "draft_sampling": DraftSampling.probabilistic,
        **changes,
    }
    return found.config(pair, k=K, **fields)


def mixed_requests(pair: Pair, dtype: Dtype = Dtype.float64) -> list[Request]:
    """Greedy and sampled requests of several lengths; stops and limits end some of them."""
    found = stage(pair.stage, dtype)
    prompts = [p for p in found.prompts if len(p) < 100]
    samplings = [
        SamplingParams(max_tokens=9, ignore_eos=True),
        SamplingParams(max_tokens=6),
        SamplingParams(max_tokens=8, temperature=0.8, seed=5, ignore_eos=True),
        SamplingParams(max_tokens=12, stop_token_ids=(_said(pair, dtype, prompts[3], 4),)),
        SamplingParams(max_tokens=1, ignore_eos=True),
        SamplingParams(max_tokens=7, temperature=1.2, top_k=8, seed=9, ignore_eos=True),
        SamplingParams(max_tokens=11, ignore_eos=True),
    ]
    return [
        Request(index=i, id=str(i), sampling=sampling, prompt_token_ids=list(prompts[i]))
        for i, sampling in enumerate(samplings)
    ]


@cache
def _said(pair: Pair, dtype: Dtype, prompt: tuple[int, ...], index: int) -> int:
    """The token that greedy decoding says at `index` after a prompt."""
    sampling = SamplingParams(max_tokens=index + 1, ignore_eos=True)
    request = Request(index=0, id="0", sampling=sampling, prompt_token_ids=list(prompt))
    engine = stage(pair.stage, dtype).engine(config_of(pair, dtype))
    return run_alone(engine, [request]).completions[0].output_token_ids[index]


def run_over(
    layout: Layout, config: RunConfig, requests: Sequence[Request], concurrency: int | None = None
) -> list[Watch]:
    """What each rank saw."""

    def work(ranks: object) -> Watch:
        return run_alone(NativeEngine(copy.deepcopy(config)), requests, concurrency)

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        return as_ranks(layout, work)
    finally:
        torch.set_num_threads(threads)


def assert_same_everywhere(runs: Sequence[Watch]) -> Watch:
    """Every rank saw the same steps; returns the first rank's."""
    first = runs[0]
    for other in runs[1:]:
        assert outputs(other) == outputs(first)
        assert [r.requests for r in other.records] == [r.requests for r in first.records]
        assert [r.kv_usage for r in other.records] == [r.kv_usage for r in first.records]
    return first

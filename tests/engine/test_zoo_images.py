"""The zoo's target that reads pictures, with each drafter, on workload=images: the text is the
target's own in small steps, under cache pressure, after prefix hits and over ranks.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from side_by_side import assert_same_run, run_alone
from staged import assert_same_everywhere, run_over
from step_ahead import Watch
from tiny_targets import run_config

from hydraspec.config.schema import RunConfig, Weights, WorkloadConfig
from hydraspec.engine.native import NativeEngine
from hydraspec.parallel.layout import Layout
from hydraspec.types import Request, SamplingParams
from hydraspec.workloads.reading import read

NAME = "tiny_gemma4_images"
DRAFTERS = {"none": None, "gemma4_mtp": f"zoo:{NAME}-assistant", "eagle3": f"zoo:{NAME}-eagle3"}
METHODS = [method for method in DRAFTERS if method != "none"]
NUM_REQUESTS = 8  # two of each category
LAYOUTS = {"tp2": Layout(tensor=2), "pp2": Layout(pipeline=2)}


def settings_of(method: str, **changes: Any) -> RunConfig:
    """In float64. A step holds little more than one picture, so that prompts of two are cut."""
    given = {"max_num_seqs": 3, "max_num_batched_tokens": 80, "max_model_len": 256, **changes}
    given |= {"block_size": 16} | changes
    drafter = DRAFTERS[method]
    config = run_config(
        f"zoo:{NAME}", method=method, drafter=drafter, weights=Weights.checkpoint, **given
    )
    config.workload = WorkloadConfig(name="images", num_requests=NUM_REQUESTS)
    config.sampling.max_tokens = 20
    return config


@cache
def asked() -> list[Request]:
    """The workload's requests, with prompts in token ids."""
    config = settings_of("none")
    workload = read(config)
    assert workload is not None
    NativeEngine(config).tokenize(workload.requests)
    assert not any(request.error for request in workload.requests)
    return workload.requests


def tokens_of(seen: Watch) -> dict[int, list[int]]:
    return {index: done.output_token_ids for index, done in sorted(seen.completions.items())}


@cache
def plain(*, is_long: bool = False) -> dict[int, list[int]]:
    """One request at a time, without drafts, in whole prompts."""
    config = settings_of("none", max_num_seqs=1, max_num_batched_tokens=512)
    config.engine.prefix_caching = False
    return tokens_of(run_alone(NativeEngine(config), prolonged() if is_long else asked()))


def prolonged() -> list[Request]:
    """The requests with answers that go on after their stop token, so that caches fill up."""
    sampling = SamplingParams(max_tokens=48, ignore_eos=True)
    return [replace(request, sampling=sampling) for request in asked()]


@pytest.mark.parametrize("method", METHODS)
def test_drafts_in_small_steps_change_no_token(method: str) -> None:
    """Asked twice, so that pictures are hits the second time, but never one for another."""
    settings = settings_of(method)
    settings.engine.kv_cache.memory_gib = 0.1  # for all prompts
    engine = NativeEngine(settings)
    again = [replace(r, index=r.index + NUM_REQUESTS, id=f"{r.id} again") for r in asked()]
    seen = run_alone(engine, [*asked(), *again], 4)
    found = tokens_of(seen)
    assert found == {i: plain()[i % NUM_REQUESTS] for i in range(2 * NUM_REQUESTS)}
    cached = [seen.completions[request.index].num_cached_tokens for request in (*asked(), *again)]
    assert max(cached[:NUM_REQUESTS]) < 64 <= min(cached[NUM_REQUESTS:])
    parts = [part for steps in seen.decodes.values() for part in steps]
    offered, accepted = (sum(of) for of in zip(*((len(d), n) for _, d, n, _ in parts), strict=True))
    assert 0.7 * offered < accepted
    digests = {span.digest for request in asked() for span in request.spans}
    assert engine.parts.runner.images.num_encoded == len(digests)


@pytest.mark.parametrize("method", METHODS)
def test_preemption_changes_no_token(method: str) -> None:
    settings = settings_of(method, max_num_seqs=6, block_size=4)
    ample = NativeEngine(copy.deepcopy(settings)).parts.runner.kv.num_bytes
    settings.engine.kv_cache.memory_gib = 0.3 * ample / (1 << 30)
    seen = run_alone(NativeEngine(settings), prolonged())
    assert sum(record.num_preempted for record in seen.records) > 0
    assert tokens_of(seen) == plain(is_long=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_ranks_give_what_one_process_gives(method: str, layout: str) -> None:
    settings, some = settings_of(method), asked()[:4]
    alone = run_alone(NativeEngine(copy.deepcopy(settings)), some)
    found = assert_same_everywhere(run_over(LAYOUTS[layout], settings, some))
    assert_same_run(found, alone)
    assert tokens_of(found) == {index: plain()[index] for index in range(4)}

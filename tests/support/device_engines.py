"""What ranks with a CUDA device each check of whole engines: float32 tokens, against one device."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from graph_runs import PAIRS, QUANTISED, Run, graph_config, run_requests, zoo_requests

from hydraspec.config.schema import Device, Dtype, RunConfig
from hydraspec.engine.native import NativeEngine
from hydraspec.lab.verdict import E4M3_ROUNDING
from hydraspec.metrics.lossless import rounds_inputs
from hydraspec.parallel.layout import Layout
from hydraspec.parallel.ranks import ALONE, Ranks, acting_as
from hydraspec.parallel.stages import link_stages
from hydraspec.parallel.watch import ALONE as UNWATCHED
from hydraspec.types import Request

WAIT_S = 120.0  # for the other ranks, which compile and run an engine of one device before
# Targets that no pair with a usual drafter has, beside the pairs.
ALL_PAIRS: dict[str, tuple[str, tuple[str, str | None]]] = {
    **{name: (name, pair) for name, pair in (PAIRS | QUANTISED).items()},
    "gemma4_mtp on e": ("gemma4_mtp", ("tiny_gemma4_e", "tiny_gemma4_e-assistant")),
    "gemma4_mtp on moe": ("gemma4_mtp", ("tiny_gemma4_moe", "tiny_gemma4_moe-assistant")),
    "gemma4_mtp on unified": (
        *("gemma4_mtp", ("tiny_gemma4_unified", "tiny_gemma4_unified-assistant")),
    ),
    "gemma4_mtp on images": (
        *("gemma4_mtp", ("tiny_gemma4_images", "tiny_gemma4_images-assistant")),
    ),
    "eagle3 on images": ("eagle3", ("tiny_gemma4_images", "tiny_gemma4_images-eagle3")),
}


def engine_chooses_the_tokens_of_one_device(world: Any, pair: str) -> None:
    """Tensor-parallel ranks, with graphs of whole decode steps."""
    group = world.symmetric(wait_s=WAIT_S)
    _check_everywhere(
        world, pair, Ranks(layout=Layout(tensor=world.size), rank=world.rank, group=group)
    )


def stages_choose_the_tokens_of_one_device(world: Any, pair: str, *, ahead: bool = False) -> None:
    """Pipeline stages, with graphs of what each computes."""
    layout, timeout = Layout(pipeline=world.size), timedelta(seconds=WAIT_S)
    link = link_stages(layout, world.rank, UNWATCHED, backend="nccl", timeout=timeout)
    ranks = Ranks(layout=layout, rank=world.rank, link=link)
    _check_everywhere(world, pair, ranks, ahead=ahead)


def stages_ahead_choose_the_tokens_of_one_device(world: Any, pair: str) -> None:
    """The same where steps are launched before the results that they follow are read."""
    stages_choose_the_tokens_of_one_device(world, pair, ahead=True)


def _check_everywhere(world: Any, pair: str, ranks: Ranks, *, ahead: bool | None = None) -> None:
    """Every rank has the same tokens and drafts. ahead: engine.async_scheduling."""
    method, models = ALL_PAIRS[pair]
    config = graph_config(
        method, "full_and_piecewise", device=Device.cuda, dtype=Dtype.float32, pair=models
    )
    config.engine.kv_cache.memory_gib = 1.0
    config.engine.async_scheduling = ahead
    run = check_engines(config, ranks, zoo_requests(8))
    numbers = [n for tokens in run.tokens for n in tokens]
    numbers += [n for index in sorted(run.drafts) for draft in run.drafts[index] for n in draft]
    count = torch.tensor([len(numbers)], device=world.device)
    world.same_everywhere(count)
    world.same_everywhere(torch.tensor(numbers, device=world.device))


def check_engines(config: RunConfig, ranks: Ranks, requests: list[Request]) -> Run:
    """This rank's run, whose tokens are those of one device by the margin rule."""
    with acting_as(ALONE):
        alone = NativeEngine(config)
    requests = copy.deepcopy(requests)
    wanted = run_requests(alone, requests)
    with acting_as(ranks):
        engine = NativeEngine(config)
    assert engine.parts.target.memory_bytes() < alone.parts.target.memory_bytes()
    found = run_requests(engine, copy.deepcopy(requests))
    for request in requests:
        prompt = request.prompt_token_ids
        assert prompt is not None
        ours, theirs = found.outputs[request.index], wanted.outputs[request.index]
        if ours != theirs:
            assert_parts_at_near_tie(alone, list(prompt), ours[0], theirs[0])
    if config.method.num_speculative_tokens:
        assert found.num_accepted > 0
        assert abs(found.num_accepted - wanted.num_accepted) <= 0.2 * wanted.num_accepted
    return found


def assert_parts_at_near_tie(
    engine: NativeEngine, prompt: list[int], ours: list[int], theirs: list[int]
) -> None:
    """As scenarios.assert_near_tie, for tokens alone; for inputs rounded to e4m3 by the verdict's
    rule."""
    pairs = zip(ours, theirs, strict=False)
    common = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
    assert common is not None, "one output is the beginning of the other"
    logits = np.sort(engine.next_token_logits(prompt + theirs[:common]))
    share = 8 * np.finfo(np.float32).eps
    if rounds_inputs(engine.info.quantization, engine.info.dtype):
        share = E4M3_ROUNDING
    margin, allowed = logits[-1] - logits[-2], share * np.abs(logits).max()
    assert margin <= allowed, f"token {common}: margin {margin}, allowed {allowed}"

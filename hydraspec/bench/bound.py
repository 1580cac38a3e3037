"""The time that a mixed load would take if prompts and full decode steps were all there is."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from dataclasses import replace

from hydraspec.bench.passes import Passes
from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Engine
from hydraspec.metrics.files import Json
from hydraspec.types import Request, StepRecord

log = logging.getLogger(__name__)

UNSETTLED_STEPS = 2  # first decode steps of a pass; left out where others follow


def bound_of(
    config: RunConfig, engine: Engine, requests: Sequence[Request], last: Json
) -> Json | None:
    """(output tokens / slots / tokens per step) x time of a full step + prompt tokens / prefill
    rate, with this engine's own times, and the `last` pass over it.

    The full step is the median decode step with every slot in use, over requests of the load's mean
    lengths. The prefill rate is that of the load's own prompts, each followed by one token. None
    from an engine that reports completions only, or where no step was full.
    """
    if last["num_steps"] is None:
        return None
    slots = min(config.engine.max_num_seqs, len(requests))
    step_ms = _full_step_ms(engine, requests, slots)
    if step_ms is None:
        return None
    num_prompt = sum(len(request.prompt_token_ids or ()) for request in requests)
    prefill = Passes(engine, [_shortened(request, 1) for request in requests])
    for _ in range(2):  # the first may compile kernels
        prefill.run()
    per_step = last["acceptance_length"] or 1.0
    decode_s = last["num_output_tokens"] / slots / per_step * step_ms / 1e3
    seconds = decode_s + prefill.seconds[-1]
    ratio = last["seconds"] / seconds
    log.info("bound %.2f s: full step %.3f ms; ratio %.2f", seconds, step_ms, ratio)
    return {
        "seconds": seconds,
        "ratio": ratio,
        "full_step_ms": step_ms,
        "tokens_per_step": per_step,
        "prompt_tokens": num_prompt,
        "prefill_tokens_per_second": num_prompt / prefill.seconds[-1],
    }


def _full_step_ms(engine: Engine, requests: Sequence[Request], slots: int) -> float | None:
    """Median wall time of the decode steps in which `slots` requests take part."""
    prompts = [request.prompt_token_ids or [] for request in requests]
    length = round(statistics.fmean(map(len, prompts)))
    num_tokens = round(statistics.fmean(request.sampling.max_tokens for request in requests))
    drawn = [token for prompt in prompts for token in prompt]
    equal = [
        replace(
            _shortened(requests[i], max(2, num_tokens)),
            prompt_token_ids=drawn[i * length : (i + 1) * length],
        )
        for i in range(slots)
    ]
    passes = Passes(engine, equal)
    passes.run()
    times = [step.total_ms for step in passes.steps if _is_full(step, slots)]
    settled = times[UNSETTLED_STEPS:] or times
    return statistics.median(settled) if settled else None


def _is_full(step: StepRecord, slots: int) -> bool:
    return len(step.requests) == slots and not any(part.is_prefill for part in step.requests)


def _shortened(request: Request, num_tokens: int) -> Request:
    return replace(request, sampling=replace(request.sampling, max_tokens=num_tokens))

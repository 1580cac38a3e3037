"""Test, after the measured rounds, whether sampled outputs have the target's distribution.

Some prompts are sampled many times with the method and with the baseline, and the first tokens of
the samples are compared (metrics/distribution.py, ADR 38).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Engine, closing_run
from hydraspec.lab.rounds import Measurement
from hydraspec.metrics.distribution import ENDED, LEVEL, Samples, same_distribution
from hydraspec.metrics.lossless import MORE_VARIED
from hydraspec.metrics.paired import POWER, balanced
from hydraspec.metrics.summary import Distribution
from hydraspec.types import Completion, Request
from hydraspec.workloads.reading import request_seed

FAILED = ENDED - 1  # in place of the tokens of an output with an error
STREAMS = {"method": 1 << 40, "baseline": 1 << 41}  # first indices for seeds, above any workload's


def check(config: RunConfig, measurement: Measurement) -> tuple[Distribution | None, list[str]]:
    """The entry of summary.json for sampled outputs, None if none were compared, and warnings."""
    count, baseline = config.metrics.distribution, measurement.baseline
    if count is None or baseline is None:
        return None, []
    chosen = _chosen(measurement.requests, config.metrics.distribution_prompts)
    if not chosen:
        key = f"metrics.distribution={count}"
        return None, [f"{key} has no effect: no request samples (sampling.temperature is 0)"]
    length = measurement.method.engine.info.num_speculative_tokens + 2
    sides = {"method": measurement.method.engine, "baseline": baseline.engine}
    drawn = {
        side: _drawn(engine, _requests(chosen, count, length, config.seed, side), config)
        for side, engine in sides.items()
    }
    shape = (len(chosen), count, length)
    ours, theirs = (_as_samples(drawn[side], shape) for side in sides)
    kept = [
        i for i in range(len(chosen)) if (ours[i] != FAILED).all() and (theirs[i] != FAILED).all()
    ]
    if not kept:
        return None, ["metrics.distribution: every prompt ended with an error in some sample"]
    found = same_distribution(ours[kept], theirs[kept])
    warnings = [
        f"metrics.distribution: request {chosen[i].id} is left out: a sample ended with an error"
        for i in range(len(chosen))
        if i not in kept
    ]
    if found.says == "cannot_tell":
        warnings.append(
            f"metrics.distribution={count} tells nothing: the first tokens of samples hardly vary; "
            f"sample with {MORE_VARIED}"
        )
    if found.says == "different":
        warnings.append(
            "sampled outputs do not have the target's distribution: chi-squared "
            f"{found.chi2:.0f} with {found.degrees_of_freedom} degrees of freedom, p = "
            f"{found.p:.2g} (lossless.distribution); repeat with another seed, and report both runs"
        )
    return {
        "says": found.says,
        "p": found.p,
        "chi2": found.chi2,
        "degrees_of_freedom": found.degrees_of_freedom,
        "level": LEVEL,
        "detectable": found.detectable,
        "power": POWER,
        "num_prompts": len(kept),
        "num_samples": count,
        "num_tokens": length,
    }, warnings


def _chosen(requests: Sequence[Request], count: int) -> list[Request]:
    """The first requests that sample, of all categories in turn, without later turns."""
    sampled = [r for r in requests if r.sampling.temperature > 0 and r.after is None]
    order = balanced([r.category for r in sampled])
    return [sampled[i] for i in order[:count]]


def _requests(
    chosen: Sequence[Request], count: int, length: int, seed: int, side: str
) -> list[Request]:
    """Requests for `count` samples of each prompt, of `length` tokens, each with its own seed."""
    made: list[Request] = []
    for prompt in chosen:
        for _ in range(count):
            index = len(made)
            stream = request_seed(seed, STREAMS[side] + index)
            sampling = replace(prompt.sampling, seed=stream, max_tokens=length)
            made.append(
                replace(prompt, index=index, id=f"{index}", sampling=sampling, arrival_s=None)
            )
    return made


def _drawn(engine: Engine, requests: Sequence[Request], config: RunConfig) -> list[Completion]:
    with closing_run(engine, requests, config.workload.concurrency) as events:
        return [event for event in events if isinstance(event, Completion)]


def _as_samples(completions: Sequence[Completion], shape: tuple[int, int, int]) -> Samples:
    """Tokens [P, N, L] of N samples of P prompts: ENDED after an output's end, FAILED in all places
    of an output with an error."""
    samples = np.full(shape, ENDED, np.int64).reshape(-1, shape[2])
    for completion in completions:
        tokens = completion.output_token_ids[: shape[2]]
        samples[completion.index, : len(tokens)] = tokens
        if completion.finish_reason == "error":
            samples[completion.index] = FAILED
    return samples.reshape(shape)

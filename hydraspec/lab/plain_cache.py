"""What an FP8 KV cache costs in exactness: the target's outputs over a cache that rounds nothing
beside those of the run (docs/adr/0046)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hydraspec.config.schema import KVDtype, RunConfig
from hydraspec.engine.base import Engine, closing_run
from hydraspec.lab.rounds import Measurement
from hydraspec.metrics.kv_agreement import KVCacheAgreement, agreement
from hydraspec.metrics.paired import balanced
from hydraspec.types import Completion, ConfigurationError, Request

MOST_COMPARED = 16  # requests


def compare(
    config: RunConfig, measurement: Measurement
) -> tuple[KVCacheAgreement | None, list[str]]:
    """The entry of summary.json for an FP8 cache, None where nothing was compared, and warnings.

    Greedy requests without turns before them are compared, the first ones of all categories in
    turn: the outputs of the baseline, or of method=none.
    """
    is_none = config.method.name == "none"
    if config.engine.kv_cache.dtype is not KVDtype.fp8 or not (config.baseline or is_none):
        return None, []
    ours = (measurement.baseline or measurement.method).completions
    chosen = _chosen([r for r in measurement.requests if r.index in ours])
    if not chosen:
        return None, []
    try:
        theirs = _over_plain_cache(measurement.method.engine, chosen, config)
    except (ConfigurationError, torch.OutOfMemoryError) as error:
        why = str(error).splitlines()[0]
        return None, [f"outputs are not compared with those of a cache that rounds nothing: {why}"]
    pairs = [(ours[i].output_token_ids, each.output_token_ids) for i, each in theirs.items()]
    if not pairs:
        return None, []
    found, dtype = agreement(pairs), measurement.method.engine.info.dtype
    return found, [
        f"engine.kv_cache.dtype=fp8: {found['num_equal']} of {found['num_requests']} outputs are "
        f"those of a cache in {dtype}; on average {100 * found['equal_prefix']:.1f} % of an "
        "output's tokens come before the first difference"
    ]


def _over_plain_cache(
    engine: Engine, requests: Sequence[Request], config: RunConfig
) -> dict[int, Completion]:
    """What the target decodes without errors, by request index; none where it cannot be told."""
    plain = engine.plain_cache()
    if plain is None:
        return {}
    try:
        with closing_run(plain, requests, config.workload.concurrency) as events:
            done = [event for event in events if isinstance(event, Completion)]
    finally:
        plain.close()
    return {each.index: each for each in done if each.finish_reason != "error"}


def _chosen(requests: Sequence[Request]) -> list[Request]:
    greedy = [r for r in requests if r.sampling.temperature == 0 and r.after is None]
    return [greedy[i] for i in balanced([r.category for r in greedy])[:MOST_COMPARED]]

"""Sampling features that a step's requests use: known on the host, so that kernels skip others."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cache

from hydraspec.types import SamplingFlags, SamplingParams

GREEDY = SamplingFlags(any_greedy=True, any_top_k=False, any_top_p=False, any_min_p=False)


def flags_of(
    requests: Iterable[SamplingParams], samples: Iterable[bool] = itertools.repeat(True)
) -> tuple[bool, SamplingFlags]:
    """Returns whether all requests that sample in a step are greedy, and what its requests need of
    the sampler. Truncation has no effect on a greedy request.
    """
    any_greedy = any_top_k = any_top_p = any_min_p = False
    all_greedy = True
    for sampling, is_sampled in zip(requests, samples, strict=False):
        if sampling.temperature == 0.0:
            any_greedy = True
            continue
        all_greedy = all_greedy and not is_sampled
        any_top_k |= sampling.top_k > 0
        any_top_p |= sampling.top_p < 1.0
        any_min_p |= sampling.min_p > 0.0
    if all_greedy:
        return True, GREEDY
    return False, _flags(any_greedy, any_top_k, any_top_p, any_min_p)


@cache
def _flags(any_greedy: bool, any_top_k: bool, any_top_p: bool, any_min_p: bool) -> SamplingFlags:
    return SamplingFlags(
        any_greedy=any_greedy, any_top_k=any_top_k, any_top_p=any_top_p, any_min_p=any_min_p
    )

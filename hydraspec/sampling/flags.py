"""Sampling features that a step's requests use: known on the host, so that kernels skip others."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cache

from hydraspec.sampling.rules import has_biases, has_mask, has_penalties
from hydraspec.types import SamplingFlags, SamplingParams


def flags_of(
    requests: Iterable[SamplingParams], samples: Iterable[bool] = itertools.repeat(True)
) -> tuple[bool, SamplingFlags]:
    """Returns whether all requests that sample in a step are greedy, and what its requests need of
    the sampler. Truncation has no effect on a greedy request.
    """
    any_greedy = any_top_k = any_top_p = any_min_p = any_penalties = any_biases = False
    any_masks = any_logprobs = False
    all_greedy = True
    for sampling, is_sampled in zip(requests, samples, strict=False):
        any_penalties |= is_sampled and has_penalties(sampling)
        any_biases |= is_sampled and has_biases(sampling)
        any_masks |= is_sampled and has_mask(sampling)
        any_logprobs |= is_sampled and sampling.logprobs is not None
        if sampling.temperature == 0.0:
            any_greedy = True
            continue
        all_greedy = all_greedy and not is_sampled
        any_top_k |= sampling.top_k > 0
        any_top_p |= sampling.top_p < 1.0
        any_min_p |= sampling.min_p > 0.0
    changes = any_penalties, any_biases, any_masks, any_logprobs
    if all_greedy:
        return True, _flags(True, False, False, False, *changes)
    return False, _flags(any_greedy, any_top_k, any_top_p, any_min_p, *changes)


@cache
def _flags(
    any_greedy: bool,
    any_top_k: bool,
    any_top_p: bool,
    any_min_p: bool,
    any_penalties: bool,
    any_biases: bool,
    any_masks: bool,
    any_logprobs: bool,
) -> SamplingFlags:
    return SamplingFlags(
        any_greedy=any_greedy,
        any_top_k=any_top_k,
        any_top_p=any_top_p,
        any_min_p=any_min_p,
        any_penalties=any_penalties,
        any_biases=any_biases,
        any_masks=any_masks,
        any_logprobs=any_logprobs,
    )


GREEDY = flags_of([])[1]  # of steps whose requests take the argmax of unchanged logits

"""Sampling features that a step's requests use: known on the host, so that kernels skip others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from functools import cache, reduce
from operator import or_

from hydraspec.sampling.rules import has_biases, has_mask, has_penalties
from hydraspec.types import SamplingFlags, SamplingParams

# A request's needs are bits: those of SamplingFlags in their order, then this one.
DRAWS = 1 << len(fields(SamplingFlags))  # it samples, and is not greedy


def needs_of(sampling: SamplingParams) -> tuple[int, int]:
    """What a request needs of the sampler in a step where it does not sample, and where it does."""
    is_greedy = sampling.temperature == 0.0
    always = _bits(
        any_greedy=is_greedy,
        any_top_k=not is_greedy and sampling.top_k > 0,
        any_top_p=not is_greedy and sampling.top_p < 1.0,
        any_min_p=not is_greedy and sampling.min_p > 0.0,
    )
    sampled = _bits(
        any_penalties=has_penalties(sampling),
        any_biases=has_biases(sampling),
        any_masks=has_mask(sampling),
        any_logprobs=sampling.logprobs is not None,
    )
    return always, always | sampled | (0 if is_greedy else DRAWS)


def _bits(**flags: bool) -> int:
    places = {field.name: place for place, field in enumerate(fields(SamplingFlags))}
    return sum(1 << places[name] for name, holds in flags.items() if holds)


def flags_of(requests: Iterable[SamplingParams]) -> tuple[bool, SamplingFlags]:
    """The flags of a step in which all these requests sample; see `flags_from`."""
    return flags_from(needs_of(sampling)[True] for sampling in requests)


def flags_from(needs: Iterable[int]) -> tuple[bool, SamplingFlags]:
    """Returns whether all requests that sample in a step are greedy, and what its requests need of
    the sampler together. Truncation has no effect on a greedy request."""
    return _flags(reduce(or_, needs, 0))


@cache
def _flags(needs: int) -> tuple[bool, SamplingFlags]:
    held = {
        field.name: bool(needs >> place & 1) for place, field in enumerate(fields(SamplingFlags))
    }
    if needs & DRAWS:
        return False, SamplingFlags(**held)
    plain = {"any_greedy": True, "any_top_k": False, "any_top_p": False, "any_min_p": False}
    return True, SamplingFlags(**held | plain)


GREEDY = flags_of([])[1]  # of steps whose requests take the argmax of unchanged logits

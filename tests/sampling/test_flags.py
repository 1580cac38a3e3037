"""What a step's requests need of the sampler: each request says so once."""

from __future__ import annotations

import random

from hydraspec.sampling.flags import GREEDY, flags_from, flags_of, needs_of
from hydraspec.types import SamplingFlags, SamplingParams, Structured


def drawn(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7]),
        top_k=rng.choice([0, 0, 5]),
        top_p=rng.choice([1.0, 1.0, 0.9]),
        min_p=rng.choice([0.0, 0.0, 0.1]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
        min_tokens=rng.choice([0, 0, 3]),
        structured=rng.choice([None, None, Structured(kind="regex", text="a+")]),
        logprobs=rng.choice([None, None, 0]),
    )


def test_steps_need_what_their_requests_need() -> None:
    """500 random steps. Truncation counts where a request that is not greedy samples, also of those
    that only read their prompts; rules where their own request samples."""
    rng = random.Random(0)
    for _ in range(500):
        step = [(drawn(rng), rng.random() < 0.7) for _ in range(rng.randint(0, 4))]
        sampling = [params for params, samples in step if samples]
        at_random = [params for params, _ in step if params.temperature]
        all_greedy = all(params.temperature == 0 for params in sampling)
        flags = SamplingFlags(
            any_greedy=all_greedy or any(params.temperature == 0 for params, _ in step),
            any_top_k=not all_greedy and any(params.top_k for params in at_random),
            any_top_p=not all_greedy and any(params.top_p < 1 for params in at_random),
            any_min_p=not all_greedy and any(params.min_p for params in at_random),
            any_penalties=any(params.frequency_penalty for params in sampling),
            any_biases=any(params.min_tokens for params in sampling),
            any_masks=any(params.structured for params in sampling),
            any_logprobs=any(params.logprobs is not None for params in sampling),
        )
        found = flags_from(needs_of(params)[samples] for params, samples in step)
        assert found == (all_greedy, flags)
        if len(sampling) == len(step):
            assert flags_of(sampling) == found


def test_a_step_of_no_request_is_greedy() -> None:
    assert flags_from([]) == (True, GREEDY)
    assert flags_of([SamplingParams(temperature=0.0, top_k=5)])[1] == GREEDY

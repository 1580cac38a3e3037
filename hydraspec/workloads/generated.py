"""Workloads of seeded random tokens, for benchmarks."""

from __future__ import annotations

import numpy as np

from hydraspec.config.schema import RunConfig
from hydraspec.types import Request
from hydraspec.workloads.conversations import in_conversations, num_turns_in_all
from hydraspec.workloads.reading import Workload, fixed_length_sampling

STREAM = 0x776F726B  # mixed with the run's seed


REAL_TEXT = "workload=jsonl with prompts of your own"


def random_text_warning(source: str, remedy: str) -> str:
    """The warning of a run that measures acceptance on prompts of random tokens."""
    return (
        f"{source} has prompts of random tokens, so acceptance and speedup say nothing about real "
        f"text; to try: {remedy}"
    )


def random_requests(config: RunConfig, vocab_size: int) -> Workload:
    """The requests of a workload of random tokens, each decoded for exactly output_tokens."""
    rng = np.random.default_rng([config.seed, STREAM])
    make = {"random": _single, "shared_prefix": _shared_prefix, "multi_turn": _multi_turn}
    requests = make[config.workload.name](config, rng, vocab_size)
    places = {r.id: f"workload={config.workload.name}, request {r.index}" for r in requests}
    return Workload(requests=requests, places=places)


def _single(config: RunConfig, rng: np.random.Generator, vocab_size: int) -> list[Request]:
    size = config.workload
    count = min(size.limit or size.num_requests, size.num_requests)
    return [
        _request(config, index, str(index), rng.integers(0, vocab_size, size.prompt_tokens))
        for index in range(count)
    ]


def _shared_prefix(config: RunConfig, rng: np.random.Generator, vocab_size: int) -> list[Request]:
    """Requests with shared prefixes, in random order; ids are "<prefix>/<n>", n from 1."""
    size = config.workload
    prefixes = rng.integers(0, vocab_size, (size.num_prefixes, size.prefix_tokens))
    order = rng.permutation(np.repeat(np.arange(size.num_prefixes), size.requests_per_prefix))
    seen = [0] * size.num_prefixes
    requests = []
    for index, prefix in enumerate(order[: size.limit].tolist()):
        seen[prefix] += 1
        suffix = rng.integers(0, vocab_size, size.suffix_tokens)
        prompt = np.concatenate([prefixes[prefix], suffix])
        requests.append(_request(config, index, f"{prefix}/{seen[prefix]}", prompt))
    return requests


def _multi_turn(config: RunConfig, rng: np.random.Generator, vocab_size: int) -> list[Request]:
    size = config.workload
    return in_conversations(
        [
            _request(config, index, "", rng.integers(0, vocab_size, size.turn_tokens))
            for index in range(num_turns_in_all(config))
        ],
        size.num_turns,
    )


def _request(config: RunConfig, index: int, id_: str, prompt: np.ndarray) -> Request:
    sampling = fixed_length_sampling(config, index, config.workload.output_tokens)
    return Request(index=index, id=id_, sampling=sampling, prompt_token_ids=prompt.tolist())

"""Rules of the sampling keys."""

from __future__ import annotations

from collections.abc import Iterator

from hydraspec.config.engines import NATIVE
from hydraspec.config.messages import refusal
from hydraspec.config.ranges import SAMPLING_RANGES, entries, too_many_ends
from hydraspec.config.rules import Rule
from hydraspec.config.schema import RunConfig
from hydraspec.config.structured import STRUCTURED_RULES
from hydraspec.config.workloads import is_random

LOGPROBS = ("logprobs", "prompt_logprobs")
NUMBERS = (
    *("temperature", "top_k", "top_p", "min_p", "max_tokens", "min_tokens", "n"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


def check_sampling_entries(config: RunConfig) -> None:
    """Raise ConfigurationError for the first entry of a sampling key that is out of range."""
    for name in ("stop_token_ids", "logit_bias", "bad_words"):
        for place, known, value in entries(name, getattr(config.sampling, name)):
            if not known.allows(value):
                key, problem = f"sampling.{name}{place}", "is out of range"
                raise refusal(key, value, problem, allowed=known.allowed, remedy=known.remedy)


def within(key: str, name: str) -> Rule:
    """The rule that a key's value is in the range of the sampling parameter `name`."""
    known = SAMPLING_RANGES[name]
    return Rule(key, lambda v, c: known.allows(v), known.allowed, remedy=known.remedy)


def _logprobs(name: str) -> Iterator[Rule]:
    known, key = SAMPLING_RANGES[name], f"sampling.{name}"
    yield Rule(key, lambda v, c: v is None or known.allows(v), known.allowed, remedy=known.remedy)
    yield Rule(
        key,
        lambda v, c: v is None or c.engine.name == NATIVE,
        "null with engine={c.engine.name}",
        "is not available with engine={c.engine.name}",
        "leave the key out, or choose engine=native",
    )
    yield Rule(
        key,
        lambda v, c: v is None or c.parallelism.pipeline == 1,
        "null with parallelism.pipeline={c.parallelism.pipeline}",
        "is not available with pipeline stages, which hand over tokens alone",
        "leave the key out, or choose another parallelism",
    )


SAMPLING_RULES = (
    *(within(f"sampling.{name}", name) for name in NUMBERS),
    *(rule for name in LOGPROBS for rule in _logprobs(name)),
    Rule(
        "sampling.min_tokens",
        lambda least, c: least <= c.sampling.max_tokens,
        "0 to {c.sampling.max_tokens} (sampling.max_tokens)",
        "is more than the most",
        "lower it, or raise sampling.max_tokens",
    ),
    Rule(
        "sampling.stop_token_ids",
        lambda ids, c: not too_many_ends(c.sampling.min_tokens, len(ids)),
        lambda ids, c: too_many_ends(c.sampling.min_tokens, len(ids)),
        "has too many ids to ban",
        "leave some out, or sampling.min_tokens",
    ),
    Rule(
        "sampling.n",
        lambda n, c: n == 1 or c.sampling.temperature > 0,
        "1 with sampling.temperature=0",
        "asks for samples, which are all the same at temperature 0",
        "choose sampling=stochastic, or leave the key out",
    ),
    Rule(
        "sampling.n",
        lambda n, c: n == 1 or not (is_random(c.workload) or c.workload.name == "multi_turn"),
        "1 with workload={c.workload.name}",
        "asks for samples of prompts that have none",
        "leave the key out, or choose a workload of single prompts",
    ),
    Rule(
        "sampling.stop",
        lambda strings, c: "" not in strings,
        "strings of one character or more",
        "holds an empty string",
    ),
    *STRUCTURED_RULES,
)

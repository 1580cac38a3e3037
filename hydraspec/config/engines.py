"""Methods, options and keys that engines other than our own take; the native one takes everything
but the keys of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any

from hydraspec.config.messages import listing, show
from hydraspec.config.rules import Rule
from hydraspec.config.schema import (
    AUTO,
    Device,
    DraftSampling,
    Dtype,
    EngineConfig,
    RunConfig,
    Verification,
)

NATIVE, VLLM = "native", "vllm"
STAGES = (  # a warning
    "parallelism.pipeline with drafts: vLLM 0.26 does not send drafts to its first stage, so "
    "answers may be wrong; compare them with method=none"
)


@dataclass(slots=True, frozen=True, kw_only=True)
class Offer:
    """The values that an engine takes; others are refused."""

    methods: tuple[str, ...]
    keys: tuple[str, ...]  # of the engine's group
    verifications: tuple[Verification, ...] = (Verification.standard,)
    draft_samplings: tuple[DraftSampling, ...] = (DraftSampling.greedy,)


OFFERS = {
    "transformers": Offer(
        methods=("gemma4_mtp", "none"), keys=("device", "max_num_seqs", "num_threads")
    ),
    VLLM: Offer(
        methods=("eagle", "eagle3", "gemma4_mtp", "mtp", "none", "peagle"),
        keys=(
            *("async_scheduling", "device", "kv_cache.memory_gib", "max_num_batched_tokens"),
            *("max_num_seqs", "vllm.gpu_memory_utilization", "vllm.record_steps"),
        ),
        verifications=tuple(Verification),
        draft_samplings=tuple(DraftSampling),
    ),
}


def _offered(key: str, values: Callable[[Offer], list[str]], remedy: str) -> Rule:
    """A rule of what the engine offers, where it does not take everything."""

    def allowed(c: RunConfig) -> list[str]:
        return values(OFFERS[c.engine.name])

    return Rule(
        key,
        lambda given, c: getattr(given, "value", given) in (*allowed(c), AUTO),
        lambda given, c: listing(allowed(c)),
        "is not available with engine={c.engine.name}",
        remedy,
        when=lambda c: c.engine.name in OFFERS,
    )


def _settable(key: str) -> Iterator[Rule]:
    """A key of the engine that some engines lack keeps its default there."""
    default = attrgetter(key)(EngineConfig(name=""))

    def is_default(value: object, c: RunConfig) -> bool:
        return bool(value == default)

    def lacks_it(c: RunConfig) -> bool:
        return c.engine.name in OFFERS and key not in OFFERS[c.engine.name].keys

    yield Rule(
        f"engine.{key}",
        is_default,
        lambda value, c: f"keys of engine={c.engine.name}: {listing(OFFERS[c.engine.name].keys)}",
        "has no meaning with engine={c.engine.name}",
        "leave the key out, or choose engine=native",
        when=lacks_it,
    )
    if key.startswith("vllm."):
        yield Rule(
            f"engine.{key}",
            is_default,
            f"{show(default)}: it is a key of engine=vllm",
            "has no meaning with engine={c.engine.name}",
            "leave the key out, or choose engine=vllm",
            when=lambda c: c.engine.name not in OFFERS,
        )


def _unavailable(key: str, is_taken: Callable[[Any], object], allowed: str) -> Rule:
    remedy = "choose one of these, or engine=native"
    problem = "is not available with engine=vllm"
    return Rule(key, lambda value, c: is_taken(value), allowed, problem, remedy)


OFFERED = (
    _offered(
        "method.name",
        lambda offer: list(offer.methods),
        "choose one of these, or engine=native",
    ),
    _offered(
        "method.verification",
        lambda offer: [choice.value for choice in offer.verifications],
        "leave the key out, or choose engine=native",
    ),
    _offered(
        "method.draft_sampling",
        lambda offer: [choice.value for choice in offer.draft_samplings],
        "leave the key out, or choose engine=native",
    ),
    *chain.from_iterable(
        _settable(key)
        for key in (
            *("async_scheduling", "max_num_batched_tokens", "num_threads"),
            *("kv_cache.block_size", "kv_cache.memory_gib"),
            *("vllm.gpu_memory_utilization", "vllm.record_steps"),
        )
    ),
)

_RULES = (
    _unavailable("engine.device", lambda device: device is not Device.cpu, "auto, cuda"),
    _unavailable(
        "target.dtype",
        lambda dtype: dtype is not Dtype.float64,
        "bfloat16, float16, float32",
    ),
    Rule(
        "engine.vllm.gpu_memory_utilization",
        lambda share, c: 0 < share <= 1,
        "above 0, up to 1 (the whole device)",
    ),
    # They record draft token ids, and vLLM hands out the accepted ones only.
    _unavailable("metrics.steps", lambda steps: not steps, "false"),
    _unavailable("metrics.trace", lambda trace: not trace, "false"),
    Rule(  # vLLM loads most drafters as it loads the target, whatever it is told
        "method.weights",
        lambda weights, c: (
            weights is c.target.weights or c.method.name in ("none", "gemma4_mtp", AUTO)
        ),
        "{c.target.weights.value}",
        "is not available with engine=vllm, method={c.method.name} and "
        "target.weights={c.target.weights.value}",
        "add method.weights={c.target.weights.value}, or choose engine=native",
    ),
    Rule(
        "sampling.min_p",
        lambda min_p, c: not (min_p and c.sampling.temperature and c.method.name != "none"),
        "0",
        "is not available with engine=vllm and drafts",
        "leave the key out, or choose method=none or engine=native",
    ),
)
VLLM_RULES = tuple(replace(rule, when=lambda c: c.engine.name == VLLM) for rule in _RULES)

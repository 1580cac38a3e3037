"""What an engine other than our own can be asked for; the native one takes everything but the keys
of others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hydraspec.config.messages import listing, refusal, show
from hydraspec.config.schema import (
    AUTO,
    Device,
    DraftSampling,
    Dtype,
    EngineConfig,
    KVCacheConfig,
    MethodConfig,
    RunConfig,
    Verification,
    VllmConfig,
)

NATIVE, VLLM = "native", "vllm"
STAGES = (
    "parallelism.pipeline with drafts: vLLM 0.26 does not send drafts to its first stage, so "
    "answers may be wrong; compare them with method=none"
)


@dataclass(slots=True, frozen=True, kw_only=True)
class Offer:
    """What an engine takes; other values are refused."""

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


def check_offer(engine: EngineConfig, method: MethodConfig) -> None:
    """Refuse a method, an option of it or a key of the engine that `engine.name` has not."""
    offer = OFFERS.get(engine.name)
    if offer is None:
        _refuse_keys(engine, others=("vllm.",))
        return
    if method.name not in (*offer.methods, AUTO):
        raise refusal(
            "method.name",
            method.name,
            f"is not available with engine={engine.name}",
            allowed=listing(offer.methods),
            remedy="choose one of these, or engine=native",
        )
    options: tuple[tuple[str, str, list[str]], ...] = (
        ("verification", method.verification.value, [v.value for v in offer.verifications]),
        ("draft_sampling", method.draft_sampling.value, [v.value for v in offer.draft_samplings]),
    )
    for key, given, offered in options:
        if given not in offered:
            raise refusal(
                f"method.{key}",
                given,
                f"is not available with engine={engine.name}",
                allowed=listing(offered),
                remedy="leave the key out, or choose engine=native",
            )
    _refuse_keys(engine, keys=offer.keys)


def check_vllm(config: RunConfig) -> None:
    """What is only wrong together with engine=vllm."""
    if config.engine.name != VLLM:
        return
    if config.engine.device is Device.cpu:
        raise _unavailable("engine.device", "cpu", "auto, cuda")
    if config.target.dtype is Dtype.float64:
        raise _unavailable("target.dtype", "float64", "bfloat16, float16, float32")
    share = config.engine.vllm.gpu_memory_utilization
    if not 0 < share <= 1:
        raise refusal(
            "engine.vllm.gpu_memory_utilization",
            share,
            "is out of range",
            allowed="above 0, up to 1 (the whole device)",
        )
    for key, given in (("steps", config.metrics.steps), ("trace", config.metrics.trace)):
        if given:  # it records draft token ids, and vLLM hands out the accepted ones only
            raise _unavailable(f"metrics.{key}", True, "false")
    if config.parallelism.pipeline > 1 and config.method.name != "none":
        config.warnings.append(STAGES)
    _check_drafter_weights(config)
    sampling = config.sampling
    if sampling.min_p and sampling.temperature and config.method.name != "none":
        raise refusal(
            "sampling.min_p",
            sampling.min_p,
            "is not available with engine=vllm and drafts",
            allowed="0",
            remedy="leave the key out, or choose method=none or engine=native",
        )


def _check_drafter_weights(config: RunConfig) -> None:
    """vLLM loads most drafters as it loads the target, whatever it is told."""
    method, wanted = config.method, config.target.weights
    if method.name not in ("none", "gemma4_mtp", AUTO) and method.weights is not wanted:
        raise refusal(
            "method.weights",
            method.weights.value,
            f"is not available with engine=vllm, method={method.name} and "
            f"target.weights={wanted.value}",
            allowed=wanted.value,
            remedy=f"add method.weights={wanted.value}, or choose engine=native",
        )


def _unavailable(key: str, value: object, allowed: str) -> Exception:
    return refusal(
        key,
        value,
        "is not available with engine=vllm",
        allowed=allowed,
        remedy="choose one of these, or engine=native",
    )


def _refuse_keys(
    engine: EngineConfig, *, keys: tuple[str, ...] = (), others: tuple[str, ...] = ("",)
) -> None:
    """Refuse what is set, is none of `keys` and begins as one of `others`."""
    for key, given, default in _settable(engine):
        if given != default and key not in keys and key.startswith(others):
            allowed, instead = f"{show(default)}: it is a key of engine=vllm", VLLM
            if keys:
                allowed, instead = f"keys of engine={engine.name}: {listing(keys)}", NATIVE
            raise refusal(
                f"engine.{key}",
                given,
                f"has no meaning with engine={engine.name}",
                allowed=allowed,
                remedy=f"leave the key out, or choose engine={instead}",
            )


def _settable(engine: EngineConfig) -> Iterator[tuple[str, object, object]]:
    """Key, value and default of what not every engine knows."""
    untouched, cache, vllm = EngineConfig(name=engine.name), KVCacheConfig(), VllmConfig()
    for key in ("async_scheduling", "max_num_batched_tokens", "num_threads"):
        yield key, getattr(engine, key), getattr(untouched, key)
    for key in ("block_size", "memory_gib"):
        yield f"kv_cache.{key}", getattr(engine.kv_cache, key), getattr(cache, key)
    for key in ("gpu_memory_utilization", "record_steps"):
        yield f"vllm.{key}", getattr(engine.vllm, key), getattr(vllm, key)

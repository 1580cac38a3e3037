"""What an engine other than our own can be asked for; the native one takes everything."""

from __future__ import annotations

from hydraspec.config.messages import listing, refusal
from hydraspec.config.schema import (
    AUTO,
    DraftSampling,
    EngineConfig,
    KVCacheConfig,
    MethodConfig,
    Verification,
)

NATIVE = "native"
METHODS = {"transformers": ("gemma4_mtp", "none")}


def check_offer(engine: EngineConfig, method: MethodConfig) -> None:
    """Refuse a method, an option of it or a key of the engine that `engine.name` has not."""
    if engine.name not in METHODS:
        return
    instead = "choose one of these, or engine=native"
    methods = METHODS[engine.name]
    if method.name not in (*methods, AUTO):
        raise refusal(
            "method.name",
            method.name,
            f"is not available with engine={engine.name}",
            allowed=listing(methods),
            remedy=instead,
        )
    for key, given, offered in (
        ("verification", method.verification, Verification.standard),
        ("draft_sampling", method.draft_sampling, DraftSampling.greedy),
    ):
        if given is not offered:
            raise refusal(
                f"method.{key}",
                given.value,
                f"is not available with engine={engine.name}",
                allowed=str(offered.value),
                remedy="leave the key out, or choose engine=native",
            )
    _refuse_native_keys(engine)


def _refuse_native_keys(engine: EngineConfig) -> None:
    untouched, cache = EngineConfig(name=engine.name), KVCacheConfig()
    for key, given, default in (
        (
            "max_num_batched_tokens",
            engine.max_num_batched_tokens,
            untouched.max_num_batched_tokens,
        ),
        ("kv_cache.block_size", engine.kv_cache.block_size, cache.block_size),
        ("kv_cache.memory_gib", engine.kv_cache.memory_gib, cache.memory_gib),
    ):
        if given != default:
            raise refusal(
                f"engine.{key}",
                given,
                f"has no meaning with engine={engine.name}",
                allowed=f"keys of engine={engine.name}: device, max_num_seqs, num_threads",
                remedy="leave the key out, or choose engine=native",
            )

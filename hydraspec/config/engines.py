"""Rules of engines: methods and options that vLLM and transformers take (the native engine takes
all), and the KV cache of the native engine. config/vllm.py has the keys of engine=vllm."""

from __future__ import annotations

import math
from dataclasses import replace

from hydraspec.config.messages import listing
from hydraspec.config.rules import Rule
from hydraspec.config.schema import AUTO, Dtype, KVDtype, RunConfig

NATIVE, VLLM = "native", "vllm"
VLLM_KEYS = "engine.vllm"  # group of keys for vLLM alone, which a benchmark of it takes too
MAX_BLOCK_SIZE = 1024  # tokens; half a block per request and KV group is unused on average
_NO_STAGES = (
    "Pipeline parallelism is not supported for this model. Supported models implement the "
    "`SupportsPP` interface."
)
_NO_AUX_STATES = "eagle3 with pipeline parallel is not supported."
OVER_STAGES = {  # methods that vLLM 0.26 refuses over pipeline stages, with its messages
    "gemma4_mtp": _NO_STAGES,
    "mtp": _NO_STAGES,
    "eagle3": _NO_AUX_STATES,
    "peagle": _NO_AUX_STATES,  # vLLM runs it as eagle3
}
TAKEN: dict[str, dict[str, tuple[str, ...]]] = {  # values that engines take, if not all values
    "transformers": {
        "method.name": ("gemma4_mtp", "none"),
        "method.verification": ("standard",),
        "method.draft_sampling": ("greedy",),
    },
    VLLM: {
        "method.name": (
            *("dflash", "dflash2", "dspark", "eagle", "eagle3", "gemma4_mtp", "mtp", "ngram"),
            *("none", "peagle"),
        )
    },
}


def runs_over_ranks(config: RunConfig) -> bool:
    """Returns whether the native engine runs as several ranks; vLLM starts its own processes."""
    return config.engine.name == NATIVE and config.parallelism.num_ranks > 1


def _taken(engine: str, key: str, values: tuple[str, ...]) -> Rule:
    """The rule that `key` has one of the values that an engine takes, or `auto`; the method that
    `auto` stands for is checked later."""
    return Rule(
        key,
        lambda given, c: getattr(given, "value", given) in (*values, AUTO),
        listing(values),
        f"is not available with engine={engine}",
        "choose one of these, or engine=native",
        when=lambda c: c.engine.name == engine,
    )


def _is_block_size(size: int) -> bool:
    return 1 <= size <= MAX_BLOCK_SIZE and not size & (size - 1)


OFFERED = (
    *(_taken(engine, *taken) for engine, keys in TAKEN.items() for taken in keys.items()),
    Rule(
        "parallelism.pipeline",
        lambda stages, c: stages == 1 or c.method.name not in OVER_STAGES,
        "1, or method=none",
        lambda stages, c: (
            f"is not available with engine=vllm and method={c.method.name}; vLLM 0.26 says: "
            f'"{OVER_STAGES[c.method.name]}"'
        ),
        "split with parallelism.tensor, or choose engine=native or method=none",
        when=lambda c: c.engine.name == VLLM,
    ),
)

_CACHE = (
    Rule(
        "engine.kv_cache.dtype",
        lambda dtype, c: dtype is KVDtype.auto or c.target.dtype is not Dtype.float64,
        "auto with target.dtype=float64",
        "is not available with target.dtype=float64, whose runs are exact",
        "leave the key out, or choose another target.dtype",
    ),
    Rule(
        "engine.kv_cache.block_size",
        lambda size, c: _is_block_size(size),
        f"1, 2, 4, … {MAX_BLOCK_SIZE}",
        "is no power of two in range",
        "16 suits most runs",
    ),
    Rule(  # whether target and drafter have such groups is checked when they are read
        "engine.kv_cache.block_sizes",
        lambda sizes, c: all(map(_is_block_size, sizes.values())),
        f"a mapping of KV groups to 1, 2, 4, … {MAX_BLOCK_SIZE}",
        "holds what is no power of two in range",
        "16 suits most runs: leave the key out",
    ),
    Rule(
        "engine.kv_cache.memory_gib",
        lambda size, c: size is None or 0 < size < math.inf,
        "above 0, or null",
    ),
    Rule(
        "engine.kv_cache.memory_fraction",
        lambda share, c: share is None or 0 < share < 1,
        "above 0 and below 1, or null",
    ),
    Rule(
        "engine.kv_cache.memory_fraction",
        lambda share, c: share is None or c.engine.kv_cache.memory_gib is None,
        "null with engine.kv_cache.memory_gib={c.engine.kv_cache.memory_gib:g}",
        "is given beside engine.kv_cache.memory_gib",
        "leave one of the two out",
    ),
)
KV_CACHE_RULES = tuple(replace(rule, when=lambda c: c.engine.name == NATIVE) for rule in _CACHE)

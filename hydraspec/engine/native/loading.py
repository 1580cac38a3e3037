"""Builds the parts of a native engine from a RunConfig: device, target, drafter, cache, state,
scheduler."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

import torch

from hydraspec import factory
from hydraspec.config.schema import MethodConfig, RunConfig
from hydraspec.engine.base import EngineInfo
from hydraspec.engine.machine import model_length, pick_device, set_num_threads
from hydraspec.engine.native.kv_cache import CacheSize, KVCache, plan_num_blocks
from hydraspec.engine.native.runner import Runner
from hydraspec.engine.native.scheduler import Scheduler
from hydraspec.engine.native.state import new_request_state
from hydraspec.models import load_target
from hydraspec.models.base import TargetModel
from hydraspec.models.checkpoint import resolve_folder
from hydraspec.models.tokenizer import Tokenizer, load_tokenizer
from hydraspec.sampling.verifier import build_verifier
from hydraspec.speculators.base import BaseSpeculator
from hydraspec.speculators.none import NoSpeculator
from hydraspec.types import DTYPES

log = logging.getLogger(__name__)

GIB = 1 << 30


@dataclass(slots=True, kw_only=True)
class Loaded:
    """The parts of one engine. A baseline shares target, tokenizer and cache tensors with its
    origin."""

    config: RunConfig
    target: TargetModel
    tokenizer: Tokenizer | None
    runner: Runner
    scheduler: Scheduler
    info: EngineInfo


def load(config: RunConfig) -> Loaded:
    """Load target and drafter and size the cache.

    Raises:
        ConfigurationError: device or length that this machine or checkpoint cannot give.
        CheckpointError: a checkpoint that cannot be used.
    """
    device = pick_device(config)
    target = load_target(
        config.target.checkpoint,
        weights=config.target.weights.value,
        dtype=DTYPES[config.target.dtype.value],
        device=device,
        seed=config.seed,
        max_model_len=config.target.max_model_len,
    )
    if device.type == "cpu":
        set_num_threads(config.engine.num_threads, target.hidden_size)
    speculator = factory.build_speculator(config)
    speculator.load(target)
    return assemble(
        config, target, load_tokenizer(resolve_folder(config.target.checkpoint)), speculator, None
    )


def load_baseline(loaded: Loaded) -> Loaded:
    """The same target without a drafter. It takes over the cache tensors, so only one of the two
    may be running."""
    block_size = loaded.config.engine.kv_cache.block_size
    target_kv = loaded.runner.kv.leading(len(loaded.target.kv_groups(block_size)))
    config = replace(loaded.config, method=MethodConfig(name="none", num_speculative_tokens=0))
    return assemble(config, loaded.target, loaded.tokenizer, NoSpeculator(config), target_kv)


def assemble(
    config: RunConfig,
    target: TargetModel,
    tokenizer: Tokenizer | None,
    speculator: BaseSpeculator,
    kv: KVCache | None,
) -> Loaded:
    """Wire loaded models into an engine's parts; `kv` None makes a new cache."""
    max_model_len = model_length(config, target.max_position_embeddings)
    num_drafts = speculator.num_speculative_tokens
    warnings: list[str] = []
    kv = kv or _new_cache(config, target, speculator, max_model_len, warnings)
    state = new_request_state(
        num_slots=config.engine.max_num_seqs,
        max_model_len=max_model_len,
        num_speculative_tokens=num_drafts,
        draft_vocab_size=speculator.draft_vocab_size,
        device=target.device,
        draft_vocab_map=speculator.draft_vocab_map,
    )
    verifier = build_verifier(
        config.method.verification.value,
        synthetic_acceptance_length=config.method.synthetic_acceptance_length,
        num_speculative_tokens=num_drafts,
    )
    scheduler = Scheduler(
        kv,
        max_num_seqs=config.engine.max_num_seqs,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        max_model_len=max_model_len,
        num_speculative_tokens=num_drafts,
        num_lookahead_tokens=speculator.num_lookahead_tokens,
    )
    return Loaded(
        config=config,
        target=target,
        tokenizer=tokenizer,
        runner=Runner(target, speculator, verifier, kv, state),
        scheduler=scheduler,
        info=_info(config, target, speculator, kv, max_model_len, warnings),
    )


def _info(
    config: RunConfig,
    target: TargetModel,
    speculator: BaseSpeculator,
    kv: KVCache,
    max_model_len: int,
    warnings: list[str],
) -> EngineInfo:
    spec = speculator.spec
    if spec is not None:
        log.info("drafter: %s", spec)
        other_model = spec.note_on_target(config.target.checkpoint)
        notes = [*spec.notes, *([other_model] if other_model else [])]
        warnings.extend(notes)
        for note in notes:
            log.warning(note)
    return EngineInfo(
        engine="native",
        target=config.target.name,
        method=config.method.name,
        num_speculative_tokens=speculator.num_speculative_tokens,
        device=str(target.device),
        dtype=config.target.dtype.value,
        vocab_size=target.vocab_size,
        max_model_len=max_model_len,
        greedy_is_exact=target.dtype in (torch.float32, torch.float64),
        cudagraph=_resolve_cudagraph(config, target.device),
        memory_bytes={
            "weights": target.memory_bytes(),
            "draft_weights": speculator.memory_bytes(),
            "kv_cache": kv.num_bytes,
        },
        draft_spec=None if spec is None else asdict(spec),
        warnings=warnings,
    )


def _resolve_cudagraph(config: RunConfig, device: torch.device) -> dict[str, str | None]:
    """What was asked for and what is used; a downgrade carries its reason."""
    requested = config.cudagraph.name
    reason = None
    if requested != "none":
        reason = (
            "device is cpu"
            if device.type == "cpu"
            else "this version runs CUDA steps without graphs"
        )
        log.info("cudagraph=%s is not used: %s", requested, reason)
    return {"requested": requested, "target": "none", "draft": "none", "reason": reason}


def _new_cache(
    config: RunConfig,
    target: TargetModel,
    speculator: BaseSpeculator,
    max_model_len: int,
    warnings: list[str],
) -> KVCache:
    """A cache for the target's groups and, behind them, those the drafter owns."""
    block_size = config.engine.kv_cache.block_size
    specs = target.kv_groups(block_size) + speculator.kv_groups(block_size, target.num_layers)
    size = CacheSize(
        max_num_seqs=config.engine.max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        num_speculative_tokens=speculator.num_speculative_tokens,
        num_lookahead_tokens=speculator.num_lookahead_tokens,
    )
    budget_bytes = _cache_budget_bytes(config, target.device)
    num_blocks = plan_num_blocks(specs, size, target.dtype, budget_bytes)
    for spec, count in zip(specs, num_blocks, strict=True):
        if count < size.blocks_wanted(spec, 1):
            warnings.append(
                f"the {spec.name} KV cache holds {(count - 1) * spec.block_size} tokens, less than "
                f"one request of max_model_len={max_model_len}; raise engine.kv_cache.memory_gib "
                "or lower target.max_model_len"
            )
    return KVCache(
        specs,
        num_blocks,
        num_slots=config.engine.max_num_seqs,
        max_tokens=size.max_tokens,
        num_layers=max(
            [target.num_layers, *(layer + 1 for spec in specs for layer in spec.layers)]
        ),
        dtype=target.dtype,
        device=target.device,
    )


def _cache_budget_bytes(config: RunConfig, device: torch.device) -> int:
    """engine.kv_cache.memory_gib, or most of the free device memory, or a careful share of the
    host's."""
    memory_gib = config.engine.kv_cache.memory_gib
    if memory_gib is not None:
        return int(memory_gib * GIB)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.85)
    return min(4 * GIB, _available_bytes() // 2)


def _available_bytes() -> int:
    """Memory to be had without swapping, as Linux counts it; elsewhere half of what there is."""
    with suppress(OSError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with suppress(ValueError, OSError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 4 * GIB

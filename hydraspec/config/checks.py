"""Every range and cross-field check, one function a group.

Knows values only: files, checkpoints and devices are checked where they are used.
"""

from __future__ import annotations

import math
import os

from hydraspec.config.benches import check_bench, is_bench
from hydraspec.config.choices import added_workload, choices_of, shipped_shapes
from hydraspec.config.derive import SHAPE
from hydraspec.config.engines import NATIVE, VLLM, check_offer, check_vllm
from hydraspec.config.messages import listing, nearest, refusal
from hydraspec.config.ranges import SAMPLING_RANGES
from hydraspec.config.schema import (
    AUTO,
    DraftSampling,
    EngineConfig,
    MethodConfig,
    RunConfig,
    SamplingConfig,
    TargetConfig,
    TrackerConfig,
    Verification,
    Weights,
    WorkloadConfig,
)

# Draft buffers, verify rows and captured graphs are K+1 wide for every slot, and even where nine
# drafts in ten are accepted, the 32nd of a row is reached 3 times in 100.
MAX_SPECULATIVE_TOKENS = 32
# Far past what helps; thousands of threads hang or end the process.
MAX_NUM_THREADS = max(64, 4 * (os.cpu_count() or 1))
MAX_BLOCK_SIZE = 1024  # a block is the unit of waste: half of one per request and KV group
MAX_PROJECT_LENGTH, NOT_IN_PROJECTS = 128, "/\\#?%:"  # of a project's name in W&B
ALIASES = {"gemma4", AUTO}  # choices that are recorded under another name


def check(config: RunConfig) -> None:
    """Refuse the first thing that cannot work; note what is only pointless in `warnings`."""
    _sampling_range("seed", "seed", config.seed)
    _at_least("target.max_model_len", config.target.max_model_len, 2, "2 or more, or null")
    _check_shape("target", config.target.checkpoint, config.target.weights)
    if config.engine.name == "native":
        _check_floats(config.target)
    _check_shape("method", config.method.checkpoint or "", config.method.weights)
    _check_method(config.method)
    _check_engine(config.engine, config.method)
    _check_parallelism(config)
    _check_cudagraph(config)
    _check_sampling(config.sampling)
    _check_workload(config.workload)
    _check_tracker(config.tracker)
    if config.target.max_model_len is not None:
        check_random_room(config, config.target.max_model_len)
    check_vllm(config)
    check_bench(config)
    config.warnings.extend(_without_effect(config))


def check_names(config: RunConfig) -> None:
    """Refuse a `name` that nothing answers to. Comes first: defaults depend on names."""
    for group, name in (
        ("method", config.method.name),
        ("engine", config.engine.name),
        ("cudagraph", config.cudagraph.name),
        ("tracker", config.tracker.name),
    ):
        known = set(choices_of(group)) - ALIASES
        if name not in known and (group, name) != ("method", AUTO):
            meant = nearest(name, known)
            remedy = f"did you mean {group}={meant}?" if meant else f"choose with {group}=<choice>"
            raise refusal(
                f"{group}.name", name, "is unknown", allowed=listing(known), remedy=remedy
            )
    for method in config.target.drafters:
        known = set(choices_of("method")) - ALIASES - {"none"}
        if method not in known:
            key = f"target.drafters.{method}"
            raise refusal(
                key, config.target.drafters[method], "names no method", allowed=listing(known)
            )
    for group, checkpoint in (
        ("target", config.target.checkpoint),
        ("method", config.method.checkpoint),
    ):
        if checkpoint == "":
            allowed = "a folder, a hub id or zoo:<name>"
            remedy = "write one of these, or leave the key out"
            key = f"{group}.checkpoint"
            raise refusal(key, checkpoint, "is empty", allowed=allowed, remedy=remedy)


def _check_shape(group: str, checkpoint: str, weights: Weights) -> None:
    if not checkpoint.startswith(SHAPE):
        return
    key, name = f"{group}.checkpoint", checkpoint.removeprefix(SHAPE)
    if name not in shipped_shapes():
        meant = nearest(name, shipped_shapes())
        raise refusal(
            key,
            checkpoint,
            "is no shape that ships with the package",
            allowed=listing(SHAPE + shape for shape in shipped_shapes()),
            remedy=f"did you mean {key}={SHAPE}{meant}?" if meant else "",
        )
    if weights is not Weights.random:
        raise refusal(
            key,
            checkpoint,
            f"has no weights, and {group}.weights is {weights.value}",
            allowed=f"a folder or a hub id, or a shape with {group}.weights=random",
            remedy=f"add {group}.weights=random",
        )


def _check_floats(target: TargetConfig) -> None:
    """Refuse a release that is known to be quantised, before any of it is downloaded."""
    if target.quantised is not None and target.weights is not Weights.random:
        raise refusal(
            "target.checkpoint",
            target.checkpoint,
            f"has weights in {target.quantised}, which are not read",
            allowed="float weights (bfloat16, float16 or float32), or target.weights=random",
            remedy="convert it and give target.checkpoint=<folder or hub id of the conversion>, or "
            "add target.weights=random to run its shape",
        )


def check_random_room(config: RunConfig, max_model_len: int) -> None:
    """Refuse random requests that would be cut short: their lengths are a promise."""
    size = config.workload
    num_tokens = size.prompt_tokens + size.output_tokens
    if size.name != "random" or is_bench(config) or num_tokens <= max_model_len:
        return
    raise refusal(
        "workload.prompt_tokens",
        size.prompt_tokens,
        f"and workload.output_tokens={size.output_tokens} make {num_tokens} tokens, and the target "
        f"takes {max_model_len}",
        allowed=f"{max_model_len} together (target.max_model_len, or the checkpoint's own limit)",
        remedy="lower one of them",
    )


def check_method(config: RunConfig) -> None:
    """What concerns method and K, for once a checkpoint has said them."""
    _check_method(config.method)
    _check_engine(config.engine, config.method)


def _check_method(method: MethodConfig) -> None:
    if method.name == "none" or (method.name == AUTO and method.num_speculative_tokens == 0):
        return
    k = method.num_speculative_tokens
    if not 1 <= k <= MAX_SPECULATIVE_TOKENS:
        remedy = (
            "to decode without drafts choose method=none"
            if k < 1
            else "most drafters pay off at 2 to 6"
        )
        raise refusal(
            "method.num_speculative_tokens",
            k,
            "is out of range",
            allowed=f"1 to {MAX_SPECULATIVE_TOKENS}",
            remedy=remedy,
        )
    length = method.synthetic_acceptance_length
    synthetic = method.verification is Verification.synthetic
    key = "method.synthetic_acceptance_length"
    if synthetic and length is None:
        raise refusal(
            key,
            None,
            "leaves verification=synthetic without its target",
            allowed=f"1 to {k + 1} (K+1)",
            remedy=f"add {key}=<number>, or choose method.verification=standard",
        )
    if length is not None and not synthetic:
        raise refusal(
            key,
            length,
            f"has no meaning with verification={method.verification.value}",
            allowed="null",
            remedy="add method.verification=synthetic, or leave the key out",
        )
    if length is not None and not 1 <= length <= k + 1:
        raise refusal(
            key,
            length,
            "is out of range",
            allowed=f"1 to {k + 1} (num_speculative_tokens + 1: the bonus token counts)",
        )


def _check_engine(engine: EngineConfig, method: MethodConfig) -> None:
    _at_least("engine.max_num_seqs", engine.max_num_seqs, 1)
    if engine.num_threads is not None and not 1 <= engine.num_threads <= MAX_NUM_THREADS:
        raise refusal(
            "engine.num_threads",
            engine.num_threads,
            "is out of range",
            allowed=f"1 to {MAX_NUM_THREADS}, or null to have it chosen",
        )
    check_offer(engine, method)
    if engine.name == NATIVE:
        _check_cache(engine, method)


def _check_cache(engine: EngineConfig, method: MethodConfig) -> None:
    cache = engine.kv_cache
    size = cache.block_size
    if not 1 <= size <= MAX_BLOCK_SIZE or size & (size - 1):
        raise refusal(
            "engine.kv_cache.block_size",
            size,
            "is no power of two in range",
            allowed=f"1, 2, 4, … {MAX_BLOCK_SIZE}",
            remedy="16 suits most runs",
        )
    if cache.memory_gib is not None and not (0 < cache.memory_gib < math.inf):
        raise refusal(
            "engine.kv_cache.memory_gib",
            cache.memory_gib,
            "is out of range",
            allowed="above 0, or null",
        )
    rows = method.num_speculative_tokens + 1
    needed = engine.max_num_seqs * rows
    if engine.max_num_batched_tokens < needed:
        raise refusal(
            "engine.max_num_batched_tokens",
            engine.max_num_batched_tokens,
            f"cannot hold a step of engine.max_num_seqs={engine.max_num_seqs}, {rows} rows each",
            allowed=f"{needed} or more",
            remedy="raise it, or lower engine.max_num_seqs",
        )


def _check_parallelism(config: RunConfig) -> None:
    for axis in ("tensor", "pipeline", "data"):
        size = getattr(config.parallelism, axis)
        _at_least(f"parallelism.{axis}", size, 1)
        if size != 1 and config.engine.name != VLLM:
            raise refusal(
                f"parallelism.{axis}",
                size,
                f"is not available with engine={config.engine.name}: runs use one device",
                allowed="1",
                remedy="choose parallelism=single, or engine=vllm",
            )


def _check_cudagraph(config: RunConfig) -> None:
    sizes = config.cudagraph.capture_sizes
    if sizes is not None and (not sizes or min(sizes) < 1 or sorted(set(sizes)) != sizes):
        raise refusal(
            "cudagraph.capture_sizes",
            sizes,
            "is no list of sizes",
            allowed="rising whole numbers from 1 on, e.g. [1, 2, 4, 8], or null",
            remedy="sort them and leave out what occurs twice",
        )
    most = config.engine.max_num_seqs
    if sizes is not None and sizes[-1] > most:
        raise refusal(
            "cudagraph.capture_sizes",
            sizes,
            "holds batches larger than any",
            allowed=f"1 to {most} (engine.max_num_seqs)",
            remedy=f"leave out what is larger, or raise engine.max_num_seqs to {sizes[-1]}",
        )


def _check_sampling(sampling: SamplingConfig) -> None:
    for name in ("temperature", "top_k", "top_p", "min_p", "max_tokens"):
        _sampling_range(f"sampling.{name}", name, getattr(sampling, name))
    if "" in sampling.stop:
        raise refusal(
            "sampling.stop",
            sampling.stop,
            "holds an empty string",
            allowed="strings of one character or more",
        )
    for i, token in enumerate(sampling.stop_token_ids):
        _sampling_range(f"sampling.stop_token_ids[{i}]", "stop_token_ids", token)


def _sampling_range(key: str, name: str, value: float) -> None:
    known = SAMPLING_RANGES[name]
    if not known.allows(value):
        raise refusal(key, value, "is out of range", allowed=known.allowed, remedy=known.remedy)


def _check_workload(workload: WorkloadConfig) -> None:
    _at_least("workload.limit", workload.limit, 1, "1 or more, or null for all")
    _at_least("workload.concurrency", workload.concurrency, 1, "1 or more, or null for all at once")
    _at_least("workload.num_requests", workload.num_requests, 1)
    _at_least("workload.prompt_tokens", workload.prompt_tokens, 1)
    _sampling_range("workload.output_tokens", "max_tokens", workload.output_tokens)
    if workload.name == "random":
        if workload.path is not None:
            raise refusal(
                "workload.path",
                workload.path,
                "has no meaning with workload=random",
                allowed="null",
                remedy="choose workload=jsonl",
            )
        return
    if not workload.path and added_workload(workload.name) is None:
        raise refusal(
            "workload.path",
            workload.path,
            "names no file",
            allowed="a file of JSON lines, or zoo:tiny",
            remedy="add workload.path=<file.jsonl>",
        )
    untouched = WorkloadConfig(name=workload.name)
    for key in ("num_requests", "prompt_tokens", "output_tokens"):
        if getattr(workload, key) != getattr(untouched, key):
            raise refusal(
                f"workload.{key}",
                getattr(workload, key),
                f"has no meaning with workload={workload.name}",
                allowed=f"keys of workload={workload.name}: concurrency, limit, path",
                remedy="choose workload=random, or leave the key out",
            )


def _check_tracker(tracker: TrackerConfig) -> None:
    """What Weights & Biases refuses, which would cost the run its record."""
    project = tracker.project
    odd = sorted({c for c in project if c in NOT_IN_PROJECTS or not c.isprintable()})
    if project.strip() and len(project) <= MAX_PROJECT_LENGTH and not odd:
        return
    raise refusal(
        "tracker.project",
        project,
        "names no project",
        allowed=f"1 to {MAX_PROJECT_LENGTH} characters, none of {' '.join(NOT_IN_PROJECTS)}",
        remedy="choose another name, or tracker=none",
    )


def _without_effect(config: RunConfig) -> list[str]:
    """What was set, is legal, and changes nothing."""
    notes = []
    sampling, method = config.sampling, config.method
    if sampling.temperature == 0:
        for key, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            if getattr(sampling, key) != off:
                notes.append(
                    f"sampling.{key}={getattr(sampling, key)} has no effect at temperature 0"
                )
        if method.draft_sampling is DraftSampling.probabilistic:
            notes.append("method.draft_sampling=probabilistic drafts greedily at temperature 0")
    if config.cudagraph.name == "none" and config.cudagraph.capture_sizes is not None:
        notes.append("cudagraph.capture_sizes has no effect with cudagraph=none")
    if config.workload.name == "random" and (sampling.stop or sampling.stop_token_ids):
        notes.append("sampling.stop and stop_token_ids have no effect with workload=random")
    return notes


def _at_least(key: str, value: int | None, least: int, allowed: str = "") -> None:
    if value is not None and value < least:
        raise refusal(key, value, "is out of range", allowed=allowed or f"{least} or more")

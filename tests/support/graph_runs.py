"""Runs of the trained zoo in any graph mode, with any backend, on any device."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hydraspec_kernels.attention.plan import device_plan
from records import request
from tiny_targets import run_config

from hydraspec import factory
from hydraspec.config.schema import Device, Dtype, KVDtype, RunConfig, Weights
from hydraspec.engine.native import NativeEngine
from hydraspec.engine.run import loading
from hydraspec.engine.run.device_runner import CapturedStep, DeviceRunner
from hydraspec.graphs import GraphBackend
from hydraspec.types import Completion, Request, StepPlan, StepRecord
from hydraspec.zoo.recipe.evaluate import read_workload

GRAPH_MODES = ("piecewise", "full", "full_decode_only", "full_and_piecewise")
SHARING = ("tiny_gemma4_e", "tiny_gemma4_e-assistant")  # its last layers share KV
# A method is its usual pair; "<method> on <family>" has groups of its own beside other kinds.
PAIRS = {
    "none": ("tiny_gemma4", None),
    "gemma4_mtp": ("tiny_gemma4", "tiny_gemma4-assistant"),
    "eagle3": ("tiny_qwen3", "tiny_qwen3-eagle3"),
    "peagle": ("tiny_qwen3", "tiny_qwen3-peagle"),
    "eagle3 on gemma4": ("tiny_gemma4", "tiny_gemma4-eagle3"),
    "peagle on gemma4": ("tiny_gemma4", "tiny_gemma4-peagle"),
    "eagle": ("tiny_mistral", "tiny_mistral-eagle"),
    "mtp": ("tiny_deepseek", None),
    "dflash": ("tiny_qwen3", "tiny_qwen3-dflash"),
    "dflash on gemma4": ("tiny_gemma4", "tiny_gemma4-dflash"),
    "dspark": ("tiny_qwen3", "tiny_qwen3-dspark"),
    "dflash2": ("tiny_qwen3", "tiny_qwen3-dflash2"),
    "dspark on gemma4": ("tiny_gemma4", "tiny_gemma4-dspark"),
}
# One for each way of holding weights and each drafter in FP8.
QUANTISED: dict[str, tuple[str, str | None]] = {
    "gemma4_mtp on fp8 blocks": ("tiny_gemma4_fp8_block", "tiny_gemma4-assistant"),
    "gemma4_mtp on fp8 experts": ("tiny_gemma4_moe_fp8", "tiny_gemma4_moe-assistant"),
    "eagle3 on fp8": ("tiny_gemma4_fp8", "tiny_gemma4_fp8-eagle3"),
    "eagle3 on four bits": ("tiny_gemma4_w4a16", "tiny_gemma4-eagle3"),
    "eagle on fp8": ("tiny_mistral_fp8", "tiny_mistral_fp8-eagle"),
    "mtp on fp8": ("tiny_deepseek_fp8", None),
    "dflash2 on fp8": ("tiny_qwen3_fp8", "tiny_qwen3-dflash2"),
}


def graph_config(
    method: str,
    mode: str,
    *,
    device: Device = Device.cpu,
    dtype: Dtype = Dtype.float64,
    sizes: tuple[int, ...] = (2, 5),
    pair: tuple[str, str | None] | None = None,
    kv_dtype: KVDtype = KVDtype.auto,
    **fields: Any,
) -> RunConfig:
    """Small chunks and few slots, so that prefills are cut and mix with decodes."""
    target, drafter = pair or (PAIRS | QUANTISED)[method]
    fields = {
        "k": 3,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 40,
        "max_model_len": 128,
        "block_size": 16,
        **fields,
    }
    config = run_config(
        f"zoo:{target}",
        method=method.split(" on ")[0],
        drafter=f"zoo:{drafter}" if drafter else None,
        dtype=dtype,
        weights=Weights.checkpoint,
        **fields,
    )
    config.cudagraph.name = mode
    config.cudagraph.capture_sizes = list(sizes) or None
    config.engine.device = device
    config.engine.kv_cache.dtype = kv_dtype
    return config


def make_graph_engine(config: RunConfig, backend: GraphBackend | None) -> NativeEngine:
    """`NativeEngine(config)` with `backend` in place of CUDA's."""
    with pytest.MonkeyPatch.context() as patch:
        whole = loading.assemble

        def assemble(*args: Any, **kwargs: Any) -> loading.Loaded:
            return whole(*args, **{"backend": backend, **kwargs})

        patch.setattr(loading, "assemble", assemble)
        engine = factory.build_engine(config)
    assert isinstance(engine, NativeEngine)
    return engine


def cache_gib(config: RunConfig) -> float:
    """GiB of the cache that serves max_num_seqs requests of full length, and keeps no others."""
    config = copy.deepcopy(config)
    config.engine.prefix_caching = False
    return make_graph_engine(config, None).info.memory_bytes["kv_cache"] / (1 << 30)


@dataclass
class Run:
    """What a run gave, and how its steps were launched."""

    outputs: dict[int, tuple[list[int], str]] = field(default_factory=dict)
    drafts: dict[int, list[list[int]]] = field(default_factory=dict)
    num_accepted: int = 0
    num_preempted: int = 0
    batch_sizes: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[list[int]]:
        return [self.outputs[index][0] for index in sorted(self.outputs)]


def zoo_requests(count: int, *, longest: int = 30, **sampling: Any) -> list[Request]:
    """Workload prompts; limits rise and fall, so that batches shrink and grow."""
    lines = read_workload()
    return [
        request(
            index,
            messages=lines[index]["messages"],
            max_tokens=5 + (index * 11) % longest,
            seed=index,
            **sampling,
        )
        for index in range(count)
    ]


def run_requests(
    engine: NativeEngine, requests: Sequence[Request], concurrency: int | None = 4
) -> Run:
    run = Run()
    engine.tokenize(requests)
    for event in engine.run(requests, concurrency=concurrency):
        if isinstance(event, Completion):
            assert event.error is None, event
            run.outputs[event.index] = (event.output_token_ids, event.finish_reason)
            continue
        assert isinstance(event, StepRecord)
        run.num_preempted += event.num_preempted
        run.batch_sizes.append(len(event.requests))
        for part in event.requests:
            run.num_accepted += part.num_accepted
            run.drafts.setdefault(part.index, []).append(part.draft_token_ids)
    return run


def assert_same(run: Run, wanted: Run) -> None:
    """The requests of `run` got what they got in `wanted`, whoever ran beside them."""
    assert run.outputs == {index: wanted.outputs[index] for index in run.outputs}
    assert run.drafts == {index: wanted.drafts[index] for index in run.outputs}


def lengths_at_random(most: int) -> Iterator[int | tuple[int, ...]]:
    """Numbers of drafts, of all requests or by slot: long rests at 0, jumps and steady runs."""
    draw = random.Random(0)
    lengths = [0, 0, 1, 2, 3, most, (0, most), (most, 1, 0, 2)]
    while True:
        yield from [draw.choice(lengths)] * draw.choice([1, 1, 2, 5])


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever synchronises with the device raises; waiting for an event does not count."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def attention_as_on_devices(patch: pytest.MonkeyPatch) -> None:
    """Targets and heads plan attention as for kernels: mixed steps have no other static plan."""

    def plan(shape: Any, segments: Any, table: Any, lens: Any, *rest: Any) -> Any:
        return device_plan(shape, segments, table, lens, *(rest[2:] or (None,)))

    patch.setattr("hydraspec.models.kv_groups.plan_attention", plan)


def count_launches(engine: NativeEngine, patch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many plans ran as a graph of decodes, as a mixed graph, and eagerly; fills as it runs."""
    runner = engine.parts.runner
    assert isinstance(runner, DeviceRunner)
    counts = {"decode": 0, "mixed": 0, "eager": 0, "split": 0}
    part, split = runner._launch_part, runner._split

    def launch_part(plan: StepPlan, found: CapturedStep | None) -> Any:
        if found is None:
            counts["eager"] += 1
        else:
            counts["decode" if found.descriptor.rows_per_request else "mixed"] += 1
        return part(plan, found)

    def split_plan(plan: StepPlan) -> Any:
        parts = split(plan)
        counts["split"] += len(parts) > 1
        return parts

    patch.setattr(runner, "_launch_part", launch_part)
    patch.setattr(runner, "_split", split_plan)
    return counts

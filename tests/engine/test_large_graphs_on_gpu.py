"""Mixed steps of many rows as graphs on a device: bit for bit what the same padded steps compute
eagerly, the CPU's tokens in float32, and no waiting inside a step.

Prompts of some hundred tokens come and go beside decodes, so that steps of every captured size
occur. In bfloat16 the full layers of tiny_gemma4 (heads of 64) use the prefill kernel, its sliding
ones (heads of 32) the paged one.
"""

from __future__ import annotations

import gc
import random

import pytest
import torch
from device_room import room_on_device
from graph_runs import (
    SHARING,
    Run,
    count_launches,
    graph_config,
    make_graph_engine,
    no_waiting,
    run_requests,
    zoo_requests,
)
from recorded_graphs import CalledAgain
from records import request
from tiny_targets import run_config

from hydraspec.config.schema import Device, Dtype, RunConfig, Weights
from hydraspec.engine.native import NativeEngine
from hydraspec.engine.run import step_graphs
from hydraspec.engine.run.device_runner import DeviceRunner
from hydraspec.graphs import GraphBackend, modes
from hydraspec.types import Request

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

NUM_SLOTS = 12
MODES = ["full", "full_and_piecewise"]


def long_requests(count: int, *, longest: int = 900, vocab: int = 200) -> list[Request]:
    """Lognormal prompts, as a server's; a median of 150 tokens."""
    rng = random.Random(3)
    lengths = [min(longest, max(5, int(rng.lognormvariate(5.0, 1.0)))) for _ in range(count)]
    return [
        request(
            index,
            prompt_token_ids=[rng.randrange(5, vocab) for _ in range(length)],
            max_tokens=4 + (index * 7) % 24,
            ignore_eos=True,
        )
        for index, length in enumerate(lengths)
    ]


def config_of(method: str, mode: str, *, dtype: Dtype = Dtype.bfloat16) -> RunConfig:
    config = graph_config(
        method,
        mode,
        pair=SHARING if method == "gemma4_mtp" else None,
        device=Device.cuda,
        dtype=dtype,
        sizes=(1, 4, NUM_SLOTS),
        max_num_seqs=NUM_SLOTS,
        max_num_batched_tokens=2048,
        max_model_len=1024,
    )
    config.cudagraph.max_mixed_rows = 2048
    return config


def run_counted(
    config: RunConfig, backend: GraphBackend | None, requests: list[Request]
) -> tuple[Run, dict[str, int], set[int]]:
    """The run, how its steps were launched, and the rows of the mixed graphs among them. Its engine
    is gone then: two of a released shape fill a device."""
    found = _run_counted(config, backend, requests)
    gc.collect()  # `CalledAgain` keeps what it calls: a cycle
    torch.cuda.empty_cache()
    return found


def _run_counted(
    config: RunConfig, backend: GraphBackend | None, requests: list[Request]
) -> tuple[Run, dict[str, int], set[int]]:
    engine = make_graph_engine(config, backend)
    sizes: set[int] = set()
    with pytest.MonkeyPatch.context() as patch:
        counts = count_launches(engine, patch)
        runner = engine.parts.runner
        assert isinstance(runner, DeviceRunner)
        launch = runner._launch_part

        def noted(plan, captured):  # type: ignore[no-untyped-def]
            if captured is not None and captured.descriptor.rows_per_request is None:
                sizes.add(captured.descriptor.num_rows)
            return launch(plan, captured)

        patch.setattr(runner, "_launch_part", noted)
        return run_requests(engine, requests, concurrency=None), counts, sizes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", ["none", "gemma4_mtp", "eagle3", "peagle", "mtp"])
def test_large_graphs_replay_what_eager_steps_compute(method: str, mode: str) -> None:
    config, requests = config_of(method, mode), long_requests(48)
    called, _, _ = run_counted(config, CalledAgain(), requests)
    replayed, counts, sizes = run_counted(config, None, requests)
    assert replayed.outputs == called.outputs
    assert replayed.drafts == called.drafts
    assert counts["eager"] == 0, "no step has more rows than a graph"
    assert len({size for size in sizes if size > 256}) > 3, sizes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", ["none", "gemma4_mtp", "eagle3"])
def test_float32_tokens_are_those_of_the_cpu(
    method: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With limits so low that the trained workload reaches them: rows that are left out, and those
    that are not, come from the device's kernels."""
    for module in (modes, step_graphs):
        monkeypatch.setattr(module, "PROMPT_ROWS", (8, 16))
    monkeypatch.setattr(modes, "LARGE_ROWS", (24, 40, 64, 128, 256))
    fields = {
        "pair": SHARING if method == "gemma4_mtp" else None,
        "dtype": Dtype.float32,
        "max_num_seqs": 3,
        "sizes": (2, 3),
        "max_num_batched_tokens": 256,
    }
    wanted = run_requests(
        make_graph_engine(graph_config(method, "none", **fields), None), zoo_requests(12)
    )
    gpu = graph_config(method, mode, device=Device.cuda, **fields)
    found, counts, sizes = run_counted(gpu, None, zoo_requests(12))
    assert found.tokens == wanted.tokens
    assert found.num_accepted == wanted.num_accepted
    assert counts["eager"] == 0
    assert sizes & {24, 40, 64}


def test_large_graphs_never_wait_for_the_device() -> None:
    engine = make_graph_engine(config_of("gemma4_mtp", "full"), None)
    requests = long_requests(24)
    warm = run_requests(engine, requests, concurrency=None)
    with no_waiting():
        run = run_requests(engine, requests, concurrency=None)
    assert run.outputs == warm.outputs, "two runs of the same requests differ"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["none", "gemma4_mtp"])
@pytest.mark.parametrize(("shape", "gib"), [("gemma4_e2b", 20), ("gemma4_26b_a4b", 60)])
def test_large_graphs_of_released_shapes(shape: str, gib: float, method: str) -> None:
    """Widths, heads and experts of released models, with random weights: the kernels of Hopper."""
    with room_on_device(gib, limit_s=150):
        _large_graphs_equal_eager_steps(shape, method)


def _large_graphs_equal_eager_steps(shape: str, method: str) -> None:
    runs = []
    for backend in (CalledAgain(), None):
        config = run_config(
            f"shape:{shape}",
            method=method,
            drafter=f"shape:{shape}-assistant" if method == "gemma4_mtp" else None,
            dtype=Dtype.bfloat16,
            weights=Weights.random,
            max_model_len=2048,
            max_num_seqs=NUM_SLOTS,
            max_num_batched_tokens=2048,
            block_size=16,
        )
        config.cudagraph.name, config.engine.device = "full", Device.cuda
        config.cudagraph.capture_sizes = [1, 4, NUM_SLOTS]
        config.cudagraph.max_mixed_rows = 2048
        requests = long_requests(24, vocab=200_000)
        run, counts, sizes = run_counted(config, backend, requests)
        assert counts["mixed"] > 5
        assert max(sizes) > 256
        runs.append(run)
    assert runs[0].outputs == runs[1].outputs
    assert runs[0].drafts == runs[1].drafts


def test_captures_of_large_graphs_take_little_memory() -> None:
    """The pool holds the largest step's tensors once, not those of every size."""
    few = config_of("none", "full_and_piecewise")
    few.engine.max_num_batched_tokens = 1792
    many = config_of("none", "full_and_piecewise")
    taken = []
    for config in (few, many):
        engine = NativeEngine(config)
        taken.append(engine.info.memory_bytes["graphs"])
        del engine
        torch.cuda.empty_cache()
    assert taken[1] <= 1.5 * taken[0] + (64 << 20)

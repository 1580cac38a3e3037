"""CUDA graphs of the engine: bit for bit the tokens of eager steps at the same padded shapes, no
waiting inside a step, memory that adds up.

The eager side is `CalledAgain`: the same padded batches in the same memory, with the Python called
at every step. Whatever differs is the capture's doing.
"""

from __future__ import annotations

import gc

import pytest
import torch
from graph_runs import (
    GRAPH_MODES,
    QUANTISED,
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
from tiny_targets import run_config

from hydraspec.config.schema import (
    Device,
    DraftSampling,
    Dtype,
    KVDtype,
    RunConfig,
    Verification,
    Weights,
)
from hydraspec.engine.native import NativeEngine
from hydraspec.engine.run.device_runner import DeviceRunner
from hydraspec.graphs import GraphBackend

pytestmark = pytest.mark.gpu

BATCHES = [64, 33, 16, 5, 2, 1]  # each smaller than the one before: what was a request is padding
FEW_BATCHES = [33, 5, 2]
BLOCKS = ("dflash", "dspark", "dflash2")
SIZES = (1, 2, 8, 16, 40, 64)
WORKSPACES = 192 << 20  # libraries' workspaces and step inputs, which no part of the summary holds


def gpu_config(
    method: str, mode: str, k: int, dtype: Dtype, kv_dtype: KVDtype = KVDtype.auto
) -> RunConfig:
    return graph_config(
        method,
        mode,
        device=Device.cuda,
        dtype=dtype,
        sizes=SIZES,
        k=k,
        kv_dtype=kv_dtype,
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        max_model_len=256,
    )


def run_shrinking(engine: NativeEngine, batches: list[int]) -> list[Run]:
    return [
        run_requests(engine, zoo_requests(batch, longest=12), concurrency=batch)
        for batch in batches
    ]


def compare(config: RunConfig, batches: list[int] = BATCHES) -> None:
    backends: list[GraphBackend | None] = [CalledAgain(), None]
    runs = []
    for backend in backends:
        engine = make_graph_engine(config, backend)
        with pytest.MonkeyPatch.context() as patch:
            counts = count_launches(engine, patch)
            runs.append(run_shrinking(engine, batches))
        assert counts["decode"] > 2 * len(batches)
        del engine
        torch.cuda.empty_cache()
    for batch, called, replayed in zip(batches, *runs, strict=True):
        assert replayed.outputs == called.outputs, f"batch {batch}"
        assert replayed.drafts == called.drafts, f"batch {batch}"


@pytest.mark.parametrize("mode", GRAPH_MODES)
@pytest.mark.parametrize("k", [1, 3, 7])
def test_graphs_replay_what_eager_steps_compute(k: int, mode: str) -> None:
    """Every mode, every K, every batch size, in bfloat16, on one drafter."""
    compare(gpu_config("gemma4_mtp", mode, k, Dtype.bfloat16))


@pytest.mark.parametrize("mode", ["full", "full_and_piecewise"])
@pytest.mark.parametrize("method", ["none", "eagle3", "peagle", "eagle", "mtp"])
@pytest.mark.parametrize("dtype", [Dtype.bfloat16, Dtype.float32])
def test_every_method_replays(method: str, mode: str, dtype: Dtype) -> None:
    compare(gpu_config(method, mode, 3, dtype))


@pytest.mark.parametrize("mode", ["piecewise", "full_decode_only"])
@pytest.mark.parametrize("method", ["none", "eagle3", "peagle", "eagle", "mtp"])
def test_every_method_replays_in_the_other_modes(method: str, mode: str) -> None:
    compare(gpu_config(method, mode, 3, Dtype.bfloat16), FEW_BATCHES)


@pytest.mark.parametrize("mode", ["piecewise", "full"])
@pytest.mark.parametrize("method", [*QUANTISED, *BLOCKS])
def test_quantised_targets_and_block_drafters_replay(method: str, mode: str) -> None:
    compare(gpu_config(method, mode, 3, Dtype.bfloat16), FEW_BATCHES)


@pytest.mark.parametrize("mode", GRAPH_MODES)
@pytest.mark.parametrize("method", ["gemma4_mtp", "gemma4_mtp on fp8 blocks"])
def test_steps_over_an_fp8_cache_replay(method: str, mode: str) -> None:
    compare(gpu_config(method, mode, 3, Dtype.bfloat16, KVDtype.fp8), FEW_BATCHES)


@pytest.mark.parametrize("method", ["none", "gemma4_mtp", "eagle3", "peagle", "eagle", "mtp"])
def test_float32_tokens_are_those_of_the_cpu(method: str) -> None:
    cpu = graph_config(method, "none", dtype=Dtype.float32, max_num_batched_tokens=256)
    gpu = graph_config(
        method,
        "full_and_piecewise",
        device=Device.cuda,
        dtype=Dtype.float32,
        max_num_batched_tokens=256,
    )
    wanted = run_requests(make_graph_engine(cpu, None), zoo_requests(12))
    found = run_requests(make_graph_engine(gpu, None), zoo_requests(12))
    assert found.tokens == wanted.tokens
    assert found.num_accepted == wanted.num_accepted


@pytest.mark.parametrize("mode", ["none", *GRAPH_MODES])
@pytest.mark.parametrize("method", ["none", "gemma4_mtp", "eagle3", "peagle", "mtp"])
def test_steps_never_wait_for_the_device(method: str, mode: str) -> None:
    check_waiting(method, mode)


@pytest.mark.parametrize("method", ["gemma4_mtp on fp8 blocks", "eagle3 on four bits", *BLOCKS])
def test_steps_of_quantised_targets_and_block_drafters_never_wait(method: str) -> None:
    check_waiting(method, "full_and_piecewise")


def test_steps_over_an_fp8_cache_never_wait() -> None:
    check_waiting("gemma4_mtp on fp8 blocks", "none", KVDtype.fp8)


def check_waiting(method: str, mode: str, kv_dtype: KVDtype = KVDtype.auto) -> None:
    """Admission, chunked prefills, mixed steps and decodes. The first run may compile."""
    config = graph_config(
        method,
        mode,
        device=Device.cuda,
        dtype=Dtype.bfloat16,
        kv_dtype=kv_dtype,
        max_num_batched_tokens=64,
    )
    engine = make_graph_engine(config, None)
    warm = run_requests(engine, zoo_requests(6))
    with no_waiting():
        run = run_requests(engine, zoo_requests(6))
    assert run.outputs == warm.outputs, "two runs of the same requests differ"


@pytest.mark.parametrize("mode", ["none", "full_and_piecewise"])
def test_unneeded_rows_are_left_out_without_waiting(mode: str) -> None:
    """The last layers share KV: prefills run them on few rows, and give the CPU's tokens."""
    fields = {"pair": SHARING, "dtype": Dtype.float32, "max_num_batched_tokens": 64}
    cpu = make_graph_engine(graph_config("gemma4_mtp", "none", **fields), None)
    wanted = run_requests(cpu, zoo_requests(8))
    gpu = graph_config("gemma4_mtp", mode, device=Device.cuda, **fields)
    engine = make_graph_engine(gpu, None)
    run_requests(engine, zoo_requests(8))
    with no_waiting():
        found = run_requests(engine, zoo_requests(8))
    assert found.tokens == wanted.tokens


@pytest.mark.parametrize("verification", Verification)
def test_sampled_steps_replay_and_never_wait(verification: Verification) -> None:
    synthetic = verification is Verification.synthetic
    runs = []
    for backend in (CalledAgain(), None):
        config = graph_config(
            "eagle3",
            "full",
            device=Device.cuda,
            dtype=Dtype.bfloat16,
            verification=verification,
            draft_sampling=DraftSampling.probabilistic,
            synthetic_acceptance_length=2.0 if synthetic else None,
        )
        engine = make_graph_engine(config, backend)
        run_requests(engine, zoo_requests(6, temperature=0.8, top_p=0.9, top_k=30))
        with no_waiting():
            requests = zoo_requests(6, temperature=0.8, top_p=0.9, top_k=30)
            runs.append(run_requests(engine, requests))
    assert runs[0].outputs == runs[1].outputs


@pytest.mark.slow
@pytest.mark.parametrize("method", ["none", "gemma4_mtp"])
def test_memory_is_what_the_summary_lists(method: str) -> None:
    """E2B with random weights: the peak of loading and running is within 5 % of the parts' sum."""
    gc.collect()  # what earlier tests left
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    config = run_config(
        "shape:gemma4_e2b",
        method=method,
        drafter="shape:gemma4_e2b-assistant" if method == "gemma4_mtp" else None,
        dtype=Dtype.bfloat16,
        weights=Weights.random,
        max_model_len=2048,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        block_size=16,
    )
    config.cudagraph.name, config.engine.device = "full_and_piecewise", Device.cuda
    engine = NativeEngine(config)
    assert isinstance(engine.parts.runner, DeviceRunner)
    engine.parts.runner.run_padding()
    torch.cuda.synchronize()
    parts = engine.info.memory_bytes
    assert parts["graphs"] > 0
    assert parts["activations"] > 0
    listed = sum(parts.values())
    peak = torch.cuda.max_memory_allocated()
    assert peak <= 1.05 * listed + WORKSPACES, parts
    # Of a graph's memory only its outputs count as allocated.
    assert peak >= 0.95 * listed - parts["graphs"], parts

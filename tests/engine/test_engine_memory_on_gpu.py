"""A device's memory is free again when an engine with CUDA graphs is dropped or closed, without a
garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from graph_runs import graph_config, run_requests, zoo_requests

from hydraspec import factory
from hydraspec.config.schema import Device, Dtype
from hydraspec.engine.native import NativeEngine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def used() -> NativeEngine:
    """Greedy requests, then others, of which graphs are captured while they run."""
    config = graph_config(
        "eagle3", "full_and_piecewise", device=Device.cuda, dtype=Dtype.float32, sizes=(2,)
    )
    config.engine.kv_cache.memory_gib = 0.25
    engine = factory.build_engine(config)
    assert isinstance(engine, NativeEngine)
    run_requests(engine, zoo_requests(3))
    run_requests(engine, zoo_requests(2, temperature=0.8))
    return engine


def allocated() -> int:
    """Bytes of tensors, and not of cuBLAS, which keeps a workspace for every stream it has met."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("closes", [False, True], ids=["dropped", "closed"])
def test_an_engine_gives_its_memory_back(closes: bool) -> None:
    used()  # what the first use of kernels and libraries keeps
    before = allocated()
    engine = used()
    assert torch.cuda.memory_allocated() > before + engine.info.memory_bytes["kv_cache"]
    if closes:
        engine.close()
    else:
        del engine
    assert abs(allocated() - before) <= MIB

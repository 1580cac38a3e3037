"""Loading compiles kernels ahead: what warm-ups and captures launch is there, under its key."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from graph_runs import SHARING, graph_config, make_graph_engine, run_requests, zoo_requests
from hydraspec_kernels.attention import paged_kernel  # noqa: F401  which imports Triton
from hydraspec_kernels.runtime.ahead import compiled_ahead
from triton import knobs
from triton.runtime.jit import JITFunction

from hydraspec.config.schema import Device, Dtype, KVDtype, RunConfig
from hydraspec.engine.run import kv_scales, loading

if TYPE_CHECKING:
    from hydraspec_kernels.runtime.compilation import Compiled

pytestmark = pytest.mark.gpu

UNPACKING = "_unpack_kernel"


class Counted:
    """Kernels that were compiled, or read from Triton's cache, and by whom. Loading weights may
    unpack some, before anything is compiled ahead."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ahead: list[str] = []
        self.late: list[str] = []
        self._is_ahead = self._has_begun = False
        patch.setattr(knobs.compilation, "listener", self._note)
        for module in (loading, kv_scales):
            patch.setattr(module, "compiled_ahead", self._watched)

    @contextmanager
    def _watched(self, device: torch.device) -> Iterator[Compiled]:
        self._is_ahead = self._has_begun = True
        try:
            with compiled_ahead(device) as compiled:
                yield compiled
        finally:
            self._is_ahead = False

    def _note(self, *, src: object, **_: object) -> None:
        name = str(getattr(src, "name", src))
        if self._is_ahead:
            self.ahead.append(name)
        elif self._has_begun or name != UNPACKING:
            self.late.append(name)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counted:
    """In a process that has compiled nothing yet, and finds nothing on the disk."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # Of modules: the collector does not list what was frozen (see tests/conftest.py).
    for name, module in list(sys.modules.items()):
        if name.startswith("hydraspec_kernels"):
            for found in vars(module).values():
                if isinstance(found, JITFunction):
                    found.device_caches.clear()
    return Counted(monkeypatch)


def config_of(method: str, mode: str, kv_dtype: KVDtype = KVDtype.auto) -> RunConfig:
    return graph_config(
        method,
        mode,
        device=Device.cuda,
        dtype=Dtype.bfloat16,
        sizes=(1, 2, 8, 16),
        kv_dtype=kv_dtype,
        pair=SHARING if method == "gemma4_mtp" else None,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        max_model_len=256,
    )


@pytest.mark.parametrize("mode", ["full", "full_and_piecewise"])
@pytest.mark.parametrize("method", ["none", "gemma4_mtp", "eagle3"])
def test_warm_ups_and_captures_compile_nothing(counted: Counted, method: str, mode: str) -> None:
    check_compiling(counted, config_of(method, mode))


@pytest.mark.parametrize(
    ("method", "kv_dtype"),
    [
        ("gemma4_mtp on fp8 blocks", KVDtype.fp8),
        ("gemma4_mtp on fp8 experts", KVDtype.auto),
        ("eagle3 on fp8", KVDtype.auto),
        ("eagle3 on four bits", KVDtype.auto),
        ("mtp on fp8", KVDtype.auto),
        ("dspark", KVDtype.auto),
    ],
)
def test_they_compile_nothing_of_other_formats_and_of_blocks(
    counted: Counted, method: str, kv_dtype: KVDtype
) -> None:
    check_compiling(counted, config_of(method, "full_and_piecewise", kv_dtype))


def check_compiling(counted: Counted, config: RunConfig) -> None:
    engine = make_graph_engine(config, None)
    assert len(counted.ahead) > 10
    assert len(set(counted.ahead)) > 5
    assert not counted.late
    run = run_requests(engine, zoo_requests(8, longest=12), concurrency=8)
    assert len(run.outputs) == 8


def test_steps_after_it_are_those_of_an_engine_that_compiled_as_it_went(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its garbage must not stay anywhere: in the state, the cache, or a first use's tensors."""
    runs = []
    for compile_ahead in (loading._compile, lambda runner: None):
        monkeypatch.setattr(loading, "_compile", compile_ahead)
        engine = make_graph_engine(config_of("gemma4_mtp", "full"), None)
        runs.append(run_requests(engine, zoo_requests(16, longest=12), concurrency=16))
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    assert runs[0].outputs == runs[1].outputs
    assert runs[0].drafts == runs[1].drafts


def test_a_baseline_compiles_ahead_too(counted: Counted) -> None:
    engine = make_graph_engine(config_of("gemma4_mtp", "full"), None)
    counted.ahead.clear()
    engine.baseline()
    assert counted.ahead
    assert not counted.late

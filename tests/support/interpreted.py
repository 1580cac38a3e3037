"""Engines on a CPU that run the Triton kernels, in the interpreter, where the references would run.

What is left to a device: Gluon kernels, real graphs, whatever is asynchronous, and linears, whose
many programs the interpreter would take minutes for.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from threading import Lock
from typing import Any

import hydraspec_kernels
import pytest
from hydraspec_kernels.attention import tiling
from recorded_graphs import CalledAgain
from triton_interpreter import mend_interpreter

from hydraspec.engine.run import loading
from hydraspec.models.block_drafter import context
from hydraspec.models.place import Place


def run_as_on_devices(patch: pytest.MonkeyPatch) -> None:
    """Engines that are built from now on have a device's kernels and runners."""
    _run_kernels(patch)
    patch.setattr(Place, "uses_cpu_norms", False)
    patch.setattr(context, "SEPARATE_ON", ())
    assemble = loading.assemble
    patch.setattr(
        loading,
        "assemble",
        lambda *args, **given: assemble(*args, **{"backend": CalledAgain(), **given}),
    )


def _run_kernels(patch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import GridExecutor

    mend_interpreter(patch)
    patch.setattr(tiling, "FULL_DEVICE", 8)  # programs that attention is split into
    # All of them now: a package imported later would keep the answer below for ever.
    for package in pkgutil.walk_packages(hydraspec_kernels.__path__, "hydraspec_kernels."):
        if package.ispkg:
            importlib.import_module(package.name)
    for name, module in list(sys.modules.items()):
        if name.startswith("hydraspec_kernels") and hasattr(module, "runs_kernels"):
            patch.setattr(module, "runs_kernels", lambda x: True)
    lock, run = Lock(), GridExecutor.__call__

    def one_at_a_time(self: Any, *args: Any, **given: Any) -> Any:
        with lock:  # it replaces functions of Triton's language while it runs
            return run(self, *args, **given)

    patch.setattr(GridExecutor, "__call__", one_at_a_time)


def launched_kernels(patch: pytest.MonkeyPatch) -> set[str]:
    """Names of the kernels that were launched; fills as engines run."""
    from triton.runtime.interpreter import GridExecutor

    names: set[str] = set()
    run = GridExecutor.__call__

    def named(self: Any, *args: Any, **given: Any) -> Any:
        names.add(self.fn.__name__)
        return run(self, *args, **given)

    patch.setattr(GridExecutor, "__call__", named)
    return names

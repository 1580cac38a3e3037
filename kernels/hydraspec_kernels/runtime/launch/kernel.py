"""Programmatic dependent launch: a kernel may start while the one in front of it still runs.

Every kernel of ours is launched with `**dependent_launch(x)` and does the following with its
constexpr PDL: `start_next` first of all (the kernel behind may be brought up as soon as this one
is resident), then what needs constants only (prefetching weights), then `wait_for_inputs`, and
only behind that any load of an input and any store. A kernel that waits ends after all kernels in
front of it have ended, so waiting for one's neighbour is waiting for everybody.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from pathlib import Path
from threading import Event, Lock
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime import build, driver
from triton.runtime.jit import JITFunction

from hydraspec_kernels.runtime.launch import supports_dependent_launch
from hydraspec_kernels.runtime.launch.forks import run_in_forks

FORKS_TIMEOUT_S = 120.0  # then threads go on alone


def build_unoptimised(
    name: str,
    src: str,
    srcdir: str,
    library_dirs: list[str],
    include_dirs: list[str],
    libraries: list[str],
    /,
) -> str:
    """Triton's own build of a kernel's host-side launcher, but with -O0.

    Every signature gets a launcher, and a cold start some forty: optimising them takes the compiler
    four times as long, and a launcher only unpacks its arguments.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("no C compiler for the launchers of kernels: install gcc, or set CC")
    library = str(Path(srcdir) / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}")
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # Debian's
    includes = [*include_dirs, srcdir, sysconfig.get_paths(scheme=scheme)["include"]]
    subprocess.check_call(
        [
            *(compiler, src, "-O0", "-shared", "-fPIC", "-Wno-psabi", "-o", library),
            *map(build._library_flag, libraries),
            *(f"-L{folder}" for folder in library_dirs),
            *(f"-I{folder}" for folder in [*includes, *knobs.build.backend_dirs]),
        ],
        stdout=subprocess.DEVNULL,
    )
    return library


# Somebody may have chosen another build; and Tritons that build other languages, too, compile no
# launchers.
_own_build = getattr(build, "_build", None)
if (
    knobs.build.impl is None
    and _own_build is not None
    and hasattr(build, "_library_flag")
    and "language" not in signature(_own_build).parameters
):
    knobs.build.impl = build_unoptimised


class _Loading(Executor):
    """Threads that compile kernels and do what a first launch does: build a launcher, and load.

    They hold the interpreter a third of the time, so forked processes compile into Triton's cache
    first, and the threads find it there.

    Kernels are loaded one at a time. All launchers are extension modules of one name: where kernels
    share a launcher, its second import updates whatever module has that name in sys.modules, and a
    thread that has just imported another launcher would take its function from there.
    """

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._compilations: list[Callable[[], Any]] = []
        self._futures: list[Future[Any]] = []
        self._may_start, self._is_given_up, self._loads = Event(), False, Lock()

    def submit(self, compile_kernel: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        def compile_and_load() -> Any:
            self._may_start.wait()  # or they would hold up the steps
            if self._is_given_up:
                raise RuntimeError("given up")
            kernel = compile_kernel()
            with self._loads:
                kernel.run  # noqa: B018  a property that loads
            return kernel

        self._compilations.append(compile_kernel)
        self._futures.append(self._pool.submit(compile_and_load))
        return self._futures[-1]

    def start(self, num_processes: int) -> int:
        """Compile everything; returns how many kernels that is."""

        def built(compile_kernel: Callable[[], Any]) -> None:
            kernel = compile_kernel()
            driver.active.launcher_cls(kernel.src, kernel.metadata)

        calls = [partial(built, compilation) for compilation in self._compilations]
        run_in_forks(calls, num_processes, FORKS_TIMEOUT_S)
        self._may_start.set()
        return len(calls)

    def finish(self) -> None:
        """Wait for the threads."""
        wait(self._futures)

    def give_up(self) -> None:
        """What no thread has begun is left out."""
        self._is_given_up = True
        self._may_start.set()


class _Compilations:
    """Triton's listener of compilations, which counts them; an earlier listener is told too."""

    def __init__(self) -> None:
        self.count = 0
        self._before = knobs.compilation.listener

    def __call__(self, **compiled: Any) -> None:
        self.count += 1
        if self._before is not None:
            self._before(**compiled)


@cache
def _compilations() -> _Compilations:
    counted = _Compilations()
    knobs.compilation.listener = counted
    return counted


def count_compiled() -> int:
    """See `hydraspec_kernels.runtime.launch.num_compiled`."""
    return _compilations().count


def has_async_compilation() -> bool:
    """Not in older Tritons, nor where kernels are interpreted."""
    return hasattr(triton, "AsyncCompileMode") and not knobs.runtime.interpret


@dataclass(slots=True)
class Compiled:
    """What compiling ahead did; known once it has ended."""

    num_kernels: int = 0
    stepping_s: float = 0.0  # the calls
    compiling_s: float = 0.0
    loading_s: float = 0.0


@contextmanager
def launches_compile(device: torch.device, num_processes: int) -> Iterator[Compiled]:
    """Launches have their kernels compiled by `num_processes` processes, and launch nothing."""
    compiled, clock = Compiled(), time.perf_counter
    started, launch, seen = clock(), JITFunction.run, set[Hashable]()

    def compile_once(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        named = ((name, _kind(value)) for name, value in kwargs.items())
        call = (id(self), *map(_kind, args), *named)
        if call not in seen:  # asking Triton takes ten times as long
            seen.add(call)
            launch(self, *args, grid=grid, warmup=True, **kwargs)

    in_thread = (torch.cuda.set_device, (device,)) if device.index is not None else (None, ())
    with ThreadPoolExecutor(num_processes, "compile", *in_thread) as pool:
        loading = _Loading(pool)
        # Its end waits for all; what failed is compiled again by its first launch, and fails there.
        with triton.AsyncCompileMode(loading, ignore_errors=True):
            try:
                JITFunction.run = compile_once
                try:
                    yield compiled
                finally:
                    JITFunction.run = launch
                stepped = clock()
                compiled.num_kernels = loading.start(num_processes)
                forked = clock()
                loading.finish()  # here an interrupt is heeded; Triton's own wait goes on
            except BaseException:
                loading.give_up()
                raise
    compiled.stepping_s, compiled.compiling_s = stepped - started, forked - stepped
    compiled.loading_s = clock() - forked


def _kind(argument: Any) -> Hashable:
    """What a kernel may be specialised for."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if isinstance(argument, tuple | list):
        return tuple(map(_kind, argument))
    if hasattr(argument, "block_shape"):  # a descriptor of a tensor
        layout = repr(getattr(argument, "layout", None))
        return type(argument), _kind(argument.base), tuple(argument.block_shape), layout
    return type(argument), argument


@triton.jit
def start_next(PDL: tl.constexpr):
    """Let the kernel behind this one start."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Return once all kernels in front have ended and their writes can be read."""
    if PDL:
        tl.extra.cuda.gdc_wait()


def check_contiguous(*tensors: Tensor) -> None:
    """For kernels that index a whole tensor by one stride."""
    for tensor in tensors:
        assert tensor.is_contiguous(), tensor.stride()


def dependent_launch(x: Tensor) -> dict[str, bool]:
    """Launch options for a kernel over `x`: its constexpr PDL, and Triton's launch attribute."""
    if supports_dependent_launch(x.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}

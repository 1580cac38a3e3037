"""Compilation of kernels by Triton: quick builds of launchers, many kernels at once, a count."""

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
from torch import Tensor
from triton import knobs
from triton.runtime import build, driver
from triton.runtime.jit import JITFunction

from hydraspec_kernels.runtime.forks import run_in_forks

FORKS_TIMEOUT_S = 120.0  # afterwards threads compile what is left


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

    Every signature has a launcher, and a cold start builds some forty: with optimisation that takes
    four times as long, and a launcher only unpacks its arguments.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("no C compiler for the launchers of kernels: install gcc, or set CC")
    library = str(Path(srcdir) / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}")
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # on Debian
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


def build_launchers_without_optimisation() -> None:
    """Makes `build_unoptimised` Triton's build, unless another build was chosen already, or this
    Triton builds other languages too and compiles no launchers.
    """
    own_build = getattr(build, "_build", None)
    if (
        knobs.build.impl is None
        and own_build is not None
        and hasattr(build, "_library_flag")
        and "language" not in signature(own_build).parameters
    ):
        knobs.build.impl = build_unoptimised


class _Loading(Executor):
    """Threads that do what a first launch does: compile a kernel, build its launcher, and load it.

    Threads hold the interpreter a third of the time, so forked processes compile into Triton's
    cache first, and the threads read it from there.

    Kernels are loaded one at a time. All launchers are extension modules of the same name: where
    kernels share a launcher, its second import updates the module of that name in sys.modules, and
    a thread that has just imported another launcher would take its function from there.
    """

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._compilations: list[Callable[[], Any]] = []
        self._futures: list[Future[Any]] = []
        self._may_start, self._is_given_up, self._loads = Event(), False, Lock()

    def submit(self, compile_kernel: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        def compile_and_load() -> Any:
            self._may_start.wait()  # compiling now would slow the recorded steps down
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
        """Compiles everything submitted; returns the number of kernels."""

        def built(compile_kernel: Callable[[], Any]) -> None:
            kernel = compile_kernel()
            driver.active.launcher_cls(kernel.src, kernel.metadata)

        calls = [partial(built, compilation) for compilation in self._compilations]
        run_in_forks(calls, num_processes, FORKS_TIMEOUT_S)
        self._may_start.set()
        return len(calls)

    def finish(self) -> None:
        """Waits until all kernels are loaded."""
        wait(self._futures)

    def give_up(self) -> None:
        """Skips the kernels that no thread has started on."""
        self._is_given_up = True
        self._may_start.set()


class _Compilations:
    """A listener that counts Triton's compilations and calls the listener that was set before."""

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
    """See `hydraspec_kernels.runtime.ahead.num_compiled`."""
    return _compilations().count


def has_async_compilation() -> bool:
    """Returns whether Triton can compile in the background; older versions and the interpreter
    cannot."""
    return hasattr(triton, "AsyncCompileMode") and not knobs.runtime.interpret


@dataclass(slots=True)
class Compiled:
    """Number of kernels compiled ahead, and seconds taken; filled in at the end."""

    num_kernels: int = 0
    stepping_s: float = 0.0  # recording the calls
    compiling_s: float = 0.0
    loading_s: float = 0.0


@contextmanager
def launches_compile(device: torch.device, num_processes: int) -> Iterator[Compiled]:
    """Context that records launches instead of running them; at its end `num_processes` processes
    compile the kernels.
    """
    compiled, clock = Compiled(), time.perf_counter
    started, launch, seen = clock(), JITFunction.run, set[Hashable]()

    def compile_once(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        named = ((name, _kind(value)) for name, value in kwargs.items())
        call = (id(self), *map(_kind, args), *named)
        if call not in seen:  # Triton's own lookup takes ten times as long
            seen.add(call)
            launch(self, *args, grid=grid, warmup=True, **kwargs)

    if device.index is None and torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())  # current in this thread only
    in_thread = (torch.cuda.set_device, (device,)) if device.index is not None else (None, ())
    with ThreadPoolExecutor(num_processes, "compile", *in_thread) as pool:
        loading = _Loading(pool)
        # Its end waits for all; a failed kernel is compiled again at its first launch, and raises.
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
                loading.finish()  # an interrupt ends this wait, but not Triton's own
            except BaseException:
                loading.give_up()
                raise
    compiled.stepping_s, compiled.compiling_s = stepped - started, forked - stepped
    compiled.loading_s = clock() - forked


def _kind(argument: Any) -> Hashable:
    """The properties of an argument that Triton specialises kernels on."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if isinstance(argument, tuple | list):
        return tuple(map(_kind, argument))
    if hasattr(argument, "block_shape"):  # a descriptor of a tensor
        layout = repr(getattr(argument, "layout", None))
        return type(argument), _kind(argument.base), tuple(argument.block_shape), layout
    return type(argument), argument

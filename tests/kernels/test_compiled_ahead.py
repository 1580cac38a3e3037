"""Kernels compiled ahead: in parallel, without a launch, and found by later launches; and what
torch's operators read meanwhile.

Triton's own lookup runs on a stand-in for the compiler and the device.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from hydraspec_kernels.runtime import ahead
from hydraspec_kernels.runtime import compilation as launch
from hydraspec_kernels.runtime.ahead import can_compile_ahead, compiled_ahead
from hydraspec_kernels.runtime.compilation import _kind
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

CUDA = torch.device("cuda")


def scaled(out, x, count, SIZE: triton.language.constexpr):  # type: ignore[no-untyped-def]
    """A kernel; the stand-in compiles it."""


def broken(out, x, count, SIZE: triton.language.constexpr):  # type: ignore[no-untyped-def]
    """A kernel that the stand-in refuses."""


@dataclass
class Diary:
    compiled: list[str] = field(default_factory=list)
    loaded_in: list[threading.Thread] = field(default_factory=list)
    num_loading: int = 0
    most_at_once: int = 0
    launched: list[tuple[str, int]] = field(default_factory=list)


class FakeKernel:
    """A compiled kernel, loaded on first use of `run`."""

    function, packed_metadata, metadata = 0, (), None

    def __init__(self, diary: Diary, name: str) -> None:
        self._diary, self._name, self._is_loaded = diary, name, False
        self.src = name

    def launch_metadata(self, *args: object) -> None:
        return None

    @property
    def run(self) -> Any:
        if not self._is_loaded:
            self._is_loaded = True
            self._diary.num_loading += 1
            self._diary.most_at_once = max(self._diary.most_at_once, self._diary.num_loading)
            time.sleep(0.01)
            self._diary.num_loading -= 1
            self._diary.loaded_in.append(threading.current_thread())
        return lambda x, *args: self._diary.launched.append((self._name, x))


class FakeDriver:
    @staticmethod
    def launcher_cls(src: object, metadata: object) -> None:
        """Leaves a file that names the process which built the launcher."""
        if folder := os.environ.get("LAUNCHERS"):
            Path(folder, f"{src}-{os.getpid()}").touch()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def diary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Diary]:
    found = Diary()

    def fake_compile(src: Any, **kwargs: object) -> FakeKernel:
        name = src.fn.__name__
        found.compiled.append(name)
        if name == "broken":
            raise ValueError("broken cannot be compiled")
        return FakeKernel(found, name)

    # Which Triton imports at a first launch, and which must be told of the interpreter.
    pytest.importorskip("triton.experimental.gluon")
    before = driver._active
    monkeypatch.setattr("triton.compiler.compile", fake_compile)
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    driver.set_active(FakeDriver())  # type: ignore[arg-type]
    yield found
    driver._active = before


def kernels() -> tuple[Any, Any]:
    return JITFunction(scaled), JITFunction(broken)


def run_steps(kernel: Any) -> None:
    """Three specialisations: an argument that 16 divides, one that it does not, another size."""
    out, x = torch.empty(64), torch.empty(64)
    for _ in range(3):
        kernel[(3,)](out, x, 32, SIZE=16)
        kernel[(3,)](out, x, 48, SIZE=16)
        kernel[(3,)](out, x[1:], 7, SIZE=16)
        kernel[(3,)](out, x, 32, SIZE=64)


def test_what_was_compiled_ahead_is_what_launches_find(diary: Diary) -> None:
    """A cache key that differs from the launch's would compile everything twice."""
    kernel, _ = kernels()
    with compiled_ahead(CUDA) as compiled:
        run_steps(kernel)
        assert not diary.compiled, "threads hold up the steps"
    assert compiled.num_kernels == 3
    assert diary.compiled == ["scaled"] * 3
    assert len(diary.loaded_in) == 3
    assert threading.main_thread() not in diary.loaded_in
    assert not diary.launched
    run_steps(kernel)
    assert len(diary.compiled) == 3
    assert diary.launched == [("scaled", 3)] * 12


def test_other_processes_compile_first(
    diary: Diary, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each kernel is compiled in one of them."""
    monkeypatch.setenv("LAUNCHERS", str(tmp_path))
    kernel, _ = kernels()
    with compiled_ahead(CUDA):
        run_steps(kernel)
        assert not any(tmp_path.iterdir())
    makers = [path.name.split("-") for path in tmp_path.iterdir()]
    assert makers
    assert {name for name, _ in makers} == {"scaled"}
    assert str(os.getpid()) not in {process for _, process in makers}


def test_a_kernel_that_was_there_before_is_not_launched_either(diary: Diary) -> None:
    """It would read what the kernels before it have not written."""
    kernel, _ = kernels()
    run_steps(kernel)
    diary.launched.clear()
    with compiled_ahead(CUDA):
        run_steps(kernel)
    assert not diary.launched
    assert len(diary.compiled) == 3


def test_kernels_are_loaded_one_at_a_time(diary: Diary) -> None:
    """Catches two launchers imported at once, and a kernel called with the wrong one."""
    kernel, _ = kernels()
    with compiled_ahead(CUDA):
        run_steps(kernel)
    assert len(diary.loaded_in) == 3
    assert diary.most_at_once == 1


def test_the_first_launch_tells_why_a_kernel_does_not_compile(diary: Diary) -> None:
    kernel, bad = kernels()
    with compiled_ahead(CUDA):
        run_steps(bad)
        run_steps(kernel)
    assert not diary.launched
    run_steps(kernel)
    with pytest.raises(ValueError, match="broken cannot"):
        run_steps(bad)


def test_after_an_error_launches_launch(diary: Diary) -> None:
    kernel, _ = kernels()
    original = JITFunction.run

    def fail() -> None:
        with compiled_ahead(CUDA):
            run_steps(kernel)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert JITFunction.run is original
    run_steps(kernel)
    assert len(diary.launched) == 12
    with compiled_ahead(CUDA):
        run_steps(kernel)
    assert len(diary.launched) == 12


def test_an_interrupt_while_forks_compile_ends_the_waiting(
    diary: Diary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    def compile_nothing() -> None:
        with compiled_ahead(CUDA):
            run_steps(kernel)

    kernel, _ = kernels()
    monkeypatch.setattr(launch, "run_in_forks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compile_nothing()
    assert not diary.compiled
    run_steps(kernel)
    assert len(diary.launched) == 12


def test_an_interrupt_while_threads_compile_leaves_out_the_rest(
    diary: Diary, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(list[str]):
        def append(self, name: str) -> None:
            super().append(name)
            time.sleep(0.5)

    def interrupted(futures: object) -> None:
        raise KeyboardInterrupt

    def compile_some() -> None:
        with compiled_ahead(CUDA):
            run_steps(kernel)

    kernel, _ = kernels()
    diary.compiled = Slow()
    monkeypatch.setattr(launch, "run_in_forks", lambda *_: None)
    monkeypatch.setattr(launch, "wait", interrupted)
    monkeypatch.setattr(ahead, "num_processes", lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        compile_some()
    assert len(diary.compiled) < 3
    run_steps(kernel)
    assert len(diary.launched) == 12


def test_it_is_left_alone_where_nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    assert can_compile_ahead(CUDA)
    assert not can_compile_ahead(torch.device("cpu"))
    monkeypatch.setattr(knobs.runtime, "interpret", True)
    assert not can_compile_ahead(CUDA)
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.delattr(triton, "AsyncCompileMode")
    assert not can_compile_ahead(CUDA)


def test_an_argument_keeps_no_memory(diary: Diary) -> None:
    """Otherwise the largest step's activations would stay until everything is compiled."""
    kernel, _ = kernels()
    x = torch.empty(64)
    watched = weakref.ref(x)
    with compiled_ahead(CUDA):
        kernel[(1,)](x, x, 32, SIZE=16)
        del x
        assert watched() is None


def test_a_descriptor_of_a_tensor_counts_by_its_tiles() -> None:
    """Not by the tensor: it has no hash, and would be kept alive."""
    descriptors = [
        TensorDescriptor(torch.empty(rows, 64), [rows, 64], [64, 1], [16, columns])
        for rows, columns in ((16, 16), (32, 16), (32, 32))
    ]
    kinds = [hash(_kind(descriptor)) for descriptor in descriptors]
    assert kinds[0] == kinds[1] != kinds[2]


GARBAGE = torch.tensor([2**40, -7, 3])


def indexed(values: torch.Tensor, at: torch.Tensor) -> list[torch.Tensor]:
    """The operators of a step that take indices."""
    wide = at.unsqueeze(1)
    return [
        values.index_select(0, at),
        torch.nn.functional.embedding(at, values),
        values[at],
        values.gather(0, wide),
        values.clone().index_copy_(0, at, values),
        values.scatter(1, wide, 0.0),
        values.clone().scatter_(1, wide, values),
    ]


def test_indices_that_no_kernel_wrote_are_zeros() -> None:
    values = torch.arange(6.0).view(3, 2)
    with pytest.raises((IndexError, RuntimeError)):
        indexed(values, GARBAGE)
    with ahead.Rehearsing():
        found = indexed(values, GARBAGE)
    assert [x.shape for x in found] == [
        x.shape for x in indexed(values, torch.zeros(3, dtype=torch.int64))
    ]
    assert torch.equal(found[0], values[:1].expand(3, 2))


def test_other_operators_keep_their_whole_numbers() -> None:
    with ahead.Rehearsing():
        assert (GARBAGE + 1).equal(torch.tensor([2**40 + 1, -6, 4]))


@pytest.mark.parametrize("rows", [0, 3])
def test_products_are_left_out(rows: int) -> None:
    x, weight, bias = torch.ones(rows, 4), torch.ones(5, 4).t(), torch.ones(5)
    with ahead.Rehearsing(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
        found = [torch.mm(x, weight), x.mm(weight), torch.addmm(bias, x, weight)]
    for product in found:
        assert product.shape == (rows, 5)
        assert product.is_contiguous()
        assert not product.any()


def test_nothing_is_written_where_indices_say() -> None:
    """A cache that is used afterwards would keep it, in a block of no request."""
    counts = torch.zeros(3, dtype=torch.int64)
    values = torch.zeros(3, 2)
    with ahead.Rehearsing():
        found = counts.index_add_(0, GARBAGE, torch.ones(3, dtype=torch.int64))
        counts[GARBAGE] = 5
        values.index_copy_(0, GARBAGE, torch.full((3, 2), torch.nan))
        values.scatter_(1, GARBAGE.unsqueeze(1), 2.0)
    assert found is counts
    assert not counts.any()
    assert not values.any()

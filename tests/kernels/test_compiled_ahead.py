"""Kernels compiled ahead: by a pool, launched nowhere, found by their launches; and what torch's
operators read meanwhile.

Triton's own lookup runs over a stand-in for the compiler and the device.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import triton
from hydraspec_kernels.launch import ahead, compiled_ahead
from hydraspec_kernels.launch import kernel as launch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

CUDA = torch.device("cuda")


def scaled(out, x, count, SIZE: triton.language.constexpr):  # type: ignore[no-untyped-def]
    """A kernel that nobody compiles."""


def broken(out, x, count, SIZE: triton.language.constexpr):  # type: ignore[no-untyped-def]
    """One that cannot be."""


@dataclass
class Diary:
    compiled: list[str] = field(default_factory=list)
    loaded_in: list[threading.Thread] = field(default_factory=list)
    launched: list[tuple[str, int]] = field(default_factory=list)


class FakeKernel:
    """What Triton's compiler gives back: loaded on first use of `run`."""

    function, packed_metadata = 0, ()

    def __init__(self, diary: Diary, name: str) -> None:
        self._diary, self._name, self._is_loaded = diary, name, False

    def launch_metadata(self, *args: object) -> None:
        return None

    @property
    def run(self) -> Any:
        if not self._is_loaded:
            self._is_loaded = True
            self._diary.loaded_in.append(threading.current_thread())
        return lambda x, *args: self._diary.launched.append((self._name, x))


class FakeDriver:
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
    """A key that differs from the launch's would compile everything twice."""
    kernel, _ = kernels()
    with compiled_ahead(CUDA):
        run_steps(kernel)
        assert not diary.compiled, "threads hold up the steps"
    assert diary.compiled == ["scaled"] * 3
    assert len(diary.loaded_in) == 3
    assert threading.main_thread() not in diary.loaded_in
    assert not diary.launched
    run_steps(kernel)
    assert len(diary.compiled) == 3
    assert diary.launched == [("scaled", 3)] * 12


def test_a_kernel_that_was_there_before_is_not_launched_either(diary: Diary) -> None:
    """It would read what the ones in front of it have not written."""
    kernel, _ = kernels()
    run_steps(kernel)
    diary.launched.clear()
    with compiled_ahead(CUDA):
        run_steps(kernel)
    assert not diary.launched
    assert len(diary.compiled) == 3


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


@pytest.mark.parametrize("reason", ["an older Triton", "the interpreter", "no GPU"])
def test_elsewhere_launches_stay_launches(
    diary: Diary, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    if reason == "an older Triton":
        monkeypatch.delattr(triton, "AsyncCompileMode")
    elif reason == "the interpreter":
        monkeypatch.setattr(knobs.runtime, "interpret", True)
    kernel, _ = kernels()
    with (
        compiled_ahead(torch.device("cpu"))
        if reason == "no GPU"
        else launch.launches_compile(CUDA, 2)
    ):
        run_steps(kernel)
    assert len(diary.launched) == 12


def test_an_argument_keeps_no_memory(diary: Diary) -> None:
    """The largest step's activations would otherwise all stay until everything is compiled."""
    kernel, _ = kernels()
    x = torch.empty(64)
    watched = weakref.ref(x)
    with compiled_ahead(CUDA):
        kernel[(1,)](x, x, 32, SIZE=16)
        del x
        assert watched() is None


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
    with ahead.ZeroIndices():
        found = indexed(values, GARBAGE)
    assert [x.shape for x in found] == [
        x.shape for x in indexed(values, torch.zeros(3, dtype=torch.int64))
    ]
    assert torch.equal(found[0], values[:1].expand(3, 2))


def test_other_operators_keep_their_whole_numbers() -> None:
    with ahead.ZeroIndices():
        assert (GARBAGE + 1).equal(torch.tensor([2**40 + 1, -6, 4]))
        assert GARBAGE.index_select(0, GARBAGE).equal(torch.full((3,), 2**40))

"""Engines on a CPU that rehearse as they do on a device, and what a rehearsal may have left behind.

A rehearsal reads zeros for every index and leaves products out (runtime/ahead.py): whatever is made
in it and kept is wrong.
"""

from __future__ import annotations

import functools
import gc
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydraspec_kernels.runtime.ahead import Rehearsing
from torch import Tensor

from hydraspec.engine.run import loading
from hydraspec.engine.run.device_runner import DeviceRunner


class RehearsingReferences(Rehearsing):
    """References stand where a device has kernels: row counts that they read are zeros too."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.repeat_interleave and "output_size" in (kwargs or {}):
            return torch.zeros(kwargs["output_size"], dtype=torch.int64)
        return super().__torch_function__(func, types, args, kwargs)


LEAVES = (str, bytes, int, float, complex, type, types.ModuleType, torch.device, torch.dtype)


def rehearse_on_cpu(patch: pytest.MonkeyPatch) -> None:
    """Loading goes the way of a device for every engine that launches; no kernel is compiled."""

    @contextmanager
    def compiled_ahead(device: torch.device) -> Iterator[SimpleNamespace]:
        found = SimpleNamespace(num_kernels=0, stepping_s=0.0, compiling_s=0.0, loading_s=0.0)
        with RehearsingReferences():
            yield found

    def failed(message: str, *args: object) -> None:
        assert "one by one" not in message, message % args

    patch.setattr(loading, "can_compile_ahead", lambda device: True)
    patch.setattr(loading, "compiled_ahead", compiled_ahead)
    patch.setattr(loading.log, "warning", failed)  # a rehearsal that failed would be passed over


def rehearse_where_it_decodes(patch: pytest.MonkeyPatch) -> None:
    """A planted bug: the runner that rehearses decodes, as it did for every second engine."""
    true_runner = loading.build_runner

    def runner(*args: object, **given: object) -> object:
        made = true_runner(*args, **given)  # type: ignore[arg-type]
        if isinstance(made, DeviceRunner):
            loading._compile(made)
        return made

    patch.setattr(loading, "build_runner", runner)


class Snapshot:
    """Every tensor that can be reached from some objects, with its content, and every other tensor
    of the process."""

    def __init__(self, *roots: object) -> None:
        self._roots = roots
        self._tensors = reachable_tensors(roots)
        self._contents = {name: found.clone() for name, found in self._tensors.items()}
        self._alive = living_tensors()  # held, so that no later tensor has the id of one of them

    def __len__(self) -> int:
        return len(self._tensors)

    def assert_unchanged(self) -> None:
        """The same tensors with the same contents, and no further one anywhere."""
        found = reachable_tensors(self._roots)
        known = {id(tensor) for tensor in self._tensors.values()}
        made = [name for name, tensor in found.items() if id(tensor) not in known]
        assert not made, f"made meanwhile: {made}"
        assert found.keys() == self._tensors.keys()
        changed = [
            name for name, tensor in found.items() if not _equal(tensor, self._contents[name])
        ]
        assert not changed, f"changed meanwhile: {changed}"
        if self._later_tensors():
            gc.collect()
            left = self._later_tensors()
            assert not left, f"left somewhere: {left}"

    def _later_tensors(self) -> list[torch.Size]:
        before = {id(tensor) for tensor in self._alive}
        return [tensor.shape for tensor in living_tensors() if id(tensor) not in before]


def _equal(one: Tensor, other: Tensor) -> bool:
    """Bit for bit: NaN equals itself."""
    return one.shape == other.shape and torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def living_tensors() -> list[Tensor]:
    # isinstance would ask deprecated objects.
    return [found for found in gc.get_objects() if issubclass(type(found), Tensor)]


def reachable_tensors(roots: Iterable[object]) -> dict[str, Tensor]:
    """Tensors by the way to them, each once: attributes, items, closures and bound methods."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    queue: deque[tuple[str, Any]] = deque((type(root).__name__, root) for root in roots)
    while queue:
        name, value = queue.popleft()
        if value is None or isinstance(value, LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            found[name] = value
        else:
            queue.extend((f"{name}{way}", part) for way, part in _parts(value))
    return found


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [(f"[{place}]", part) for place, part in enumerate(value)]
    if isinstance(value, types.MethodType):
        return [(".__self__", value.__self__), (".__func__", value.__func__)]
    if isinstance(value, functools.partial):
        return [(".args", value.args), (".keywords", value.keywords)]
    if isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        held = [cell.cell_contents for cell in cells if _is_filled(cell)]
        return [(f".closure[{place}]", part) for place, part in enumerate(held)]
    parts = [(f".{key}", part) for key, part in getattr(value, "__dict__", {}).items()]
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for key in (slots,) if isinstance(slots, str) else slots:
            if key not in ("__dict__", "__weakref__") and hasattr(value, key):
                parts.append((f".{key}", getattr(value, key)))
    return parts


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False

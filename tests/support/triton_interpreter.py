"""Triton's interpreter as the tests use it: with loops repaired, and made faster."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import pytest


def mend_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repair the loops of Triton 3.6's interpreter, and have it prepare the language once a launch.

    It holds loop bounds as numpy arrays of one dimension, which numpy 2.4 no longer turns into
    numbers.
    """
    if find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: object, scope: object) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(interpreter, "_patch_lang", _Language(interpreter))
    _remember_dtypes(monkeypatch, interpreter)
    _make_types_of_tuples_lazy(monkeypatch, interpreter.tl.core)


def _remember_dtypes(monkeypatch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """The original makes a table of dtypes for each that it looks up."""
    look_up, known = interpreter._get_np_dtype, {}

    def remembered(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    monkeypatch.setattr(interpreter, "_get_np_dtype", remembered)


def _make_types_of_tuples_lazy(monkeypatch: pytest.MonkeyPatch, core: Any) -> None:
    """Every tensor and block type holds its shape as a tuple, whose type nearly none is asked for:
    naming it took a fifth of an interpreted kernel's time."""
    build, look_up = core.tuple.__init__, core.tuple.__getattr__

    def built(self: Any, args: Iterable[Any], type: Any = None) -> None:
        if type is None:
            self.values = list(args)
        else:
            build(self, args, type)

    def looked_up(self: Any, name: str) -> Any:
        if name != "type":
            return look_up(self, name)
        self.type = core._type_for_tuple_values(self.values)
        return self.type

    monkeypatch.setattr(core.tuple, "__init__", built)
    monkeypatch.setattr(core.tuple, "__getattr__", looked_up)


# An attribute of the language that a launch replaces: owner, name, original value, replacement.
Change = tuple[Any, str, Any, Any]


class _Language:
    """Functions of `triton.language` replaced by the interpreter's, as its `_patch_lang` does it.

    The original looks for them by name in every module, at each launch and again at each call of a
    device function: a third of the time of a kernel that calls many. This one looks once, and
    replaces nothing twice within a launch.
    """

    def __init__(self, interpreter: Any) -> None:
        self._interpreter, self._original = interpreter, interpreter._patch_lang
        self._seen: dict[Any, frozenset[str]] = {}  # modules of the language, by function
        self._found: dict[frozenset[str], list[Change]] = {}  # by these modules
        self._in_place: dict[frozenset[str], list[Change]] = {}  # of the launch that runs

    def __call__(self, function: Any) -> _Language:
        if function not in self._seen:
            language, names = self._interpreter.tl, function.__globals__.values()
            modules = {value.__name__ for value in names if inspect.ismodule(value)}
            of_language = {language.__name__, language.core.__name__}
            self._seen[function] = frozenset(modules & of_language)
        seen = self._seen[function]
        if any(seen <= placed for placed in self._in_place):
            return self
        changes = self._found.get(seen) or self._find(function)
        if not self._in_place:  # what is replaced already cannot be found again
            self._found[seen] = changes
        for owner, name, _, replacement in changes:
            setattr(owner, name, replacement)
        self._in_place[seen] = changes
        return self

    def restore(self) -> None:
        """Put the language's own functions back, when a launch ends."""
        while self._in_place:
            _, changes = self._in_place.popitem()
            for owner, name, original, _ in reversed(changes):
                if original is self._interpreter._MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)

    def _find(self, function: Any) -> list[Change]:
        scope = self._original(function)
        changes = [
            (owner, name, original, vars(owner)[name]) for owner, name, original in scope._changes
        ]
        scope.restore()
        return changes

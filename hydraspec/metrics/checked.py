"""Judges whether a value read from a file has the type that its schema says."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints
from typing import is_typeddict as is_record


def mismatch(value: object, annotation: Any, name: str) -> str | None:
    """The first mismatch of a value with its type in words, such as "lossless.verdict is missing"
    or "speedup.mean is 'fast'"; None if there is none. An int passes as a float, and a record may
    have further keys.

    Args:
        annotation: a TypedDict, or a type made of TypedDicts and JSON's types.
        name: the name of `value` in the words.
    """
    return next(_mismatches(value, annotation, name), None)


def _mismatches(value: object, annotation: Any, name: str) -> Iterator[str]:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is NotRequired:
        yield from _mismatches(value, inner[0], name)
    elif origin in (types.UnionType, Union):
        found = [mismatch(value, part, name) for part in inner]
        if None not in found:
            closest = [one for one in found if one and not one.startswith(f"{name} is")]
            yield (closest or [_wrong(value, name)])[0]
    elif is_record(annotation):
        yield from _of_record(value, annotation, name)
    elif origin in (dict, Mapping):
        if not isinstance(value, dict):
            yield _wrong(value, name)
        else:
            for key, item in value.items():
                yield from _mismatches(item, inner[1], f"{name}.{key}")
    elif origin in (list, Sequence):
        if not isinstance(value, list):
            yield _wrong(value, name)
        else:
            for i, item in enumerate(value):
                yield from _mismatches(item, inner[0], f"{name}[{i}]")
    elif not _is_plain(value, annotation):
        yield _wrong(value, name)


def _of_record(value: object, record: Any, name: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield _wrong(value, name)
        return
    for key, annotation in _hints(record).items():
        where = f"{name}.{key}" if name else key
        if key in value:
            yield from _mismatches(value[key], annotation, where)
        elif get_origin(annotation) is not NotRequired:
            yield f"{where} is missing"


@cache
def _hints(record: Any) -> dict[str, Any]:
    return get_type_hints(record, include_extras=True)


def _is_plain(value: object, annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return value in get_args(annotation)
    if annotation in (object, Any):
        return True
    if annotation is float:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    return type(value) is annotation


def _wrong(value: object, name: str) -> str:
    shown = repr(value)
    return f"{name} is {shown if len(shown) <= 40 else type(value).__name__}"

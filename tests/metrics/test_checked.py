"""Values from files against the schema's types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

import pytest

from hydraspec.metrics.checked import mismatch


class Inner(TypedDict):
    mean: float
    ci95: Sequence[float] | None


class Record(TypedDict):
    kind: Literal["a", "b"]
    inner: Inner | None
    counts: Mapping[str, int]
    free: NotRequired[str]


GOOD: dict[str, Any] = {"kind": "a", "inner": {"mean": 1, "ci95": [0.5, 2]}, "counts": {"x": 1}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"inner": None, "more": 1, "free": "x"}, None),
        ({"kind": "c"}, "kind is 'c'"),
        ({"inner": {"mean": 1}}, "inner.ci95 is missing"),
        ({"inner": {"mean": float("inf"), "ci95": None}}, "inner.mean is inf"),
        ({"inner": {"mean": True, "ci95": None}}, "inner.mean is True"),
        ({"inner": {"mean": 1.0, "ci95": [1.0, "2"]}}, "inner.ci95[1] is '2'"),
        ({"inner": 3}, "inner is 3"),
        ({"counts": {"x": 1.5}}, "counts.x is 1.5"),
        ({"counts": [1]}, "counts is [1]"),
        ({"free": 1}, "free is 1"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], says: str | None) -> None:
    assert mismatch({**GOOD, **change}, Record, "") == says


def test_something_else_than_a_record() -> None:
    assert mismatch([1], Record, "summary") == "summary is [1]"
    assert mismatch({"kind": "a"}, Record, "it") == "it.inner is missing"
    assert mismatch("x" * 99, Record, "it") == "it is str"

"""The rounds of a measurement: parts of the workload."""

from __future__ import annotations

import pytest

from hydraspec.lab.rounds import _parts
from hydraspec.types import Request, SamplingParams


def conversations(*lengths: int) -> list[Request]:
    turns = [turn for length in lengths for turn in range(length)]
    return [
        Request(
            index=i,
            id=str(i),
            sampling=SamplingParams(),
            after=i - 1 if turn else None,
            turn=turn + 1,
        )
        for i, turn in enumerate(turns)
    ]


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ((1, 1, 1, 1, 1), [2, 3]),
        ((1,), [1]),
        ((8,), [8]),
        ((3, 3), [3, 3]),
        ((2, 3, 2), [2, 5]),
        ((1, 6), [1, 6]),
        ((4, 1, 1), [4, 2]),
    ],
)
def test_conversations_stay_whole(lengths: tuple[int, ...], sizes: list[int]) -> None:
    requests = conversations(*lengths)
    parts = [list(part) for part in _parts(requests)]
    assert [len(part) for part in parts] == sizes
    assert [r for part in parts for r in part] == requests
    assert all(part[0].after is None for part in parts)

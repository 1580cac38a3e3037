"""The sentence on two jobs that cannot be told apart: what the prompts tell, and how many would."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from simulated_runs import Machine

from hydraspec.metrics.paired import LEVEL, PairedRatio, paired_ratio
from hydraspec.study.jobs import Job
from hydraspec.study.pairs import ALL, Figure
from hydraspec.study.words import sentence

SPEEDUPS = (1, -1, -1, 1, -1, 1, 1, -1)
SUMMARY: Any = SimpleNamespace(summary={"accuracy": None})
A = Job(name="0", label="eagle3", runs=[SUMMARY])
B = Job(name="1", label="mtp", runs=[SUMMARY])


def pair(seed: int, *, num_requests: int, faster: float) -> PairedRatio:
    machine = Machine(seed, num_requests=num_requests)
    columns = np.concatenate([machine.run(faster=faster), machine.run()])
    return paired_ratio(columns, SPEEDUPS, at_once=4)


def said(found: PairedRatio, level: float) -> str:
    assert found.ratio is not None
    assert found.p is not None
    adjusted = min(1.0, found.p * LEVEL / level)
    figure = Figure(
        measure="speedup",
        scope=ALL,
        ratio=found,
        job=2 * found.ratio,
        reference=2.0,
        p_adjusted=adjusted,
        level=level,
    )
    return sentence(figure, A, B)


def test_what_is_not_told_is_not_said_to_be_detectable() -> None:
    """Catches "ratio 0.585 …; these 24 tell differences of 15.6 %: repeat both runs"."""
    level = 0.05 / 66
    not_told = 0
    for seed in range(40):
        found = pair(seed, num_requests=24, faster=0.585)
        words = said(found, level)
        if "cannot tell" not in words:
            continue
        not_told += 1
        least = found.detectable(level)
        assert least is not None
        assert found.ratio is not None
        assert max(found.ratio, 1 / found.ratio) < least
        assert "in four of five repeats these 24 tell" in words
        assert "needed for this one" in words
        assert "repeat both runs" not in words
    assert not_told > 20


@pytest.mark.parametrize(
    ("is_meant", "says"),
    [
        (lambda least: least > 10, "tell no factor below 10;"),
        (lambda least: 2 < least < 10, "tell a factor of "),
        (lambda least: least < 2, "tell differences of "),
    ],
)
def test_the_size_that_is_told(is_meant: Callable[[float], bool], says: str) -> None:
    sizes = ((16, 0.05 / 66), (16, 0.05), (64, 0.05), (256, 0.05))
    pairs = [
        (pair(seed, num_requests=n, faster=1.05), level) for n, level in sizes for seed in range(9)
    ]
    words = [
        said(found, level)
        for found, level in pairs
        if is_meant(found.detectable(level) or 1.0) and "cannot tell" in said(found, level)
    ]
    assert words
    assert all(says in each or "no number of prompts" in each for each in words)

"""Settings that are decided before a run folder is written."""

from __future__ import annotations

import pytest

from hydraspec.cli.compose import plan
from hydraspec.lab.resolution import resolve


@pytest.mark.parametrize(
    ("asked", "typed", "threads"),
    [
        ("2", [], 2),
        ("2", ["engine.num_threads=1"], 1),
        ("1", [], None),
        ("4,2", [], None),
    ],
)
def test_threads_are_those_of_the_environment_where_no_key_says_so(
    asked: str, typed: list[str], threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches one thread for a narrow target whatever OMP_NUM_THREADS says."""
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    config = plan(["engine.device=cpu", *typed]).jobs[0].config
    resolve(config)
    assert config.engine.num_threads == threads

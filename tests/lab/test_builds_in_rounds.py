"""Kernels are compiled and graphs captured before the measured rounds: a run in which one of them
held such work says so, because its speeds include the time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_engine import Behaviour, FakeEngine

Use = Callable[[FakeEngine], FakeEngine]
Run = Callable[[], dict[str, Any]]
NOTHING = {"kernels": 0, "graphs": 0}


def test_builds_of_the_warm_up_are_not_counted(use_engine: Use, run_config: Run) -> None:
    use_engine(FakeEngine(Behaviour(builds_at_step=0)))
    summary = run_config()
    assert summary["built_in_rounds"] == summary["baseline"]["built_in_rounds"] == NOTHING
    assert not [warning for warning in summary["warnings"] if "measured rounds" in warning]


@pytest.mark.parametrize("share", [0.4, 0.9], ids=["round 1", "round 2"])
def test_a_capture_in_a_measured_round_is_warned_of(
    use_engine: Use, run_config: Run, share: float
) -> None:
    """The bug: a way of sampling or a batch size whose graph is captured when it is first met."""
    engine = use_engine(FakeEngine())
    run_config()
    use_engine(FakeEngine(Behaviour(builds_at_step=int(share * engine.num_steps))))
    summary = run_config()
    assert summary["built_in_rounds"] == {"kernels": 1, "graphs": 1}
    assert summary["baseline"]["built_in_rounds"] == NOTHING
    (warning,) = [w for w in summary["warnings"] if "measured rounds" in w]
    assert warning.startswith("1 kernels were compiled and 1 graphs captured")


def test_a_warm_up_goes_on_while_kernels_are_compiled(use_engine: Use, run_config: Run) -> None:
    """Without graphs a step's kernels depend on its rows, and more of them are met by whole
    requests than by a few tokens. What an endless compiler builds is reported, not waited for."""
    quiet = use_engine(FakeEngine())
    run_config()
    once = use_engine(FakeEngine(Behaviour(builds_at_step=0)))
    run_config()
    eager = use_engine(FakeEngine(Behaviour(is_eager=True)))
    run_config()
    assert once.num_steps == eager.num_steps > quiet.num_steps
    always = use_engine(FakeEngine(Behaviour(builds_always=True)))
    assert run_config()["built_in_rounds"]["kernels"] > 0
    assert always.num_steps > once.num_steps

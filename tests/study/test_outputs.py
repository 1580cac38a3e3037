"""What the gate says of tests of sampled outputs that have no power."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hydraspec.metrics.lossless import MORE_VARIED
from hydraspec.study import outputs


def job(*tests: dict[str, Any] | None) -> Any:
    runs = [
        SimpleNamespace(
            rows=[], summary={"lossless": {"verdict": "not_checked", "distribution": test}}
        )
        for test in tests
    ]
    return SimpleNamespace(runs=runs)


def found(says: str, p: float = 1.0, detectable: float | None = None) -> dict[str, Any]:
    return {"says": says, "p": p, "detectable": detectable}


VARIED, VACUOUS, OLDER = found("same", 0.4, 0.1), found("cannot_tell"), found("same")


def test_a_test_without_power_fails_nothing_and_proves_nothing() -> None:
    """Also as older versions wrote it: "same" with a null `detectable`."""
    for now in (VACUOUS, OLDER):
        for was in (VARIED, VACUOUS, OLDER, None):
            assert not [*outputs.broken(job(now), job(was))]
        (said,) = outputs.untold(job(now))
        assert said.startswith("distribution of sampled outputs: cannot tell")
        assert MORE_VARIED in said
    for told in (job(VARIED), job(VACUOUS, VARIED), job(None)):
        assert not [*outputs.untold(told)]


def test_a_test_that_could_not_tell_and_fails_now_is_named() -> None:
    other = found("different", 0.0005, 0.1)
    (said,) = outputs.broken(job(other), job(VACUOUS))
    assert said.endswith("not the target's, p = 0.0005, could not be told before")
    (said,) = outputs.broken(job(other), job(VARIED))
    assert said.endswith("p = 0.0005, had p = 0.4")
    assert not [*outputs.untold(job(other))]


def test_a_test_without_power_is_no_loss_where_it_is_left_out() -> None:
    assert not [*outputs.broken(job(None), job(VACUOUS))]
    (said,) = outputs.broken(job(None), job(VARIED))
    assert said.endswith("not tested any more, had p = 0.4")

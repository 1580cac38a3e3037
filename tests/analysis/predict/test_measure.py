"""Times of steps: what counts as typical."""

from __future__ import annotations

import pytest

from hydraspec.analysis.predict.measure import typical


def test_a_few_outliers_do_not_count() -> None:
    assert typical([*[2.0] * 46, 1000.0, 1000.0]) == pytest.approx(2.0)
    assert typical([3.0]) == 3.0


def test_interrupted_steps_count_in_proportion() -> None:
    """A third of the steps takes four times as long: a median would not see them."""
    assert typical([*[2.0] * 32, *[8.0] * 16]) == pytest.approx(4.0, rel=0.05)

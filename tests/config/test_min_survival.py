"""method.options.min_survival of method=dspark: its range, and what it does not go with."""

from __future__ import annotations

import pytest

from hydraspec.cli.compose import plan
from hydraspec.config.options import DSparkOptions
from hydraspec.types import ConfigurationError

KEY = "method.options.min_survival"


def test_it_is_off_unless_set() -> None:
    (off,), (on,) = (plan(["method=dspark", *more]).jobs for more in ([], [f"{KEY}=0.3"]))
    assert off.config.method.options == DSparkOptions(min_survival=None)
    assert on.config.method.options == DSparkOptions(min_survival=0.3)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ([f"{KEY}=1.5"], r"min_survival=1\.5 is out of range\n  allowed: 0 to 1"),
        ([f"{KEY}=-0.1"], r"min_survival=-0\.1 is out of range\n  allowed: 0 to 1"),
        ([f"{KEY}=nan"], r"min_survival=nan is out of range\n  allowed: 0 to 1"),
        ([f"{KEY}=high"], r"min_survival=high"),
        (
            [f"{KEY}=0.3", "method.num_speculative_tokens=auto"],
            r"min_survival=0\.3 leaves out drafts whose number the engine chooses already",
        ),
        (
            [
                *(f"{KEY}=0.3", "method.verification=synthetic"),
                "method.synthetic_acceptance_length=2",
            ],
            r"min_survival=0\.3 leaves out drafts whose acceptance is drawn",
        ),
    ],
)
def test_what_it_cannot_be_is_one_message(typed: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan(["method=dspark", *typed])

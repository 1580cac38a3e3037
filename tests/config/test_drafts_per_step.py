"""method.num_speculative_tokens=auto: its keys, and what it does not go with."""

from __future__ import annotations

import pytest

from hydraspec.cli.compose import plan
from hydraspec.config.build import from_dict, to_dict
from hydraspec.config.schema import PerStep, RunConfig
from hydraspec.types import ConfigurationError

AUTO = "method.num_speculative_tokens=auto"


def composed(*typed: str) -> RunConfig:
    return plan(typed).jobs[0].config


def test_the_most_has_a_default_and_travels_to_other_ranks() -> None:
    config = composed(AUTO)
    assert config.method.num_speculative_tokens is PerStep.auto
    assert config.method.most_drafts == config.method.max_speculative_tokens == 6
    plain = to_dict(config)
    assert plain["method"]["num_speculative_tokens"] == "auto"
    assert from_dict(plain, []).method == config.method
    assert composed("method.num_speculative_tokens=4").method.most_drafts == 4


def test_no_drafts_have_no_number_to_choose() -> None:
    config = composed(AUTO, "method=none")
    assert config.method.most_drafts == 0
    (warning,) = (w for w in config.warnings if "num_speculative_tokens" in w)
    assert warning.startswith("method.num_speculative_tokens=auto has no effect with method=none")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["method.max_speculative_tokens=4"], r"method\.max_speculative_tokens=4 has no meaning"),
        (["method.costs=a.json"], r"method\.costs=a\.json has no meaning with .*tokens=3"),
        ([AUTO, "method.max_speculative_tokens=0"], r"max_speculative_tokens=0 is out of range"),
        ([AUTO, "method.max_speculative_tokens=33"], r"max_speculative_tokens=33 is out of range"),
        ([AUTO, "engine=transformers"], r"tokens=auto is for engine=native and engine=vllm"),
        (
            [AUTO, "bench=turns"],
            r"tokens=auto is for runs \(bench=none\) and bench=context, decode",
        ),
        ([AUTO, "bench=serve"], r"allowed: a number, with bench=serve"),
        ([AUTO, "engine=vllm", "method.costs=a.json"], r"allowed: null with engine=vllm"),
        (["method.num_speculative_tokens=null"], r"allowed: a whole number, or auto"),
        (["method.num_speculative_tokens=automatic"], r"allowed: a whole number, or auto"),
    ],
)
def test_what_it_does_not_go_with_is_one_message(typed: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        composed(*typed)

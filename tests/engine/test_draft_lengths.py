"""The choice of a step's drafts against simulated requests, in tokens per millisecond of the costs
that it is given."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from records import part
from tiny_targets import run_config

from hydraspec.config.schema import PerStep
from hydraspec.engine.costs import CostTable
from hydraspec.engine.run.step_costs import rising
from hydraspec.engine.schedule.draft_lengths import (
    DraftLengths,
    build_draft_lengths,
    offered_lengths,
)
from hydraspec.types import ConfigurationError, RequestStep

MOST = 6
LINEAR = [1 + 0.3 * k for k in range(MOST + 1)]
Rates = Callable[[int], Sequence[float]]  # by step


def table(step_ms: Sequence[float]) -> CostTable:
    return CostTable(batches=(1,), drafts=tuple(range(len(step_ms))), step_ms=(tuple(step_ms),))


class Traffic:
    """Requests whose draft i is accepted at a rate, once those before it were. A step verifies what
    the one before proposed, and no more than its own length."""

    def __init__(self, rates: Rates, num_requests: int) -> None:
        self.rates, self.num_requests, self.draw = rates, num_requests, random.Random(1)
        self.num_steps = self.proposed = 0

    def step(self, length: int) -> list[RequestStep]:
        rates, steps = self.rates(self.num_steps), []
        for index in range(self.num_requests):
            offered, accepted = min(length, self.proposed), 0
            while accepted < offered and self.draw.random() < rates[accepted]:
                accepted += 1
            steps.append(part(index, offered, accepted))
        self.num_steps, self.proposed = self.num_steps + 1, length
        return steps


def decode(
    lengths: DraftLengths, rates: Rates, num_steps: int, num_requests: int, fixed: int | None = None
) -> tuple[float, list[int]]:
    """Tokens per millisecond, and the lengths."""
    assert lengths.costs is not None
    lengths.start_over()
    traffic, chosen, tokens, ms = Traffic(rates, num_requests), [], 0, 0.0
    for _ in range(num_steps):
        chosen.append(lengths.choose(num_requests) if fixed is None else fixed)
        steps = traffic.step(chosen[-1])
        lengths.observe(steps)
        tokens += sum(len(step.output_token_ids) for step in steps)
        ms += lengths.costs.at(num_requests, chosen[-1]).step_ms
    return tokens / ms, chosen


def always(*rates: float) -> Rates:
    return lambda step: rates


@pytest.mark.slow
@pytest.mark.parametrize("num_requests", [1, 4, 16])
@pytest.mark.parametrize("step_ms", [LINEAR, [1.0, 1.6, 2.0, 2.2, 2.3, 2.4, 2.5]])
@pytest.mark.parametrize(
    "rates",
    [
        always(0.9, 0.8, 0.7, 0.1, 0.1, 0.1),
        always(*[0.9] * MOST),
        always(0.6, 0.3, 0.2, 0.2, 0.2, 0.2),
        always(*[0.02] * MOST),
        always(0.3, *[0.95] * (MOST - 1)),
    ],
)
def test_as_good_as_the_best_fixed_length(
    rates: Rates, step_ms: Sequence[float], num_requests: int
) -> None:
    """600 steps, the start and all trials included; plain decoding is among the lengths."""
    lengths = DraftLengths(range(MOST + 1), table(step_ms))
    best = max(decode(lengths, rates, 600, num_requests, fixed)[0] for fixed in range(MOST + 1))
    assert decode(lengths, rates, 600, num_requests)[0] > 0.95 * best


def test_a_good_and_a_bad_drafter() -> None:
    lengths = DraftLengths(range(MOST + 1), table(LINEAR))
    _, chosen = decode(lengths, always(0.9, 0.9, 0.9, 0.05, 0.05, 0.05), 120, 2)
    assert chosen[40:].count(3) > 60
    _, chosen = decode(lengths, always(*[0.02] * MOST), 120, 2)
    assert chosen[40:].count(0) > 75


def test_a_run_begins_with_the_rates_of_the_measured_steps() -> None:
    """A good drafter's and a bad one's; without any, with high ones."""
    for rate, wanted in ((0.95, MOST), (0.02, 0)):
        lengths = DraftLengths(range(MOST + 1), replace(table(LINEAR), rates=(rate,) * MOST))
        assert lengths.choose(4) == wanted
    assert DraftLengths(range(MOST + 1), table(LINEAR)).choose(4) > 1


def test_one_step_does_not_decide() -> None:
    """Four requests whose first drafts are all rejected: no rest at 0 until a trial."""
    lengths = DraftLengths(range(MOST + 1), replace(table(LINEAR), rates=(0.85,) * MOST))
    _, chosen = decode(lengths, lambda step: [0.0 if step < 2 else 0.85] * MOST, 60, 4)
    assert chosen[10:].count(0) == 0


def test_a_step_with_fewer_requests_keeps_the_length() -> None:
    """One ends and the next joins a step later: a rise for that step alone would never pay."""
    rows = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6), (1.0, 1.3, 1.6, 1.9, 2.2, 2.5, 2.8)
    costs = CostTable(batches=(3, 4), drafts=tuple(range(MOST + 1)), step_ms=rows, rates=(0.7,) * 6)
    lengths = DraftLengths(range(MOST + 1), costs)
    usual = [lengths.choose(4) for _ in range(20)][-1]
    assert 0 < usual < MOST
    assert [lengths.choose(n) for n in (3, 4, 4, 4, 3, 4, 4)] == [usual] * 7
    assert [lengths.choose(3) for _ in range(20)][-1] > usual


def test_no_drafts_do_not_stay_for_ever() -> None:
    """Also where drafts cost so much that only the highest rates are worth it: what nobody
    verifies cannot be known."""
    costly = [1.0, 1.85, 2.7, 3.5, 4.3, 5.1, 5.9]
    lengths = DraftLengths(range(MOST + 1), table(costly))
    rates = [0.1] * MOST
    _, chosen = decode(lengths, lambda step: rates if step < 500 else [1.0] * MOST, 2500, 1)
    assert chosen[400:500].count(0) >= 95
    assert chosen[-200:].count(0) < 20


def test_trials_take_a_small_share_of_the_time() -> None:
    lengths = DraftLengths(range(MOST + 1), table([1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0]))
    _, chosen = decode(lengths, always(*[0.5] * MOST), 2000, 4)
    assert 0 < sum(length > 0 for length in chosen[50:]) < 0.01 * len(chosen)


def test_equal_results_give_equal_lengths() -> None:
    lengths = DraftLengths(range(MOST + 1), table(LINEAR))
    rates = always(0.8, 0.6, 0.5, 0.5, 0.4, 0.4)
    first = decode(lengths, rates, 300, 4)
    assert len(set(first[1])) > 1
    assert decode(DraftLengths(range(MOST + 1), table(LINEAR)), rates, 300, 4) == first
    assert decode(lengths, rates, 300, 4) == first, "a run knows of the one before it"


def test_without_costs_every_step_has_the_most() -> None:
    lengths = DraftLengths(range(MOST + 1))
    assert [lengths.choose(4) for _ in range(3)] == [MOST] * 3


def test_many_lengths_have_gaps() -> None:
    def offered(most: int) -> tuple[int, ...]:
        config = run_config("zoo:tiny_qwen3", method="eagle3", k=PerStep.auto)  # type: ignore[arg-type]
        config.method.max_speculative_tokens = most
        return offered_lengths(config.method)

    assert offered(8) == tuple(range(9))
    assert offered(12) == (0, 1, 2, 3, 4, 6, 8, 12)
    assert offered(13) == (0, 1, 2, 3, 4, 6, 8, 12, 13)
    assert offered_lengths(run_config("zoo:tiny_qwen3", method="eagle3").method) == ()


def test_a_table_of_fewer_drafts_is_refused(tmp_path: Path) -> None:
    config = run_config("zoo:tiny_qwen3", method="eagle3", k=PerStep.auto)  # type: ignore[arg-type]
    config.method.max_speculative_tokens = 8
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(table(LINEAR).as_json()))
    config.method.costs = str(path)
    with pytest.raises(ConfigurationError, match=r"method\.costs=.* has steps of 0 to 6 drafts"):
        build_draft_lengths(config, 1)
    config.method.max_speculative_tokens = 5
    lengths = build_draft_lengths(config, 1)
    assert lengths is not None
    assert lengths.costs == table(LINEAR)


def test_measured_costs_never_fall() -> None:
    assert rising([1.0, 3.0, 2.0, 4.0]) == [1.0, 2.5, 2.5, 4.0]
    assert rising([3.0, 2.0, 1.0]) == [2.0, 2.0, 2.0]
    assert rising([1.0, 2.0]) == [1.0, 2.0]

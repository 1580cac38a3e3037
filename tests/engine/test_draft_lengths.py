"""The choice of the drafts of each request against simulated requests, in tokens per millisecond of
the costs that it is given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from records import part
from simulated_requests import LINEAR, MOST, Rates, always, chooser, decode, decoded, table
from tiny_targets import run_config

from hydraspec.config.schema import PerStep
from hydraspec.engine.costs import CostTable
from hydraspec.engine.run.step_costs import rising
from hydraspec.engine.schedule import draft_lengths
from hydraspec.engine.schedule.acceptance import RequestAcceptance
from hydraspec.engine.schedule.draft_lengths import (
    ChosenDrafts,
    DraftLengths,
    build_draft_lengths,
    offered_lengths,
)
from hydraspec.engine.slots import (
    Allocation,
    LengthCosts,
    accepted_by_length,
    best_allocation,
)
from hydraspec.types import ConfigurationError


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
    lengths = chooser(table(step_ms))
    best = max(decode(lengths, rates, 600, num_requests, fixed)[0] for fixed in range(MOST + 1))
    assert decode(lengths, rates, 600, num_requests)[0] > 0.95 * best


def test_a_good_and_a_bad_drafter() -> None:
    lengths = chooser(table(LINEAR))
    _, chosen = decode(lengths, always(0.9, 0.9, 0.9, 0.05, 0.05, 0.05), 120, 2)
    assert chosen[40:].count(3) > 60
    _, chosen = decode(lengths, always(*[0.02] * MOST), 120, 2)
    assert chosen[40:].count(0) > 75


def test_a_run_begins_with_the_rates_of_the_measured_steps() -> None:
    """A good drafter's and a bad one's; without any, with high ones."""
    for rate, wanted in ((0.95, MOST), (0.02, 0)):
        lengths = chooser(replace(table(LINEAR), rates=(rate,) * MOST))
        chosen = lengths.choose(range(4), 4)
        assert (chosen.counts, chosen.draft_length) == ([wanted] * 4, wanted)
    assert min(chooser(table(LINEAR)).choose(range(4), 4).counts) > 1


def test_one_step_does_not_decide() -> None:
    """Four requests whose first drafts are all rejected: no rest at 0 until a trial."""
    lengths = chooser(replace(table(LINEAR), rates=(0.85,) * MOST))
    rates: Rates = lambda step, request: [0.0 if step < 2 else 0.85] * MOST  # noqa: E731
    _, chosen = decode(lengths, rates, 60, 4)
    assert chosen[10:].count(0) == 0


def test_a_step_with_fewer_requests_keeps_the_length() -> None:
    """One ends and the next joins a step later: a rise for that step alone would never pay."""
    rows = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6), (1.0, 1.3, 1.6, 1.9, 2.2, 2.5, 2.8)
    costs = CostTable(batches=(3, 4), drafts=tuple(range(MOST + 1)), step_ms=rows, rates=(0.7,) * 6)
    lengths = chooser(costs)

    def choose(num_requests: int) -> int:
        return lengths.choose(range(num_requests), num_requests).draft_length

    usual = [choose(4) for _ in range(20)][-1]
    assert 0 < usual < MOST
    assert [choose(n) for n in (3, 4, 4, 4, 3, 4, 4)] == [usual] * 7
    assert [choose(3) for _ in range(20)][-1] > usual


def test_no_drafts_do_not_stay_for_ever() -> None:
    """Also where drafts cost so much that only the highest rates are worth it: what nobody
    verifies cannot be known."""
    costly = [1.0, 1.85, 2.7, 3.5, 4.3, 5.1, 5.9]
    lengths = chooser(table(costly))
    rates: Rates = lambda step, request: [0.1 if step < 500 else 1.0] * MOST  # noqa: E731
    _, chosen = decode(lengths, rates, 2500, 1)
    assert chosen[400:500].count(0) >= 95
    assert chosen[-200:].count(0) < 20


def test_trials_take_a_small_share_of_the_time() -> None:
    lengths = chooser(table([1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0]))
    _, chosen = decode(lengths, always(*[0.5] * MOST), 2000, 4)
    assert 0 < sum(length > 0 for length in chosen[50:]) < 0.01 * len(chosen)


def test_drafts_that_are_a_little_better_are_found_beyond_worse_ones() -> None:
    """Four drafts are worse than three and five are best: a run that begins with rates by which
    three are best finds them out, and stays."""
    step_ms = [1.0, 1.3, 1.6, 1.9, 2.25, 2.3, 4.0]
    lengths = chooser(replace(table(step_ms), rates=(0.8, 0.8, 0.8, 0.6, 0.6, 0.6)))
    _, chosen = decode(lengths, always(*[0.85] * MOST), 60, 8)
    assert chosen[10:].count(5) > 45


def counted_choices(monkeypatch: pytest.MonkeyPatch) -> list[Allocation]:
    """The choices that are made from now on."""
    made: list[Allocation] = []

    def noted(*args: Any) -> Allocation:
        made.append(best_allocation(*args))
        return made[-1]

    monkeypatch.setattr(draft_lengths, "best_allocation", noted)
    return made


def test_a_steady_choice_is_made_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """And anew where a request joins. What steps verified meanwhile counts as if it had been
    counted in each."""
    choices = counted_choices(monkeypatch)
    lengths = chooser(replace(table([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6]), rates=(0.9,) * MOST))
    _, chosen = decode(lengths, always(*[0.9] * MOST), 200, 4)
    assert set(chosen) == {MOST}
    assert len(choices) < 50
    lengths.choose(range(4), 4)
    before = len(choices)
    lengths.begin(0)
    lengths.choose(range(4), 4)
    assert len(choices) == before + 1


def test_the_most_for_all_are_kept_until_a_draft_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choices = counted_choices(monkeypatch)
    lengths = chooser(replace(table([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6]), rates=(0.9,) * MOST))
    _, chosen = decode(lengths, always(*[1.0] * MOST), 60, 2)
    assert set(chosen) == {MOST}
    assert len(choices) == 1
    lengths.observe(range(2), [part(0, MOST, MOST), part(1, MOST, MOST - 1)])
    lengths.choose(range(2), 2)
    assert len(choices) == 2


@pytest.mark.parametrize("seed", range(40))
def test_accepted_drafts_make_no_split_better_than_the_most_for_all(seed: int) -> None:
    """The reason why that split is kept meanwhile, over random costs and counts."""
    rng, offered = np.random.default_rng(seed), tuple(range(MOST + 1))
    verify_ms = rng.uniform(0, 3) + rng.uniform(0, rng.choice([0.05, 0.3]), MOST + 1).cumsum()
    drafting_ms = rng.uniform(0, 0.1, MOST + 1).cumsum()
    costs = LengthCosts(offered, verify_ms, drafting_ms, rng.uniform(0, 0.1) * verify_ms)
    slots = range(1 + seed % 4)
    counts = RequestAcceptance(MOST, tuple(rng.uniform(0.6, 1, MOST)), len(slots))
    counts.add(slots, [[part(i, MOST, int(rng.integers(2, MOST + 1))) for i in slots]])

    def best(last: int | None) -> int:
        accepted = accepted_by_length(counts.survivals(slots, 0), offered)
        return int(best_allocation(accepted, costs, last).counts.min())

    if best(None) == MOST:
        for _ in range(8):
            counts.add(slots, [[part(i, MOST, MOST) for i in slots]])
            assert best(MOST) == MOST


def test_results_count_alike_one_by_one_and_together() -> None:
    draw, slots = np.random.default_rng(5), [2, 0, 3]
    steps = [
        [part(i, n, int(draw.integers(0, n + 1))) for i, n in enumerate(draw.integers(0, MOST, 3))]
        for _ in range(7)
    ]
    one_by_one, together = (RequestAcceptance(MOST, (), 4) for _ in range(2))
    for step in steps:
        one_by_one.add(slots, [step])
    together.add(slots, steps)
    np.testing.assert_allclose(one_by_one.survivals(slots, 1), together.survivals(slots, 1))
    assert one_by_one.of_all.unseen.tolist() == together.of_all.unseen.tolist()


def test_equal_results_give_equal_lengths() -> None:
    lengths = chooser(table(LINEAR))
    rates = always(0.8, 0.6, 0.5, 0.5, 0.4, 0.4)
    first = decode(lengths, rates, 300, 4)
    assert len(set(first[1])) > 1
    assert decode(chooser(table(LINEAR)), rates, 300, 4) == first
    assert decode(lengths, rates, 300, 4) == first, "a run knows of the one before it"


def test_without_costs_every_step_has_the_most() -> None:
    lengths = DraftLengths(range(MOST + 1))
    assert lengths.choose(range(4), 4) == ChosenDrafts([MOST] * 4, MOST)


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
        build_draft_lengths(config, 1, reads_estimates=False)
    config.method.max_speculative_tokens = 5
    lengths = build_draft_lengths(config, 1, reads_estimates=False)
    assert lengths is not None
    assert lengths.costs == table(LINEAR)


def test_measured_costs_never_fall() -> None:
    assert rising([1.0, 3.0, 2.0, 4.0]) == [1.0, 2.5, 2.5, 4.0]
    assert rising([3.0, 2.0, 1.0]) == [2.0, 2.0, 2.0]
    assert rising([1.0, 2.0]) == [1.0, 2.0]


# ------------------------------------------------------------------ each request its own number


ROWS_ARE_DEAR = CostTable(  # a draft of 16 requests costs most of what reading the weights does
    batches=(16,),
    drafts=tuple(range(MOST + 1)),
    step_ms=(tuple(2.0 + 0.85 * k for k in range(MOST + 1)),),
    draft_ms=(tuple(0.05 * k for k in range(MOST + 1)),),
)


def half(step: int, request: int) -> Sequence[float]:
    return [0.9 if request % 2 else 0.0] * MOST


def test_half_of_the_requests_have_drafts_where_the_others_accept_none() -> None:
    """At least 1.10 of the best fixed number's speed, from the first step on; what no request wants
    is not verified, but tried again."""
    lengths = chooser(ROWS_ARE_DEAR)
    best = max(decode(lengths, half, 400, 16, fixed)[0] for fixed in range(MOST + 1))
    assert decode(lengths, half, 400, 16)[0] > 1.10 * best
    counts = np.array([drafts.counts for drafts, _, _ in decoded(lengths, half, 400, 16)])
    good, bad = counts[50:, 1::2], counts[50:, ::2]
    assert (good > 1).mean() > 0.9
    assert 0 < (bad > 0).mean() < 0.03


def test_a_request_that_accepts_nothing_costs_little() -> None:
    """Over 2000 steps: it is tried now and then."""
    rates: Rates = lambda step, request: [0.9 if request % 4 else 0.0] * MOST  # noqa: E731
    of_it = [d.counts[0] for d, _, _ in decoded(chooser(ROWS_ARE_DEAR), rates, 2000, 16)]
    assert 5 < sum(count > 0 for count in of_it[100:]) < 40


def test_a_request_that_turns_good_is_found() -> None:
    def rates(step: int, request: int) -> Sequence[float]:
        return [0.9 if request % 4 or (request == 0 and step > 300) else 0.0] * MOST

    of_it = [d.counts[0] for d, _, _ in decoded(chooser(ROWS_ARE_DEAR), rates, 900, 16)]
    assert sum(count > 0 for count in of_it[100:300]) < 20
    assert sum(count > 1 for count in of_it[-100:]) > 90


def test_a_slot_of_another_request_begins_anew() -> None:
    lengths = chooser(ROWS_ARE_DEAR)
    assert list(decoded(lengths, half, 60, 16))[-1][0].counts[0] == 0
    lengths.begin(0)
    assert lengths.choose(range(16), 16).counts[0] > 0


def test_results_of_a_request_without_its_slot_change_no_other() -> None:
    lengths, others = chooser(ROWS_ARE_DEAR), chooser(ROWS_ARE_DEAR)
    slots, steps = list(range(16)), [part(i, 3, 3 * (i % 2)) for i in range(16)]
    for each in (lengths, others):
        each.choose(slots, 16)
    lengths.observe(slots, steps)
    others.observe([-1, *slots[1:]], steps)
    first, second = (each.choose(slots, 16).counts for each in (lengths, others))
    assert first[1:] == second[1:]


def test_the_price_beside_estimates_is_kept_while_requests_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nine steps have a price of the same results; a step of far fewer requests has its own."""
    choices = counted_choices(monkeypatch)
    lengths = DraftLengths(range(MOST + 1), ROWS_ARE_DEAR, 16, reads_estimates=True)
    sure, unsure = [0.95**i for i in range(1, MOST + 1)], [0.05] * MOST
    slots = range(16)
    for number in range(36):
        wanted = [sure] * (number % 16) + [unsure] * (16 - number % 16)
        chosen = lengths.choose(slots, 16, wanted)
        assert chosen.draft_length == MOST
        lengths.observe(slots, [part(i, n, n) for i, n in enumerate(chosen.counts)])
        lengths.begin(number % 16)
    assert len(choices) == 4
    lengths.choose(range(12), 12, [sure] * 12)
    assert len(choices) == 5, "after eight steps"
    lengths.choose(range(9), 9, [sure] * 9)
    assert len(choices) == 5
    lengths.choose(range(8), 8, [sure] * 8)
    assert len(choices) == 6


def test_estimates_choose_what_is_verified() -> None:
    """By the drafter's estimates where these are known: the drafts that are worth their rows, and
    the most are proposed next, since their estimates are not known yet."""
    lengths = DraftLengths(range(MOST + 1), ROWS_ARE_DEAR, 16, reads_estimates=True)
    list(decoded(lengths, always(*[0.7] * MOST), 50, 16))
    sure, unsure = [0.95**i for i in range(1, MOST + 1)], [0.05] * MOST
    chosen = lengths.choose(range(16), 16, [sure, unsure] * 8)
    assert chosen == ChosenDrafts([MOST, 0] * 8, MOST, for_all=True)
    assert lengths.choose(range(16), 16, [unsure] * 4).counts == [0] * 16, "the others read prompts"
    without = lengths.choose(range(16), 16, [None] * 16)
    assert without.draft_length == MOST
    assert 0 < max(without.counts) < MOST

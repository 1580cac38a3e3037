"""The arithmetic of predictions: acceptance at smaller K, simulated loads, the break-even point."""

import numpy as np
import pytest

from hydraspec.analysis.predict.model import (
    Load,
    assumed_acceptance,
    break_even,
    constant_rate,
    equal_steps,
    measured_acceptance,
    simulate,
)
from hydraspec.engine.costs import CostTable, over_contexts
from hydraspec.metrics.meter import Meter
from hydraspec.types import Request, RequestStep, SamplingParams, StepRecord

FLAT = CostTable(batches=(1,), drafts=(3,), step_ms=((2.0,),))
PLAIN = CostTable(batches=(1,), drafts=(0,), step_ms=((1.0,),))
MANY_ROWS = 10_000


def load(outputs, *, concurrency=1, prompt=10, cached=0, parts=None):
    return Load(
        prompts=[prompt] * len(outputs),
        cached=[cached] * len(outputs),
        outputs=outputs,
        concurrency=concurrency,
        parts=parts or [(0, len(outputs))],
    )


def speed(of, costs, num_drafts, acceptance=None, *, row_ms=0.0, max_rows=MANY_ROWS):
    steps = equal_steps(costs, num_drafts)
    return simulate(of, steps, ms_per_prompt_row=row_ms, acceptance=acceptance, max_rows=max_rows)


def counters(accepted_of_steps, num_drafts=3):
    """Of one request that accepted so many drafts in each of its steps."""
    request = Request(index=0, id="0", sampling=SamplingParams(), prompt_token_ids=[1])
    meter = Meter([request], num_speculative_tokens=num_drafts)
    for number, accepted in enumerate(accepted_of_steps):
        part = RequestStep(
            index=0,
            num_rows=1 + num_drafts,
            is_prefill=False,
            num_computed_tokens=number,
            draft_token_ids=[5] * num_drafts,
            num_accepted=accepted,
            output_token_ids=[5] * (accepted + 1),
        )
        meter.add_step(StepRecord(step=number, phase_ms={}, total_ms=1.0, requests=[part]))
    return meter.counters[0]


def test_acceptance_at_fewer_drafts_is_that_of_the_first_positions():
    """Steps that accept 0, 1, 3, 3 of 3 accept min(., 2) = 0, 1, 2, 2 of 2."""
    found = measured_acceptance([counters([0, 1, 3, 3])], 3)
    assert found.length(3) == pytest.approx(1 + 7 / 4)
    assert found.length(2) == pytest.approx(1 + 5 / 4)
    assert found.length(1) == pytest.approx(1 + 3 / 4)
    assert found.conditional() == pytest.approx([3 / 4, 2 / 3, 1.0])


def test_a_request_without_drafts_has_the_acceptance_of_all():
    found = measured_acceptance([counters([3, 1]), counters([])], 3)
    assert found.survival[1] == pytest.approx(found.pooled)
    assert found.survival[0] == pytest.approx([1.0, 0.5, 0.5])


def test_assumed_rates_go_on_with_the_last_one():
    found = assumed_acceptance([0.8, 0.5], 4, 2)
    assert found.pooled == pytest.approx([0.8, 0.4, 0.2, 0.1])
    assert found.survival.shape == (2, 4)
    assert found.conditional() == pytest.approx([0.8, 0.5, 0.5, 0.5])


def test_a_position_that_is_never_accepted_ends_the_conditional_rates():
    assert assumed_acceptance([0.5, 0.0], 3, 1).conditional() == pytest.approx([0.5, 0.0, 0.0])


@pytest.mark.parametrize(("length", "num_drafts"), [(1.0, 3), (2.5, 3), (4.0, 3), (1.7, 1)])
def test_the_constant_rate_gives_the_length(length, num_drafts):
    rate = constant_rate(length, num_drafts)
    assert sum(rate**i for i in range(num_drafts + 1)) == pytest.approx(length)


def test_no_rate_reaches_more_than_every_draft():
    assert constant_rate(4.01, 3) is None


def test_break_even_is_where_the_simulated_speeds_meet():
    assert break_even(FLAT, PLAIN, 1, 3) == 2.0
    rate = constant_rate(2.0, 3)
    of = load([200] * 20)
    fast = speed(of, FLAT, 3, assumed_acceptance([rate], 3, 20))
    slow = speed(of, PLAIN, 0)
    assert fast.tokens_per_second / slow.tokens_per_second == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize(("rate", "tokens_a_step"), [(0.0, 1), (1.0, 4)])
def test_certain_acceptance_is_exact(rate, tokens_a_step):
    """1 + 12 tokens: the prompt's step, and 12 or 3 decode steps of 2 ms."""
    found = speed(load([13, 13]), FLAT, 3, assumed_acceptance([rate], 3, 2))
    assert found.tokens_per_second == pytest.approx(1000 * tokens_a_step / 2.0)


def test_a_request_emits_no_more_than_its_output():
    """11 tokens after the first at 4 a step are 3 steps, of which the last emits 3."""
    found = speed(load([12]), FLAT, 3, assumed_acceptance([1.0], 3, 1))
    assert found.tokens_per_second == pytest.approx(1000 * 11 / 6.0)


def test_fewer_requests_are_left_at_the_end_of_a_part():
    """Outputs of 3 and 5 tokens: two steps of two requests, then two of one."""
    table = CostTable(batches=(1, 2), drafts=(0,), step_ms=((1.0,), (1.5,)))
    found = speed(load([3, 5], concurrency=2), table, 0)
    assert found.num_tokens == 6
    assert found.milliseconds == pytest.approx(2 * 1.5 + 2 * 1.0)
    apart = speed(load([3, 5], concurrency=2, parts=[(0, 1), (1, 2)]), table, 0)
    assert apart.milliseconds == pytest.approx(2 * 1.0 + 4 * 1.0)


def test_a_step_costs_what_it_costs_at_its_context():
    """Contexts of 110, 111, 112 after the prompt, of which 100 were cached; 1 ms for each token."""
    tables = {100: PLAIN, 200: CostTable(batches=(1,), drafts=(0,), step_ms=((101.0,),))}
    found = speed(load([4], cached=100), over_contexts(tables), 0)
    assert found.milliseconds == pytest.approx((1 + 11) + (1 + 12) + (1 + 13))


def test_prompts_beside_decodes_take_their_share_by_rows():
    """The second request's 10 prompt rows join the first one's step of 1 row."""
    table = CostTable(batches=(1, 2), drafts=(0,), step_ms=((1.0,), (1.0,)))
    of = load([2, 4, 2], concurrency=2)
    found = speed(of, table, 0, row_ms=0.1)
    # Steps: prompts 0 and 1; both decode (0 ends); 1 decodes beside prompt 2; 1 and 2 decode.
    assert found.num_tokens == 5
    assert found.milliseconds == pytest.approx(1.0 + (1.0 + 10 * 0.1) / 11 + 1.0)


def test_prompts_longer_than_a_step_are_read_in_parts():
    """Of 10 rows, 6 are read beside nothing, and 4 more; no decode waits for them."""
    assert speed(load([3]), PLAIN, 0, max_rows=6).milliseconds == pytest.approx(2.0)
    table = CostTable(batches=(1, 2), drafts=(0,), step_ms=((1.0,), (1.0,)))
    found = speed(load([3, 9, 2], concurrency=2, prompt=4), table, 0, row_ms=0.25, max_rows=8)
    assert found.num_tokens == 2 + 8 + 1


def test_the_same_load_gives_the_same_prediction():
    of, acceptance = load([50] * 8, concurrency=4), assumed_acceptance([0.6], 3, 8)
    table = CostTable(batches=(1, 4), drafts=(3,), step_ms=((1.0,), (2.0,)))
    assert speed(of, table, 3, acceptance) == speed(of, table, 3, acceptance)


def test_requests_that_accept_less_run_longer():
    """Pooled acceptance would let both end together; the slower one decodes alone at the end."""
    table = CostTable(batches=(1, 2), drafts=(1,), step_ms=((1.0,), (1.0,)))
    acceptance = assumed_acceptance([0.5], 1, 2)
    uneven = type(acceptance)(np.array([[0.0], [1.0]]), acceptance.pooled)
    of = load([101, 101], concurrency=2)
    assert speed(of, table, 1, uneven).milliseconds == pytest.approx(8 * 100.0)
    assert speed(of, table, 1, acceptance).milliseconds < 8 * 80.0

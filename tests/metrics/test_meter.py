"""The meter against numbers worked out by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from records import completion, part, request, step

from hydraspec.metrics.counters import StepSums
from hydraspec.metrics.files import plain
from hydraspec.metrics.latency import BatchTimes
from hydraspec.metrics.meter import Meter, finished_pairs, speedup
from hydraspec.metrics.paired import paired_ratio
from hydraspec.metrics.statistics import NUM_RESAMPLES, ratio_of_sums
from hydraspec.types import Request, StepRecord


def make_requests(count: int, categories: str = "") -> list[Request]:
    return [request(i, category=categories[i] if categories else None) for i in range(count)]


def metered(*records: StepRecord, count: int = 1, drafts: int = 3, categories: str = "") -> Meter:
    meter = Meter(make_requests(count, categories), num_speculative_tokens=drafts)
    for record in records:
        meter.add_step(record)
    for index in range(count):
        meter.add_completion(completion(index))
    return meter


def test_acceptance_by_hand() -> None:
    meter = metered(
        step(part(0, 3, 3)), step(part(0, 3, 0)), step(part(0, 3, 1)), step(part(0, 3, 2))
    )
    assert (meter.num_drafts(), meter.num_draft_tokens(), meter.num_accepted_tokens()) == (4, 12, 6)
    assert meter.acceptance_length().mean == pytest.approx(1 + 6 / 4)
    assert meter.acceptance_rate() == pytest.approx(0.5)
    assert meter.acceptance_rate_per_position() == pytest.approx([3 / 4, 2 / 4, 1 / 4])
    assert meter.conditional_acceptance_rate_per_position() == pytest.approx([3 / 4, 2 / 3, 1 / 2])


def test_short_drafts_keep_the_denominators_apart() -> None:
    """Catches a conditional rate over positions that were never offered: two drafts have one
    token only.
    """
    meter = metered(step(part(0, 3, 2)), step(part(0, 1, 1)), step(part(0, 1, 0)))
    counters = meter.counters[0]
    assert counters.drafted_per_position == [3, 1, 1]
    assert counters.accepted_per_position == [2, 1, 0]
    assert meter.acceptance_rate_per_position() == pytest.approx([2 / 3, 1 / 3, 0])
    assert meter.conditional_acceptance_rate_per_position() == pytest.approx([2 / 3, 1 / 1, 0 / 1])


def test_positions_sum_to_the_length_less_one() -> None:
    """Catches denominators that differ between positions, over drafts of every length."""
    rng = np.random.default_rng(0)
    records = []
    for _ in range(200):
        drafts = int(rng.integers(0, 6))
        records.append(step(part(0, drafts, int(rng.integers(0, drafts + 1)))))
    meter = metered(*records, drafts=5)
    rates = [rate or 0.0 for rate in meter.acceptance_rate_per_position()]
    mean = meter.acceptance_length().mean
    assert mean is not None
    assert sum(rates) == pytest.approx(mean - 1)
    assert rates == sorted(rates, reverse=True)


def test_steps_without_drafts_are_not_counted() -> None:
    """Catches the first token after a prefill, or a plain decode step, pulling the mean towards
    1.
    """
    meter = metered(step(part(0, prefill_rows=7, emitted=1)), step(part(0)), step(part(0, 3, 3)))
    assert meter.num_drafts() == 1
    assert meter.acceptance_length().mean == 4


def test_padding_is_no_draft() -> None:
    """Catches -1 padding counted as rejected drafts."""
    padded = part(0, 3, 1)
    padded.draft_token_ids = [5, -1, -1]
    meter = metered(step(padded))
    assert (meter.num_draft_tokens(), meter.num_accepted_tokens()) == (1, 1)
    assert meter.counters[0].drafted_per_position == [1]
    only_padding = part(0, 2, 0)
    only_padding.draft_token_ids = [-1, -1]
    assert metered(step(only_padding)).num_drafts() == 0


def test_drafts_that_a_grammar_decides_are_counted_apart() -> None:
    """Two of five are the drafter's, of which one was accepted; then none of three."""
    jumped, all_decided = part(0, 5, 4), part(0, 3, 3)
    jumped.jump_forward_places = [0, 2, 3]
    all_decided.jump_forward_places = [0, 1, 2]
    meter = metered(step(jumped), step(all_decided))
    assert (meter.num_drafts(), meter.num_draft_tokens(), meter.num_accepted_tokens()) == (1, 2, 1)
    assert meter.num_jump_forward_tokens() == 6
    assert meter.acceptance_rate_per_position() == [1, 0, 0]
    assert meter.acceptance_length().mean == 2
    assert meter.counters[0].decode_tokens == 9


def test_a_cut_last_step_counts_what_the_verifier_accepted() -> None:
    """Catches counting emitted tokens: a limit left two of four, but three drafts were accepted."""
    meter = metered(step(part(0, 3, 3, emitted=2)))
    assert meter.num_accepted_tokens() == 3
    assert meter.counters[0].decode_tokens == 2


def test_nothing_drafted_gives_nulls() -> None:
    """Catches NaN, and a mean of 1 that would claim drafts were tried."""
    meter = metered(step(part(0)), drafts=2)
    assert asdict(meter.acceptance_length()) == {"mean": None, "ci95": None}
    assert meter.acceptance_rate() is None
    assert meter.acceptance_rate_per_position() == [None, None]
    assert meter.conditional_acceptance_rate_per_position() == [None, None]
    empty = Meter([], num_speculative_tokens=0)
    assert empty.output_tokens_per_second() is None
    assert empty.time_to_first_token_ms() is None
    assert empty.acceptance_rate_per_position() == []


def test_categories_are_pooled_each_for_itself() -> None:
    meter = metered(
        step(part(0, 2, 2), part(1, 2, 0)), step(part(2, 2, 1)), count=3, drafts=2, categories="aba"
    )
    assert meter.acceptance_length_by_category() == {"a": 1 + 3 / 2, "b": 1.0}


def test_wall_time_is_split_by_rows_and_prefill_is_left_out() -> None:
    """A 10 ms step of 6 prefill rows and 4 verify rows costs the decoding request 4 ms."""
    meter = metered(
        step(part(0, 3, 3), part(1, prefill_rows=6, emitted=1), ms=10),
        step(part(0, 3, 1), part(1, 3, 0), ms=8),
        count=2,
    )
    assert [c.decode_ms for c in meter.completed] == pytest.approx([4 + 4, 4])
    assert [c.decode_tokens for c in meter.completed] == [4 + 2, 1]
    assert meter.output_tokens_per_second() == pytest.approx(1000 * 7 / 12)


def test_concurrency_raises_throughput() -> None:
    """Catches a throughput per request: two requests in one 5 ms step are twice the tokens per
    second.
    """
    alone = metered(step(part(0), ms=5))
    together = metered(step(part(0), part(1), ms=5), count=2)
    assert alone.output_tokens_per_second() == pytest.approx(200)
    assert together.output_tokens_per_second() == pytest.approx(400)


def test_latencies() -> None:
    meter = Meter(make_requests(4))
    meter.add_completion(completion(0, output_token_ids=[1] * 11, ttft_ms=10.0, latency_ms=30.0))
    meter.add_completion(completion(1, output_token_ids=[1] * 2, ttft_ms=20.0, latency_ms=25.0))
    meter.add_completion(completion(2, ttft_ms=30.0, latency_ms=30.0))
    meter.add_completion(completion(3, output_token_ids=[], ttft_ms=None, finish_reason="error"))
    assert meter.time_per_output_token_ms() == pytest.approx((20 + 5) / (10 + 1))
    assert meter.time_to_first_token_ms() == pytest.approx(20)
    assert meter.num_output_tokens() == 14


def test_times_of_a_batch() -> None:
    """Medians of 4.0 s for 5 tokens each and 2.0 s for the first: 4 more tokens in 2 s. Catches a
    mean, which the outlier would move, and tokens of one request only."""
    times = BatchTimes(
        num_requests=3, num_tokens=5, whole_s=[4.0, 3.9, 9.0], one_token_s=[2.0, 2.1, 0.1]
    )
    assert times.prefill_s == 2.0
    assert times.time_per_output_token_ms == pytest.approx(500.0)
    assert times.output_tokens_per_second == pytest.approx(6.0)


def test_unfinished_requests_are_left_out_but_totals_are_live() -> None:
    meter = Meter(make_requests(2), num_speculative_tokens=1)
    meter.add_step(step(part(0, 1, 1), part(1, 1, 1), ms=4))
    meter.add_completion(completion(0))
    assert meter.num_drafts() == 1
    assert meter.totals.num_drafts == 2
    assert meter.totals.acceptance_length == 2
    assert meter.totals.output_tokens_per_second == pytest.approx(1000)


def test_sums_and_peaks_over_steps_are_the_same_after_a_file() -> None:
    """Catches numbers of drafts that have become texts."""
    sums, phases = StepSums(), {"forward": 1.5, "propose": None}
    first = replace(step(part(0, 2, 1), ms=4.0, phase_ms=phases), draft_length=2)
    assert sums.add(replace(first, num_replicas=2, kv_usage=0.5, num_preempted=1)) == 2.0
    assert sums.add(replace(first, draft_length=0, kv_usage=0.25)) == 4.0
    for found in (sums, StepSums.of_json(json.loads(json.dumps(plain(sums))))):
        assert (found.num_steps, found.num_preemptions, found.peak_kv_usage) == (2, 1, 0.5)
        assert found.total_step_time_s() == pytest.approx(0.006)
        breakdown = found.time_breakdown_ms()
        assert list(breakdown) == ["schedule", "prepare", "forward", "verify", "propose"]
        assert (breakdown["forward"], breakdown["propose"]) == (1.5, None)
        assert found.draft_lengths.used(3) == {"mean": 2.0, "histogram": [0, 0, 2, 0]}
        found.add(first)
        assert found.num_steps == 3


def test_speedup_is_the_ratio_of_throughputs_over_pairs() -> None:
    """Catches an unpaired ratio: request 1 has no baseline, so it must not count."""
    ours = metered(step(part(0, 3, 3), ms=4), step(part(1, 3, 0), ms=100), count=2)
    theirs = Meter(make_requests(2))
    theirs.add_step(step(part(0), ms=2))
    theirs.add_completion(completion(0))
    assert speedup(finished_pairs(ours, theirs), at_once=1).ratio == pytest.approx(
        (4 / 4) / (1 / 2)
    )
    assert speedup(finished_pairs(ours, Meter([])), at_once=1).ratio is None


def test_the_mean_over_requests_gives_each_the_same_weight() -> None:
    """A long output of poor drafts and a short one of good ones: 1.22 pooled, 2 over requests;
    one without drafts counts in neither."""
    meter = Meter(make_requests(3), num_speculative_tokens=2)
    for _ in range(8):
        meter.add_step(step(part(0, 2, 0)))
    for index in range(3):
        meter.add_completion(completion(index))
    meter.add_step(step(part(1, 2, 2), part(2)))
    assert meter.acceptance_length().mean == pytest.approx(1 + 2 / 9)
    assert meter.acceptance_length_over_requests() == pytest.approx((1 + 3) / 2)
    assert meter.num_reached_per_position() == [9, 1]


def test_bootstrap_matches_the_normal_interval() -> None:
    """Catches a bootstrap over steps, or one that does not resample pairs: compare with the
    delta method.
    """
    rng = np.random.default_rng(1)
    drafts = rng.integers(5, 15, 400).astype(float)
    accepted = rng.binomial(drafts.astype(int) * 3, 0.5).astype(float)
    estimate = ratio_of_sums(accepted, drafts, offset=1.0)
    assert estimate.mean is not None
    assert estimate.ci95 is not None
    residuals = accepted - (estimate.mean - 1) * drafts
    half = 1.96 * residuals.std() / np.sqrt(400) / drafts.mean()
    assert estimate.ci95 == pytest.approx(
        (estimate.mean - half, estimate.mean + half), abs=half / 5
    )
    assert estimate == ratio_of_sums(accepted, drafts, offset=1.0)


def test_paired_bootstrap_cancels_what_both_sides_share() -> None:
    """Catches independent resampling of the two sides: requests differ hugely, their ratio
    never.
    """
    rng = np.random.default_rng(2)
    tokens, slow = rng.integers(1, 200, 50).astype(float), rng.lognormal(0, 2, 50)
    columns = np.stack([tokens, slow, tokens, 2 * slow])
    estimate = paired_ratio(columns, (1, -1, -1, 1), at_once=4)
    assert estimate.ratio == pytest.approx(0.5 * 4)
    assert estimate.ci95 == pytest.approx((2, 2))


@pytest.mark.parametrize("count", [0, 1, 4])
@pytest.mark.parametrize("without_drafts", [0, 9])
def test_too_few_requests_have_no_interval(count: int, without_drafts: int) -> None:
    """Requests that contribute nothing do not count."""
    rest = [0.0] * without_drafts
    tops, bottoms = [1.0] * count + rest, [2.0] * count + rest
    assert ratio_of_sums(tops, bottoms).ci95 is None
    columns = np.array([tops, bottoms, bottoms, tops])
    assert paired_ratio(columns, (1, -1, -1, 1), at_once=1).ci95 is None
    if count == 4:
        assert ratio_of_sums([1.0, *tops], [2.0, *bottoms]).ci95 == (0.5, 0.5)


def test_many_requests_are_resampled_in_pieces() -> None:
    values = np.ones(30_000)
    estimate = ratio_of_sums(values, values)
    assert estimate.ci95 == (1, 1)
    assert NUM_RESAMPLES == 2000

"""Figures of the prefix cache against numbers worked out by hand, for blocks of 4 tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from records import completion, part, request, step

from hydraspec.metrics.meter import Meter
from hydraspec.metrics.prefix_cache import PrefixHits
from hydraspec.types import Completion, PrefixCaching, Span, StepRecord

BLOCKS = PrefixCaching(block_size=4)
SHARED = list(range(10))  # two blocks and a half


def done(index: int, prompt: list[int], output: list[int], cached: int = 0) -> Completion:
    tokens = {"prompt_token_ids": prompt, "output_token_ids": output}
    return completion(index, **tokens, num_cached_tokens=cached)


def test_eligible_is_the_longest_common_prefix_in_whole_blocks() -> None:
    hits = PrefixHits(BLOCKS)
    for index in range(3):
        hits.begun(index)
    hits.ended(done(0, [*SHARED, 70, 71], [90]))
    hits.ended(done(1, [*SHARED, 80], [90], cached=8))
    hits.ended(done(2, SHARED[:8], [90], cached=4))  # a hit leaves one token to compute
    assert {i: e.num_tokens for i, e in hits.eligible().items()} == {0: 0, 1: 8, 2: 4}
    assert (hits.num_queried_tokens, hits.num_hit_tokens) == (12 + 11 + 8, 12)
    assert hits.hit_rate() == 12 / 31
    assert hits.eligible_hit_rate() == 1.0
    assert hits.num_missed_tokens() == 0


def test_spans_of_other_content_end_a_common_prefix() -> None:
    hits = PrefixHits(BLOCKS)
    image = Span(kind="image", start=5, length=2, digest="aa", may_be_cut=True)
    for index, digest in enumerate(("aa", "ab", "aa")):
        hits.begun(index)
        hits.ended(replace(done(index, SHARED, [90]), spans=(replace(image, digest=digest),)))
    assert {i: e.num_tokens for i, e in hits.eligible().items()} == {0: 0, 1: 4, 2: 8}


@pytest.mark.parametrize("ended_before", [True, False])
def test_an_output_counts_once_its_request_has_ended(ended_before: bool) -> None:
    """All but its last token, which has no KV: a block of output needs a token after it."""
    hits = PrefixHits(BLOCKS)
    first = done(0, [1, 2], [3, 4, 5, 6, 7, 8])
    hits.begun(0)
    if ended_before:
        hits.ended(first)
    hits.begun(1)
    hits.ended(done(1, [1, 2, 3, 4, 5, 6, 7, 8, 9], [90]))
    if not ended_before:
        hits.ended(first)
    assert hits.eligible()[1].num_tokens == 4 * ended_before
    assert hits.num_missed_tokens() == 4 * ended_before


def test_what_was_taken_counts_as_eligible() -> None:
    """From the output of a request that still ran, or one that never ended."""
    hits = PrefixHits(BLOCKS)
    hits.begun(0)
    hits.begun(1)
    hits.ended(done(1, list(range(9)), [90], cached=8))
    assert hits.eligible_hit_rate() == 1.0


def test_every_run_begins_with_an_empty_cache() -> None:
    hits = PrefixHits(BLOCKS)
    for index in range(2):
        hits.begin_run()
        hits.begun(index)
        hits.ended(done(index, SHARED, [90]))
    assert hits.eligible()[1].num_tokens == 0
    assert hits.eligible_hit_rate() is None


@pytest.mark.parametrize("has_draft_kv", [False, True])
def test_prompts_that_part_at_the_end_of_a_block(has_draft_kv: bool) -> None:
    """Draft KV of the last row depends on the token after it: one block less, counted apart."""
    hits = PrefixHits(PrefixCaching(block_size=4, has_draft_kv=has_draft_kv))
    for index in range(4):
        hits.begun(index)
    hits.ended(done(0, [*SHARED[:8], 70], [90]))
    hits.ended(done(1, [*SHARED[:8], 80], [90]))  # parts from it at 8
    hits.ended(done(2, [*SHARED[:8], 80], [90]))  # does not part from the second
    hits.ended(done(3, [*SHARED[:7], 60, 61], [90]))  # parts within a block
    eligible = {i: (e.num_tokens, e.num_border_tokens) for i, e in hits.eligible().items()}
    assert eligible == {0: (0, 0), 1: (4, 4) if has_draft_kv else (8, 0), 2: (8, 0), 3: (4, 0)}
    assert hits.num_border_tokens() == 4 * has_draft_kv


def test_a_request_that_was_never_admitted_did_not_look() -> None:
    hits = PrefixHits(BLOCKS)
    hits.ended(done(0, SHARED, []))
    assert hits.num_queried_tokens == 0
    assert hits.hit_rate() is None


def reading(before: int, rows: int) -> StepRecord:
    usage = {"full": before / 100, "sliding": rows / 100}
    return step(part(prefill_rows=rows, computed=before), kv_usage_per_group=usage)


def decoding(before: int, rows: int, accepted: int) -> StepRecord:
    usage = {"full": before / 100, "sliding": rows / 100}
    return step(part(0, rows - 1, accepted, computed=before), kv_usage_per_group=usage)


def test_recomputed_tokens_and_peaks_by_group() -> None:
    """A request reads 4 cached and 8 other tokens, decodes to 14, is preempted, finds 8 of them in
    the cache again and reads 6 once more; then it decodes on."""
    meter = Meter([request()], prefix_caching=BLOCKS)
    meter.add_step(reading(4, 8))
    meter.add_step(decoding(12, 4, accepted=1))
    meter.add_step(reading(8, 7))  # and the newest token, which had no KV
    meter.add_step(decoding(15, 4, accepted=3))
    meter.add_completion(done(0, SHARED, [90]))
    assert meter.num_recomputed_tokens() == 6
    assert meter.steps.kv_peak_usage_per_group == {"full": 0.15, "sliding": 0.08}

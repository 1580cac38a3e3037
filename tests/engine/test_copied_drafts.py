"""Drafts that `method=ngram` copies on the device: over ranks, stages and shared prefixes."""

from __future__ import annotations

import pytest
from fuzz_engines import build
from fuzz_prefixes import Hits, cut_at_every_block, plain_case, run_prefix_case, text_of
from fuzz_ranks import Happened, check_case_on_ranks, small_case
from fuzz_stages import Pair
from side_by_side import assert_same_run, run_alone
from staged import assert_same_everywhere, config_of, mixed_requests, run_over

from hydraspec.config.options import NgramOptions
from hydraspec.engine.native import NativeEngine
from hydraspec.parallel.layout import Layout

PAIR = Pair("tiny_gemma4", "ngram")


def test_two_ranks_draft_as_one_process() -> None:
    happened = Happened()
    for number in range(3):
        case = small_case(number, PAIR)
        case.config.method.options = NgramOptions(prompt_lookup_min=1)  # outputs are short
        check_case_on_ranks(case, 2, happened)
    assert happened.num_accepted > 0
    assert happened.num_rejected > 0


@pytest.mark.parametrize(
    "layout", [Layout(pipeline=2), Layout(tensor=2, pipeline=2)], ids=["pp2", "tp2_pp2"]
)
def test_stages_draft_as_one_process(layout: Layout) -> None:
    config = config_of(PAIR)
    alone = run_alone(NativeEngine(config), mixed_requests(PAIR))
    found = assert_same_everywhere(run_over(layout, config_of(PAIR), mixed_requests(PAIR)))
    assert_same_run(found, alone)
    assert sum(part.num_accepted for record in found.records for part in record.requests) > 2


def test_drafts_after_hits_of_the_prefix_cache() -> None:
    requests = cut_at_every_block(text_of(PAIR, 40), 4, 1)
    case = plain_case(PAIR, requests, block_size=4, max_num_seqs=8)
    run_prefix_case(case, Hits())
    seen = run_alone(build(case), requests, 1)
    assert max(done.num_cached_tokens for done in seen.completions.values()) > 30

"""Tensor-parallel ranks give what one process gives: tokens, drafts and accepted counts, request by
request, for every zoo target with every drafter it has.
"""

from __future__ import annotations

from typing import Any

import pytest
from fuzz_cases import Case, Choices
from fuzz_ranks import Happened, check_case_on_ranks, run_case_on_ranks
from fuzz_stages import PAIRS, ZOO_PAIRS, Pair, stage
from graph_runs import graph_config, zoo_requests

from hydraspec.config.schema import DraftSampling, Dtype, Verification
from hydraspec.models import draft_place

SAMPLED = {"temperature": 1.1, "top_k": 30, "top_p": 0.95, "min_p": 0.01}
MIXED_TYPES = (Dtype.float64, Dtype.float64, Dtype.float32)


def small_case(number: int, pair: Pair, dtype: Dtype = Dtype.float64) -> Case:
    """Prompts in chunks, more requests than slots, stops; every third cache holds one request of
    full length. Half of the requests sample, with drafts that are sampled in every second case.
    """
    found = stage(pair.stage, dtype)
    config = graph_config(
        pair.method,
        "none",
        pair=(pair.stage, pair.drafter and pair.drafter.removeprefix("zoo:")),
        dtype=dtype,
        max_num_seqs=3,
        max_model_len=72,
        max_num_batched_tokens=24,
        draft_sampling=[*DraftSampling][number % 2],
        verification=[Verification.standard, Verification.block][number // 2 % 2],
    )
    requests = zoo_requests(2) + zoo_requests(4, **SAMPLED)[2:]
    for request, length, most in zip(requests, (9, 61, 20, 33), (12, 6, 10, 8), strict=True):
        assert request.messages is not None
        prompt = found.tokenizer.encode_chat(request.messages)
        request.prompt_token_ids, request.sampling.max_tokens = prompt[-length:], most
    requests[0].sampling.stop = (" ", "e")
    return Case(
        number=number,
        pair=pair,
        config=config,
        requests=requests,
        concurrency=None,
        runner="plain",
        room=1 if number % 3 == 0 else None,
        company="alone",
    )


def test_two_ranks_give_what_one_process_gives() -> None:
    """Bitwise: in float64 no choice of these cases is within rounding of another."""
    happened = Happened()
    for number, pair in enumerate(ZOO_PAIRS):
        check_case_on_ranks(small_case(number, pair), 2, happened)
    assert happened.num_preempted
    assert happened.num_chunked
    assert happened.num_rejected > happened.num_accepted > 0
    assert happened.num_stopped
    assert happened.num_sampled == happened.num_requests / 2


def held_whole(patch: pytest.MonkeyPatch) -> None:
    """Draft heads that no rank divides, but where they have to be."""
    patch.setattr(draft_place, "is_worth_dividing", lambda *_: False)


WHOLE = {"gemma4_mtp": ZOO_PAIRS[1], "eagle3": ZOO_PAIRS[6], "mtp": ZOO_PAIRS[9]}


@pytest.mark.parametrize("method", WHOLE)
def test_heads_that_every_rank_holds_whole(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same drafts again, from other parts of the head."""
    held_whole(monkeypatch)
    check_case_on_ranks(small_case(1, WHOLE[method], Dtype.float32), 2, Happened())


# ------------------------------------------------------------------ the whole product


def choices(*dtypes: Dtype) -> Choices:
    return Choices(
        pairs=PAIRS,
        dtypes=dtypes,
        num_drafts=(1, 2, 3, 4, 8),
        block_sizes=(8, 16),
        max_num_seqs=(2, 4, 7),
        max_num_batched_tokens=(16, 24, 40),
    )


FUZZED: dict[str, dict[str, Any]] = {
    "2 ranks in float64": {"dtypes": (Dtype.float64,), "numbers": range(54)},
    "2 ranks in float32": {"dtypes": (Dtype.float32,), "numbers": range(100, 136)},
    "4 ranks": {"dtypes": MIXED_TYPES, "numbers": range(200, 218), "num_ranks": 4},
    "whole heads": {"dtypes": MIXED_TYPES, "numbers": range(300, 318), "whole": True},
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FUZZED)
def test_fuzzed_engines_on_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random configurations and requests of all targets and drafters, random shapes among them."""
    given, happened = FUZZED[name], Happened()
    if given.get("whole"):
        held_whole(monkeypatch)
    for number in given["numbers"]:
        run_case_on_ranks(number, choices(*given["dtypes"]), given.get("num_ranks", 2), happened)
    assert happened.num_preempted
    assert happened.num_chunked
    assert happened.num_rejected > happened.num_accepted > 0
    assert happened.num_stopped
    assert happened.num_sampled
    assert len(happened.near_ties) + happened.other_drafts <= happened.num_requests // 50

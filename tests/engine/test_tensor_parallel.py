"""Tensor-parallel ranks give what one process gives: tokens, drafts and accepted counts, request by
request, for every zoo target with a drafter, and every drafter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import records
from fuzz_cases import Choices
from fuzz_ranks import Happened, check_case_on_ranks, run_case_on_ranks, small_case
from fuzz_stages import PAIRS, QUANTISED_PAIRS, ZOO_PAIRS, Pair, stage
from graph_runs import Run, graph_config, run_requests, zoo_requests
from side_by_side import assert_same_run, run_alone
from thread_ranks import as_ranks
from tiny_targets import assistant_config, gemma4_config, run_config, write_folder

from hydraspec.config.schema import DraftSampling, Dtype
from hydraspec.engine.native import NativeEngine
from hydraspec.models import draft_place
from hydraspec.models.checkpoint.reader import resolve_folder
from hydraspec.parallel.layout import Layout
from hydraspec.parallel.ranks import Ranks

MIXED_TYPES = (Dtype.float64, Dtype.float64, Dtype.float32)


@pytest.mark.parametrize(
    "pairs",
    [
        # Every target and every method; those left out pair them otherwise.
        tuple(pair for n, pair in enumerate(ZOO_PAIRS) if n not in (0, 3, 12, 13)),
        # Three formats, dense and with experts; their draft heads are those of the others.
        (QUANTISED_PAIRS[1], *QUANTISED_PAIRS[2:4], QUANTISED_PAIRS[6]),
        pytest.param(ZOO_PAIRS, marks=pytest.mark.slow),
        pytest.param(QUANTISED_PAIRS, marks=pytest.mark.slow),
    ],
    ids=["float", "quantised", "all float", "all quantised"],
)
def test_two_ranks_give_what_one_process_gives(pairs: tuple[Pair, ...]) -> None:
    """Bitwise: in float64 no choice of these cases is within rounding of another, and no input of
    a quantised matrix within rounding of the border between two numbers."""
    happened = Happened()
    for number, pair in enumerate(pairs):
        check_case_on_ranks(small_case(number, pair), 2, happened)
    assert happened.num_preempted
    assert happened.num_chunked
    assert happened.num_rejected > happened.num_accepted > 0
    assert happened.num_stopped
    assert happened.num_sampled == happened.num_requests / 2


def held_whole(patch: pytest.MonkeyPatch) -> None:
    """Draft heads that no rank divides, but where they have to be."""
    patch.setattr(draft_place, "is_worth_dividing", lambda *_: False)


WHOLE = {"gemma4_mtp": ZOO_PAIRS[1], "eagle3": ZOO_PAIRS[7], "mtp": ZOO_PAIRS[11]}


@pytest.mark.parametrize("method", WHOLE)
def test_heads_that_every_rank_holds_whole(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same drafts again, from other parts of the head."""
    assert WHOLE[method].method == method
    held_whole(monkeypatch)
    check_case_on_ranks(small_case(1, WHOLE[method], Dtype.float32), 2, Happened())


@pytest.mark.parametrize("method", ["gemma4_mtp", "eagle3 on gemma4"])
def test_suppressed_tokens_occur_on_no_rank(method: str, tmp_path: Path) -> None:
    """The target's most frequent tokens, which both ranks hold some of; a dense head, and one of a
    narrow vocabulary."""
    config = graph_config(method, "none", k=2)
    requests = zoo_requests(2, longest=6)
    said = run_requests(NativeEngine(config), requests).tokens
    suppressed = sorted({token for tokens in said for token in tokens})
    half = stage("tiny_gemma4", Dtype.float64).target.vocab_size // 2
    assert suppressed[0] < half <= suppressed[-1]
    for file in resolve_folder(config.target.checkpoint).iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    text = json.dumps({"suppress_tokens": suppressed, "eos_token_id": 1})
    (tmp_path / "generation_config.json").write_text(text)
    config.target.checkpoint = str(tmp_path)
    wanted = run_requests(NativeEngine(config), requests)

    def work(ranks: Ranks) -> Run:
        return run_requests(NativeEngine(config), requests)

    for run in as_ranks(Layout(tensor=2), work):
        assert (run.outputs, run.drafts) == (wanted.outputs, wanted.drafts)
        drafts = [step for steps in run.drafts.values() for step in steps]
        found = {token for tokens in [*run.tokens, *drafts] for token in tokens}
        assert found
        assert not found & {*suppressed}


def test_a_vocabulary_that_ranks_do_not_divide(tmp_path: Path) -> None:
    """65 tokens over 2 ranks; greedy requests and sampled ones, whose drafts are sampled."""
    shape = gemma4_config(vocab_size=65, vocab_size_per_layer_input=65, tie_word_embeddings=False)
    config = run_config(
        write_folder(tmp_path / "target", shape),
        method="gemma4_mtp",
        drafter=write_folder(tmp_path / "assistant", assistant_config(shape)),
        draft_sampling=DraftSampling.probabilistic,
    )
    prompts = [[64, 3, 64, 9], [5], [*range(2, 40)], [33, 32, 31]]
    requests = [
        records.request(
            i, prompt_token_ids=prompt, max_tokens=8, ignore_eos=True, temperature=0.9 * (i % 2)
        )
        for i, prompt in enumerate(prompts)
    ]
    wanted = run_alone(NativeEngine(config), requests)
    assert any(step[2] < len(step[1]) for steps in wanted.decodes.values() for step in steps)
    for run in as_ranks(Layout(tensor=2), lambda ranks: run_alone(NativeEngine(config), requests)):
        assert_same_run(run, wanted)


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

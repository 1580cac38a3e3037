"""Drafts that the host proposes before a step: where they are written, the number of them in a
step, and runs over ranks, stages, shared prefixes and steps that are launched ahead."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from fuzz_engines import build
from fuzz_prefixes import Hits, cut_at_every_block, plain_case, run_prefix_case, text_of
from fuzz_ranks import Happened, check_case_on_ranks, small_case
from fuzz_stages import Pair
from graph_runs import (
    GRAPH_MODES,
    Run,
    assert_same,
    attention_as_on_devices,
    count_launches,
    graph_config,
    make_graph_engine,
    run_requests,
    zoo_requests,
)
from grids import in_turn
from hydraspec_kernels.lookup import Lookup
from recorded_graphs import CalledAgain
from side_by_side import assert_same_run, run_alone
from staged import assert_same_everywhere, config_of, mixed_requests, run_over
from step_ahead import Watch, outputs

from hydraspec.config.options import SuffixOptions
from hydraspec.engine.native import NativeEngine
from hydraspec.engine.run.host_drafts import write_drafts
from hydraspec.engine.run.state import new_request_state
from hydraspec.engine.schedule.host_drafts import StepDrafts
from hydraspec.engine.schedule.sequence import Scheduled
from hydraspec.engine.schedule.sequence import Sequence as EngineSequence
from hydraspec.parallel.layout import Layout
from hydraspec.speculators.host import DraftedText
from hydraspec.speculators.suffix.drafts import SuffixDrafts
from hydraspec.types import Continuations, Request, SamplingParams

PAIR = Pair("tiny_gemma4", "suffix")
OWN_TEXT = SuffixOptions(max_cached_requests=0, min_acceptance=0)  # whoever shares the steps
K, UNSET = 3, 77


def written(
    sampled: list[int],
    continuation: list[int],
    *,
    is_ahead: bool = True,
    known: tuple[int, ...] = (9, 8),
    lookup: Lookup | None = None,
) -> list[int]:
    """Drafts after the newest token of slot 1, whose text is `known` on the host; `sampled`
    follow."""
    state = new_request_state(
        num_slots=2,
        max_model_len=len(known) + 10,
        vocab_size=100,
        num_speculative_tokens=K,
        draft_vocab_size=None,
        device=torch.device("cpu"),
    )
    text = [*known, *sampled]
    state.token_ids.fill_(UNSET)
    state.token_ids[1, : len(text)] = torch.tensor(text)
    state.num_computed[1] = len(text) - 1
    numbers = np.full((1, 2 * K + 3), -1)
    numbers[0, :2] = 1, len(known)
    numbers[0, 2 : 2 + len(continuation)] = continuation
    write_drafts(state, Continuations(numbers=numbers, is_ahead=is_ahead), lookup)
    row = state.token_ids[1].tolist()
    assert row[: len(text)] == text
    assert set(row[len(text) + K :]) == {UNSET}
    assert set(state.token_ids[[0, 2]].flatten().tolist()) == {UNSET}
    return row[len(text) : len(text) + K]


@pytest.mark.parametrize(
    ("sampled", "continuation", "drafts"),
    [
        pytest.param([1], [1, 2, 3, 4], [2, 3, 4], id="one sampled token, as proposed"),
        pytest.param([1, 2], [1, 2, 3, 4], [3, 4, -1], id="two, and few are left"),
        pytest.param([1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7], [5, 6, 7], id="all that may be sampled"),
        pytest.param([1, 2], [1, 2], [-1, -1, -1], id="none is left"),
        pytest.param([5], [1, 2, 3, 4], [-1, -1, -1], id="another token"),
        pytest.param([1, 5], [1, 2, 3, 4], [-1, -1, -1], id="another second token"),
        pytest.param([1, 2, 3], [1, 2], [-1, -1, -1], id="more sampled than proposed"),
        pytest.param([], [1, 2], [1, 2, -1], id="nothing sampled since"),
        pytest.param([1], [], [-1, -1, -1], id="no continuation"),
    ],
)
def test_drafts_are_what_is_left_after_sampled_tokens(
    sampled: list[int], continuation: list[int], drafts: list[int]
) -> None:
    assert written(sampled, continuation) == drafts


def test_without_a_step_in_flight_drafts_are_the_continuation() -> None:
    assert written([], [1, 2, 3], is_ahead=False) == [1, 2, 3]


ONE_EACH = Lookup(longest=4, factor=1.0)
TEXT = (1, 2, 3, 4, 5, 6, 1, 7, 8)


@pytest.mark.parametrize(
    ("sampled", "continuation", "drafts"),
    [
        pytest.param([5], [5, 6, 9], [6, 9, -1], id="the continuation, as it agrees"),
        pytest.param([5], [4, 6, 9], [6, -1, -1], id="another token, which stood before"),
        pytest.param([3, 4], [4], [5, 6, -1], id="two tokens that stood together"),
        pytest.param([3, 4], [3, 4], [5, 6, -1], id="nothing is left of the continuation"),
        pytest.param([1], [], [7, -1, -1], id="the latest place"),
        pytest.param([2, 3, 4, 5], [], [6, 1, 7], id="as many as match, K at most"),
        pytest.param([0], [], [-1, -1, -1], id="a token that is new"),
        pytest.param([8, 8], [], [8, 8, -1], id="the text repeats itself"),
    ],
)
def test_other_tokens_are_looked_up_in_the_text(
    sampled: list[int], continuation: list[int], drafts: list[int]
) -> None:
    """Catches drafts of the host that are lost to the lookup, a match that counts tokens of
    drafts not yet sampled, and more drafts than the match has tokens."""
    assert written(sampled, continuation, known=TEXT, lookup=ONE_EACH) == drafts


def looked_up(text: list[int], lookup: Lookup) -> list[int]:
    """Drafts after the longest earlier occurrence of the last tokens, of several the latest."""
    for length in range(min(lookup.longest, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                most = min(K, max(int(lookup.factor * length), lookup.fewest))
                found = text[end:]
                while len(found) < most:
                    found.append(found[len(found) - (len(text) - end)])
                return [*found[:most], *[-1] * (K - most)]
    return [-1] * K


def test_lookups_equal_a_plain_search_over_500_histories() -> None:
    rng = random.Random(47)
    num_found = 0
    for _ in range(500):
        size, length = rng.randint(2, 9), rng.randint(1, 30)
        text = [rng.randrange(size) for _ in range(length + rng.randint(1, K + 1))]
        lookup = Lookup(rng.choice((1, 2, 4)), rng.choice((0.5, 1.0, 2.0)))
        drafts = written(text[length:], [], known=tuple(text[:length]), lookup=lookup)
        assert drafts == looked_up(text, lookup)
        num_found += drafts[0] >= 0
    assert 350 < num_found < 500


class Said(DraftedText):
    """A text whose continuation is always the same."""

    def __init__(self, drafts: list[int], match_length: int) -> None:
        self.drafts, self.match_length = drafts, match_length

    def continuation(self, token_ids: Sequence[int], num_pending: int) -> list[int]:
        return self.drafts


def decoding(drafts: list[int], match_length: int = 1) -> EngineSequence:
    request = Request(index=0, id="0", sampling=SamplingParams(), prompt_token_ids=[1])
    sequence = EngineSequence(request, [1, 2], num_prompt=1)
    sequence.decoding, sequence.drafted = True, Said(drafts, match_length)
    return sequence


def observe(drafts: StepDrafts, sequence: EngineSequence, rows: int, accepted: int) -> None:
    item = Scheduled(sequence, 1, rows, rows - 1, False, True)
    if item.num_proposed:
        drafts.observe(item, accepted)


def propose_rejected(drafts: StepDrafts, sequence: EngineSequence, num_steps: int) -> list[int]:
    """Draft lengths of so many steps, in which no draft is accepted."""
    lengths = []
    for _ in range(num_steps):
        lengths.append(drafts.propose([sequence]))
        observe(drafts, sequence, 1 + lengths[-1], 0)
    return lengths


def test_drafts_that_are_rejected_get_no_rows_and_then_another_try() -> None:
    """Catches drafts that are offered for ever on prose, and a text that gets none again."""
    drafts = StepDrafts(SuffixDrafts(SuffixOptions(), 3, 40), 3)
    sequence = decoding([1, 2])
    lengths = propose_rejected(drafts, sequence, 2000)
    assert lengths[:6] == [2, 1, 1, 1, 1, 0]
    tried = [number for number, length in enumerate(lengths) if length]
    assert len(tried) == 40
    assert max(later - earlier for earlier, later in pairwise(tried)) < 300
    for _ in range(300):
        observe(drafts, sequence, 1 + drafts.propose([sequence]), 2)
    assert drafts.propose([sequence]) == 2


def test_long_matches_are_tried_however_often_short_ones_were_rejected() -> None:
    """Catches prose after which text that repeats itself is drafted late, and long matches that
    are offered for ever."""
    drafts = StepDrafts(SuffixDrafts(SuffixOptions(), 3, 40), 3)
    propose_rejected(drafts, decoding([1]), 20)
    repeating = decoding([1, 2, 3], match_length=8)
    lengths = propose_rejected(drafts, repeating, 220)
    assert lengths.index(2) < 4
    assert sum(length > 0 for length in lengths) == 12
    drafts.start_over()
    propose_rejected(drafts, decoding([1]), 200)
    lengths = []
    while not any(lengths):
        lengths.append(drafts.propose([repeating]))
    assert len(lengths) <= 17
    length = lengths[-1]
    for _ in range(9):
        observe(drafts, repeating, 1 + length, length)
        length = drafts.propose([repeating])
        assert length, "every text is read again"
    assert length == 3


def test_texts_without_drafts_are_read_more_seldom_and_then_as_before() -> None:
    """Catches host time that prose takes for nothing, and drafts that are missed for long."""
    drafts = StepDrafts(SuffixDrafts(SuffixOptions(), 3, 40), 3)
    sequences, reads = [decoding([]) for _ in range(16)], []
    for number in range(400):
        if number == 350:
            sequences = [decoding([1, 2, 3]) for _ in range(16)]
        for sequence in sequences:
            sequence.continuation = [UNSET]
        if drafts.propose(sequences):
            break
        reads += [number] * (sequences[0].continuation == [])
    assert reads[:4] == [0, 1, 2, 3]
    assert len(reads) < 50
    assert 350 <= number <= 366
    for sequence in sequences:
        observe(drafts, sequence, 4, 3)
    assert drafts.propose(sequences) == 3


def test_finished_outputs_are_read_once_drafts_are_tried() -> None:
    """Catches outputs that are lost while no drafts are tried, and a list of them that only
    grows."""
    host = SuffixDrafts(SuffixOptions(), 3, 40)
    drafts, text = StepDrafts(host, 3), decoding([])
    drafts.finished([1, 2, 7, 8, 9])
    assert host.outputs.num_texts == 0
    text.drafted = None
    assert drafts.propose([text]) == 2
    assert text.continuation == [7, 8]
    for _ in range(100):
        drafts.finished([5, 6])
    assert host.outputs.num_texts == 65
    drafts.start_over()
    drafts.propose([decoding([])])
    assert host.outputs.num_texts == 0


def test_rows_that_one_request_of_many_would_use_are_left_out() -> None:
    drafts = StepDrafts(SuffixDrafts(SuffixOptions(), 3, 40), 3)
    alone, silent = decoding([1, 2, 3]), [decoding([]) for _ in range(15)]
    assert drafts.propose([alone]) == 2, "a third draft needs the two before it"
    assert drafts.propose([alone, *silent[:2]]) == 1
    assert drafts.propose([alone, *silent]) == 0
    assert drafts.propose([alone, decoding([1]), decoding([1]), decoding([1]), *silent]) == 0
    some = [decoding([1]) for _ in range(6)]
    assert drafts.propose([alone, *some, *silent]) == 1
    for _ in range(4):
        observe(drafts, alone, 4, 3)
    assert drafts.propose([alone]) == 3
    always = StepDrafts(SuffixDrafts(SuffixOptions(min_acceptance=0), 3, 40), 3)
    assert always.propose([alone, *silent]) == 3


def run_of(**changes: object) -> Watch:
    config = config_of(PAIR, **changes)
    return run_alone(NativeEngine(config), mixed_requests(PAIR))


def num_accepted(seen: Watch) -> int:
    return sum(part.num_accepted for record in seen.records for part in record.requests)


def test_requests_of_a_step_have_different_numbers_of_drafts() -> None:
    """The step has rows for the most drafts that any of them has, and none where none has any."""
    seen = run_of()
    steps = [[p for p in record.requests if not p.is_prefill] for record in seen.records]
    decodes = [
        ({p.num_rows for p in parts}, {len(p.draft_token_ids) for p in parts})
        for parts in steps
        if parts
    ]
    assert all(rows == {1 + max(drafts)} for rows, drafts in decodes)
    assert any(len(drafts) > 1 for _, drafts in decodes)
    assert any(rows == {1} for rows, _ in decodes)
    assert num_accepted(seen) > 10


def test_outputs_of_an_earlier_run_are_forgotten() -> None:
    """Else a second round over the same prompts would be drafted from the first one's answers."""
    engine = NativeEngine(config_of(PAIR))
    first = run_alone(engine, mixed_requests(PAIR))
    assert_same_run(run_alone(engine, mixed_requests(PAIR)), first)


def test_steps_launched_ahead_give_the_same_greedy_tokens() -> None:
    config = config_of(PAIR)
    config.engine.async_scheduling = True
    requests = [r for r in mixed_requests(PAIR) if r.sampling.temperature == 0]
    ahead = run_alone(NativeEngine(config), requests)
    waiting = run_alone(NativeEngine(config_of(PAIR)), requests)
    assert outputs(ahead) == outputs(waiting)
    assert num_accepted(ahead) > 0


@pytest.mark.parametrize(
    "layout", [Layout(pipeline=2), Layout(tensor=2, pipeline=2)], ids=["pp2", "tp2_pp2"]
)
def test_stages_draft_as_one_process(layout: Layout) -> None:
    """From their own texts, as stages end requests in another order."""
    config = config_of(PAIR)
    config.method.options = OWN_TEXT
    alone = run_alone(NativeEngine(copy.deepcopy(config)), mixed_requests(PAIR))
    found = assert_same_everywhere(run_over(layout, config, mixed_requests(PAIR)))
    assert_same_run(found, alone)
    assert num_accepted(found) > 5


def test_stages_draft_alike_from_finished_outputs() -> None:
    requests = [r for r in mixed_requests(PAIR) if r.sampling.temperature == 0]
    found = assert_same_everywhere(run_over(Layout(pipeline=2), config_of(PAIR), requests))
    assert outputs(found) == outputs(run_alone(NativeEngine(config_of(PAIR)), requests))


def test_two_ranks_draft_as_one_process() -> None:
    happened = Happened()
    for number in range(3):
        check_case_on_ranks(small_case(number, PAIR), 2, happened)
    assert happened.num_accepted > 0
    assert happened.num_rejected > 0


def test_drafts_after_hits_of_the_prefix_cache() -> None:
    requests = cut_at_every_block(text_of(PAIR, 40), 4, 1)
    case = plain_case(PAIR, requests, block_size=4, max_num_seqs=8)
    case.config.method.options = OWN_TEXT
    hits = Hits()
    run_prefix_case(case, hits)
    seen = run_alone(build(case), requests, 1)
    assert max(done.num_cached_tokens for done in seen.completions.values()) > 30


@cache
def without_graphs(method: str) -> Run:
    engine = make_graph_engine(graph_config(method, "none", pair=("tiny_qwen3", None)), None)
    return run_requests(engine, zoo_requests(6))


@pytest.mark.parametrize(("mode", "method"), in_turn(GRAPH_MODES, ("suffix", "ngram")))
def test_every_graph_mode_drafts_as_without_graphs(
    method: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is replayed by the graph of its length, with missing drafts among the others; all
    steps of n-gram have K."""
    attention_as_on_devices(monkeypatch)
    config = graph_config(method, mode, pair=("tiny_qwen3", None), sizes=(5,))
    engine = make_graph_engine(config, CalledAgain())
    launches = count_launches(engine, monkeypatch)
    found = run_requests(engine, zoo_requests(6))
    assert_same(found, without_graphs(method))
    assert found.num_accepted > 10
    graphs = engine.parts.runner.graphs
    assert graphs is not None
    lengths = {each.rows_per_request for each in graphs.manager.descriptors}
    wanted_lengths = {1, 2, 3, 4} if method == "suffix" else {4}
    assert lengths >= (wanted_lengths if mode != "piecewise" else set())
    assert sum(launches.values()) > launches["eager"]

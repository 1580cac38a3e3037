"""Requests of one step that share the blocks which it fills: who may, and that tokens, drafts and
accepted counts are those of each request alone without a prefix cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fuzz_engines import build
from fuzz_prefixes import Hits, cold_run, plain_case, run_prefix_case, text_of
from fuzz_stages import PAIRS, ZOO_PAIRS, Pair
from prefix_model import Model
from prefix_prompts import DRAFT, FULL, PROMPT, SLIDING, served, starts
from prefix_setting import Setting
from records import request

from hydraspec.engine.native import NativeEngine
from hydraspec.engine.schedule.sequence import Scheduled
from hydraspec.types import Completion, Request


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_requests_of_one_step_share_what_it_computes(runs_ahead: bool) -> None:
    """Two prefixes; one request of each computes it, and its block's following token too."""
    model = served((FULL, SLIDING, DRAFT), runs_ahead=runs_ahead, max_rows=256)
    other = PROMPT[::-1]
    for prefix in (PROMPT, other, PROMPT, other):
        model.add([*prefix[:50], *PROMPT[: len(model.alive) + 9]], 2)
    model.step([0])
    assert starts(model) == [0, 0, 48, 48]
    while model.alive:
        model.step([0])


def test_a_prefix_longer_than_a_step_is_shared_from_its_last_chunk_on() -> None:
    model = served((FULL, DRAFT), max_rows=64)
    for _ in range(3):
        model.add(list(PROMPT), 2)
    model.step([0])
    model.step([0])
    assert starts(model) == [0, 96, 96]


def last_rows(num_tokens: int, *chunk: int) -> list[int]:
    """Where two prompts begin that are one but for the second's last token, the second of which
    comes with the first one's last rows: the only ones, or those after `chunk` rows."""
    model = served((FULL,), max_rows=37 if chunk else 200)
    model.add(PROMPT[:num_tokens], 2)
    for _ in chunk:
        model.step([0])
    model.add(PROMPT[: num_tokens + 1], 2)
    model.step([0])
    return starts(model)


def test_what_a_kernel_may_write_beside_its_readers_is_shared_a_step_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few rows, of one pass that writes and reads request by request; and the newest row, which may
    be written twice."""
    assert last_rows(50, 37) == [0, 32]
    assert last_rows(64) == [0, 48]
    monkeypatch.setattr(Scheduled, "num_shared", Scheduled.seq_len)
    for case in ((50, 37), (64,)):
        with pytest.raises(AssertionError, match="is read in the pass that writes it"):
            last_rows(*case)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_the_end_of_a_request_leaves_what_others_took_of_it(runs_ahead: bool) -> None:
    """Cancelled after the step in which a second request begins with its blocks."""
    model = served((FULL, SLIDING, DRAFT), runs_ahead=runs_ahead)
    model.add(list(PROMPT[:50]), 2)
    model.add(list(PROMPT[:62]), 9)
    model.step([0])
    model.cancel(0)
    while model.alive:
        model.step([0])
        model.check_blocks()
    assert starts(model) == [0, 48]


def test_a_request_without_blocks_for_its_rows_takes_none_of_its_step() -> None:
    """Nor does it wait for ever."""
    setting = Setting(
        groups=(FULL,), num_blocks=(8,), num_drafts=0, max_num_seqs=2, max_rows=200, max_len=120
    )
    model = Model(setting)
    model.add(PROMPT[:97], 3)
    model.add([*PROMPT[:50], *PROMPT[:10]], 3)
    model.step([0])
    assert starts(model) == [0]
    while model.alive:
        model.step([0])
        model.check_blocks()
    assert starts(model) == [0, 48]


def test_the_first_of_two_that_share_is_preempted_after_the_second() -> None:
    """By a request that was there before both and grows."""
    setting = Setting(
        groups=(FULL,), num_blocks=(10,), num_drafts=0, max_num_seqs=3, max_rows=200, max_len=140
    )
    model = Model(setting)
    model.add(PROMPT[::-1][:40], 90)
    model.step([0])
    model.add(PROMPT[:40], 30)
    model.add([*PROMPT[:35], 0, 1], 30)
    while model.alive:
        model.step([0])
        model.check_blocks()
    assert starts(model)[:3] == [0, 0, 32]
    assert len({id(sequence) for sequence, _ in model.admissions[3:]}) == 2


# ------------------------------------------------------------------ engines

BLOCK = 16
KINDS = ("blocks", "part", "chunked", "two")


def requests_of(pair: Pair, kind: str, *, temperature: float = 0.0) -> list[Request]:
    """Five requests that begin as one text does, or as one of two."""
    text = text_of(pair, 100)
    length = {"blocks": 3 * BLOCK, "part": 2 * BLOCK + 5}.get(kind, 4 * BLOCK + 3)
    texts = [text[:length], text[-length:]] if kind == "two" else [text[:length]]
    prompts = [[*texts[i % len(texts)], 9, *text[i : 3 * i], 8 + i] for i in range(5)]
    return [
        request(
            i,
            prompt_token_ids=prompt,
            max_tokens=6 + i,
            ignore_eos=True,
            temperature=temperature,
            seed=40 + i,
        )
        for i, prompt in enumerate(prompts)
    ]


def num_common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def most_cached(requests: list[Request], num_following: int) -> int:
    """Prompt tokens of the requests that are in whole blocks of earlier ones, all together."""
    prompts = [request.prompt_token_ids or [] for request in requests]
    found = 0
    for i, prompt in enumerate(prompts):
        common = [num_common(prompt, earlier) for earlier in prompts[:i]]
        found += max(0, *(count - num_following for count in common), 0) // BLOCK * BLOCK
    return found


def compare(pair: Pair, kind: str, *, temperature: float = 0.0, ahead: bool = False) -> None:
    requests = requests_of(pair, kind, temperature=temperature)
    budget = 40 if kind == "chunked" else 512
    case = plain_case(
        pair, requests, block_size=BLOCK, max_num_seqs=5, max_num_batched_tokens=budget
    )
    case.config.engine.async_scheduling = ahead
    hits = Hits()
    run_prefix_case(replace(case, concurrency=None), hits)
    has_draft_kv = pair.method not in ("none", "gemma4_mtp")
    assert hits.hit_tokens == most_cached(requests, int(has_draft_kv))
    assert hits.hit_tokens >= 2 * BLOCK * 3
    assert hits.num_preempted == 0


@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_arrive_together_compute_a_prefix_once(kind: str) -> None:
    compare(ZOO_PAIRS[11], kind)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.stage}-{pair.method}")
def test_every_drafter(pair: Pair, kind: str, temperature: float, ahead: bool) -> None:
    compare(pair, kind, temperature=temperature, ahead=ahead)


@pytest.mark.parametrize("ahead", [False, True])
def test_cancelled_in_the_step_in_which_others_share_its_blocks(ahead: bool) -> None:
    requests = requests_of(ZOO_PAIRS[2], "part")
    case = plain_case(ZOO_PAIRS[2], requests, block_size=BLOCK, max_num_seqs=5)
    case.config.engine.async_scheduling = ahead
    alone = cold_run(case).completions
    engine: NativeEngine = build(case)
    done: dict[int, Completion] = {}
    for number, event in enumerate(engine.run(requests, concurrency=None)):
        if isinstance(event, Completion):
            done[event.index] = event
        if number == 0:
            engine.cancel(0)
    assert done[0].error == "cancelled"
    assert [done[i].num_cached_tokens for i in range(5)] == [0] + [2 * BLOCK] * 4
    for i in range(1, 5):
        assert done[i].output_token_ids == alone[i].output_token_ids

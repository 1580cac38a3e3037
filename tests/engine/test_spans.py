"""Spans of prompts that are no text: keys of cached blocks name their content, chunks leave whole
what must not be cut, and engines without an encoder refuse them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import pytest
import records
from caches import kv_cache, kv_group
from fake_engine import make_info
from scenarios import draw_scenario, seeded
from step_ahead import both_ways, make_world, outputs, stable_oracle

from hydraspec.engine.cache.prefix import PrefixKeys
from hydraspec.engine.prompts import tokenize
from hydraspec.engine.schedule.prompt_rows import PromptRows, cut_span
from hydraspec.engine.schedule.scheduler import Scheduler
from hydraspec.engine.schedule.sequence import Scheduled, Sequence
from hydraspec.parallel.engines.prefixes import by_prefix
from hydraspec.types import (
    Prompt,
    Request,
    Span,
    StepPlan,
    WorkloadError,
)

IDS = list(range(60, 160))
UNIT = 16
IMAGE = Span(kind="image", start=20, length=20, digest="aa", may_be_cut=False)


def request_of(ids: list[int], *spans: Span, index: int = 0, max_tokens: int = 3) -> Request:
    fields = {"id": f"r{index}", "prompt_token_ids": ids, "spans": spans}
    return records.request(index, max_tokens=max_tokens, ignore_eos=True, **fields)


@pytest.mark.parametrize(
    "spans",
    [
        pytest.param((replace(IMAGE, length=0),), id="empty"),
        pytest.param((replace(IMAGE, start=-1),), id="before the prompt"),
        pytest.param((replace(IMAGE, start=90),), id="after the prompt"),
        pytest.param((IMAGE, replace(IMAGE, start=39)), id="overlapping"),
        pytest.param((replace(IMAGE, start=60), IMAGE), id="falling"),
    ],
)
def test_spans_lie_within_a_prompt_in_rising_order(spans: tuple[Span, ...]) -> None:
    with pytest.raises(ValueError, match="of the prompt"):
        Prompt(IDS, spans)


# ------------------------------------------------------------------ keys


def keys(*spans: Span, num_following: int = 0) -> list[bytes]:
    found = PrefixKeys(IDS, UNIT, b"root", spans)
    return [found.key(end, num_following) for end in range(UNIT, 97, UNIT)]


def num_equal(a: Seq[bytes], b: Seq[bytes]) -> int:
    """Equal keys before the first that differs; none after it may be equal."""
    equal = [one == other for one, other in zip(a, b, strict=True)]
    assert sorted(equal, reverse=True) == equal
    return sum(equal)


def test_keys_without_spans_are_what_they_were() -> None:
    found = PrefixKeys(IDS, UNIT, b"root")
    assert found.key(32, 0).hex()[:16] == "b6e3b653151243dd"
    assert found.key(32, 1) == found.key(32, 0) + (92).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("other", "num_shared"),
    [
        pytest.param((IMAGE,), 6, id="equal content"),
        pytest.param((replace(IMAGE, may_be_cut=True),), 6, id="cutting changes no content"),
        pytest.param((replace(IMAGE, digest="ab"),), 1, id="other content"),
        pytest.param((replace(IMAGE, kind="audio"),), 1, id="another kind"),
        pytest.param((replace(IMAGE, start=21),), 1, id="another place"),
        pytest.param((replace(IMAGE, length=21),), 1, id="another length"),
        pytest.param((), 1, id="text"),
        pytest.param((IMAGE, replace(IMAGE, start=64)), 4, id="one more at a border"),
    ],
)
def test_a_span_is_part_of_the_key_of_each_block_that_it_touches(
    other: tuple[Span, ...], num_shared: int
) -> None:
    assert num_equal(keys(IMAGE), keys(*other)) == num_shared


def test_what_a_span_puts_into_a_key_depends_on_no_earlier_block() -> None:
    """The chain names what came before; a block in a span's middle names the span too."""
    found = PrefixKeys(IDS, UNIT, b"root", (IMAGE,))._content(32, 48)
    assert found != PrefixKeys(IDS, UNIT, b"root", (replace(IMAGE, digest="ab"),))._content(32, 48)
    assert found != PrefixKeys(IDS, UNIT, b"root")._content(32, 48)


def test_a_draft_block_names_the_span_of_the_token_after_it() -> None:
    image = replace(IMAGE, start=32)
    other = replace(image, digest="ab")
    assert num_equal(keys(image), keys(other)) == 2
    assert num_equal(keys(image, num_following=1), keys(other, num_following=1)) == 1


def test_replicas_share_prompts_by_their_content() -> None:
    spans = [IMAGE, replace(IMAGE, digest="ab")] * 2
    requests = [request_of(list(IDS), span, index=i) for i, span in enumerate(spans)]
    shared = by_prefix(requests, 2)
    assert [[request.index for request in each] for each in shared] == [[0, 2], [1, 3]]


# ------------------------------------------------------------------ chunks


class Host:
    """A scheduler whose steps give tokens of 0 and accept drafts at random. As in the engine,
    results arrive `num_ahead` steps late."""

    def __init__(
        self,
        budget: int,
        num_blocks: int = 400,
        *,
        window: int | None = None,
        k: int = 0,
        num_stages: int = 1,
        runs_ahead: bool = False,
    ) -> None:
        self.budget, self.sequences = budget, list[Sequence]()
        self.num_ahead = num_stages - 1 + runs_ahead
        self.flights = deque[list[Scheduled]]()
        self.most_in_flight = 0  # steps
        self.rng = random.Random(budget)
        windows = (None,) if window is None else (None, window)
        specs = [kv_group(str(i), (i,), 8, size) for i, size in enumerate(windows)]
        self.scheduler = Scheduler(
            kv_cache(specs, [num_blocks] * len(specs), 4, 320, prefix_root=b"root"),
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            max_model_len=300,
            num_speculative_tokens=k,
            num_micro_batches=num_stages,
            runs_ahead=runs_ahead,
        )

    def add(self, request: Request) -> Sequence:
        self.sequences.append(Sequence.of(request))
        self.scheduler.add(self.sequences[-1])
        return self.sequences[-1]

    def step(self) -> list[Scheduled]:
        chosen = self.scheduler.schedule()
        assert sum(item.num_rows for item in chosen) <= self.budget
        for item in chosen:
            if item.is_prefill:
                for border in (item.num_computed, item.seq_len):
                    assert cut_span(item.sequence.spans, border) is None, (border, item)
        if chosen:
            if self.num_ahead:
                self.scheduler.launched(chosen)
            self.flights.append(chosen)
            self.most_in_flight = max(self.most_in_flight, len(self.flights))
        if self.flights and (not chosen or len(self.flights) > self.num_ahead):
            for item in self.flights.popleft():
                if item.sequence.finish_reason is None:
                    self.arrive(item)
        return chosen

    def arrive(self, item: Scheduled) -> None:
        sequence = item.sequence
        num_accepted = self.rng.randint(0, item.num_drafts)
        sequence.num_computed += item.num_rows - item.num_drafts + num_accepted
        if item.samples:
            room = sequence.request.sampling.max_tokens - len(sequence.output_token_ids)
            sequence.decoding = True
            sequence.token_ids += [0] * min(1 + num_accepted, room)
            if room <= 1 + num_accepted:
                sequence.finish_reason = "length"
        self.scheduler.arrived(item)
        if sequence.finish_reason is not None:
            self.scheduler.release(sequence)

    def finish(self) -> None:
        """Run until all requests have ended; none may wait for ever."""
        num_idle = 0
        while any(sequence.finish_reason is None for sequence in self.sequences):
            num_failed = len(self.scheduler.failed)
            is_busy = bool(self.flights)
            moved = self.step() or is_busy or len(self.scheduler.failed) > num_failed
            num_idle = 0 if moved else num_idle + 1
            assert num_idle < 2, "requests wait for ever"


def drawn(rng: random.Random, index: int) -> Request:
    ids = IDS * 2 if rng.random() < 0.5 else [rng.randrange(9) for _ in range(200)]
    spans, at = [], rng.randrange(40)
    while at < 150:
        length = rng.randint(1, 45)
        digest = rng.choice(("aa", "ab"))
        spans.append(
            Span(
                kind="image",
                start=at,
                length=length,
                digest=digest,
                may_be_cut=rng.random() < 0.3,
            )
        )
        at += length + rng.choice((0, 1, rng.randrange(40)))
    return request_of(ids, *spans, index=index, max_tokens=rng.randint(1, 40))


@pytest.mark.parametrize(("num_stages", "ahead"), [(1, False), (1, True), (2, False), (3, True)])
@pytest.mark.parametrize("seed", range(60))
def test_no_border_cuts_a_span_that_must_stay_whole(
    seed: int, num_stages: int, ahead: bool
) -> None:
    """Over random budgets, caches that preempt, prefix hits, windows and drafts."""
    rng = random.Random(seed)
    budget = rng.randint(16, 90)
    window = rng.choice((None, 20))
    host = Host(
        budget,
        rng.choice((32, 45, 400)),
        window=window,
        k=rng.choice((0, 2)),
        num_stages=num_stages,
        runs_ahead=ahead,
    )
    requests = [drawn(rng, index) for index in range(8)]
    for request in [*requests, *(replace(r, index=r.index + 8) for r in requests)]:
        host.add(request)
        if rng.random() < 0.5:
            host.step()
    host.finish()
    ran = any(sequence.error is None for sequence in host.sequences)
    assert (host.most_in_flight > 1) == bool(ran and host.num_ahead)
    for sequence in host.sequences:
        longest = max((s.length for s in sequence.spans if not s.may_be_cut), default=0)
        error = sequence.error or ""
        assert ("max_num_batched_tokens" in error) == (longest > budget)
        assert not error or longest > budget or "memory_gib" in error


def test_uncut_spans_cost_no_token_with_a_step_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine on a device that works late, in freed cache that is poison, beside requests that
    decode: chunks leave spans whole, and answers are those of the engine that waits."""
    world = make_world(tmp_path, "dense")
    true_plan, chunks = Scheduler.plan, list[tuple[int, int]]()

    def plan(scheduler: Scheduler, scheduled: list[Scheduled]) -> StepPlan:
        for item in scheduled:
            if item.is_prefill:
                assert cut_span(item.sequence.spans, item.seq_len) is None
                chunks.append((item.num_computed, item.num_rows))
        return true_plan(scheduler, scheduled)

    monkeypatch.setattr(Scheduler, "plan", plan)
    for number in range(6):
        scenario = draw_scenario(world, seeded(number), k=2)
        scenario.config.engine.max_num_batched_tokens = 13
        scenario.cache_share = 1.0
        for request in scenario.requests:
            length = len(request.prompt_token_ids or ())
            if length > 16:
                request.spans = (replace(IMAGE, start=3, length=12),)
        speculator = stable_oracle(world, scenario)
        waiting, ahead = both_ways(scenario, world.target, speculator, monkeypatch)
        assert outputs(ahead) == outputs(waiting)
        found = {index: (ids, reason) for index, (ids, reason, _) in outputs(ahead).items()}
        assert found == dict(enumerate(scenario.expected))
    assert (3, 12) in chunks


def test_a_hit_ends_before_a_span_that_must_stay_whole() -> None:
    """Blocks of 8: of two equal prompts of 47 tokens the cache has 40, in the middle of a span."""
    for may_be_cut, num_cached in ((False, 32), (True, 40)):
        host = Host(64)
        image = Span(kind="image", start=34, length=13, digest="aa", may_be_cut=may_be_cut)
        for index in range(2):
            host.add(request_of(IDS[:47], image, index=index))
            host.finish()
        assert host.sequences[1].num_cached == num_cached


def test_the_same_ids_with_other_content_do_not_hit() -> None:
    host = Host(128)
    digests = ("aa", "ab", "aa")
    for index, digest in enumerate(digests):
        host.add(request_of(list(IDS), replace(IMAGE, digest=digest), index=index))
        host.finish()
    assert [sequence.num_cached for sequence in host.sequences] == [0, 16, 96]


def test_a_span_that_no_step_holds_is_its_requests_error_alone() -> None:
    host = Host(16)
    failed = host.add(request_of(list(IDS), IMAGE))
    fine = host.add(request_of(list(IDS), replace(IMAGE, may_be_cut=True), index=1))
    assert failed.error == (
        "the image at position 20 has 20 tokens, which are read in one step; "
        "engine.max_num_batched_tokens is 16: raise it to 20 or more"
    )
    host.finish()
    assert fine.finish_reason == "length"


def test_no_request_overtakes_a_span_that_waits_for_rows() -> None:
    """Decodes leave too few rows for the span; later requests would keep it so."""
    host = Host(21)
    for index in range(2):
        host.add(request_of(IDS[:5], index=index, max_tokens=9))
        host.step()
    waiting = host.add(request_of(list(IDS), replace(IMAGE, start=0), index=2))
    later = host.add(request_of(IDS[:5], index=3))
    while not waiting.num_computed:
        host.step()
        assert later.slot < 0
    host.finish()
    assert waiting.finish_reason == later.finish_reason == "length"


def test_a_running_prompt_that_waits_for_rows_lets_no_request_join() -> None:
    """Four slots: the third has read up to its span, and the fourth is free."""
    host = Host(21)
    for index in range(2):
        host.add(request_of(IDS[:5], index=index, max_tokens=9))
        host.step()
    waiting = host.add(request_of(list(IDS), IMAGE, index=2))
    while waiting.num_computed < IMAGE.start:
        host.step()
    later = host.add(request_of([7] * 5, index=3))
    host.step()
    assert (waiting.num_computed, later.slot) == (IMAGE.start, -1)
    host.finish()


def test_a_span_may_take_rows_that_are_withheld_from_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PromptRows, "most", lambda self, *given: 8)
    host = Host(64)
    host.add(request_of(list(IDS), IMAGE))
    assert [host.step()[0].num_rows for _ in range(5)] == [8, 8, 4, 20, 8]


@pytest.mark.parametrize("start", [0, 6])
def test_a_span_that_no_window_has_room_for_fails_where_it_is_reached(start: int) -> None:
    """Five blocks of 8 for a window of 8: enough for the prompt in small chunks."""
    host = Host(64, 6, window=8)
    host.scheduler.kv._groups[0].num_blocks = 40  # the layers without a window have room
    host.scheduler.kv.clear()
    image = Span(kind="image", start=start, length=48, digest="aa", may_be_cut=False)
    failed = host.add(request_of(list(IDS), image))
    fine = host.add(request_of([7] * 9, index=1))
    host.finish()
    assert "the KV cache is full" in (failed.error or "")
    assert fine.finish_reason == "length"


# ------------------------------------------------------------------ refusal


def test_a_span_without_an_encoder_is_refused() -> None:
    requests = [request_of([1, 2]), request_of(list(range(60)), IMAGE, index=1)]
    info = replace(make_info(vocab_size=64), engine="vllm")
    with pytest.raises(WorkloadError) as caught:
        tokenize(requests, None, info, "zoo:tiny")
    assert caught.value.request_id == "r1"
    assert str(caught.value) == (
        "request r1: spans[0].kind='image': engine=vllm has no encoder for it\n"
        "  allowed: text alone\n"
        "  to do: give the prompt without this span, as text or token ids alone"
    )

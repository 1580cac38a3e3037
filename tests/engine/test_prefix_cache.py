"""Prefix caching: random requests, cancellations and caches against a plain model of what must be
readable, and bugs that it must find.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from prefix_model import Model
from prefix_prompts import DRAFT, FULL, PROMPT, SLIDING, hit, served
from prefix_setting import VOCAB_SIZE, Setting

from hydraspec.engine.cache.block_pool import BlockPool
from hydraspec.engine.cache.kv_budget import ceil_div
from hydraspec.engine.cache.kv_cache import KVCache
from hydraspec.engine.cache.kv_group import KVGroup
from hydraspec.engine.cache.prefix import PrefixKeys, root_key
from hydraspec.engine.schedule.sequence import Scheduled

SIZES = st.sampled_from([16, 16, 32])
# No window is a multiple of a block; 18 and 34 see one token further than 17 and 33.
WINDOWS = st.sampled_from([None, None, 1, 7, 18, 34, 40])
TARGET_GROUPS = st.lists(st.tuples(SIZES, WINDOWS, st.just(0)), min_size=1, max_size=3)
DRAFT_GROUPS = st.lists(st.tuples(SIZES, WINDOWS, st.just(1)), max_size=2)
# Stages, and whether a step is scheduled ahead of results.
FLIGHTS = st.sampled_from([(1, False), (1, False), (1, True), (2, False), (2, True)])


@st.composite
def drawn_settings(draw: st.DrawFn) -> Setting:
    """Groups with blocks of 16 and 32 tokens, and caches from roomy to hardly large enough."""
    draft = draw(DRAFT_GROUPS)
    groups = (*draw(TARGET_GROUPS), *draft)
    most = draw(st.sampled_from([6, 7, 9, 12, 20, 40]))
    num_stages, runs_ahead = draw(FLIGHTS)
    return Setting(
        groups=groups,
        num_blocks=tuple(most * 16 // size + 1 for size, _, _ in groups),
        num_drafts=draw(st.integers(0 if not draft else 1, 4)),
        max_num_seqs=draw(st.integers(1, 5)),
        max_rows=draw(st.sampled_from([5, 16, 37, 64, 200])),
        max_len=draw(st.sampled_from([90, 150])),
        num_stages=num_stages,
        runs_ahead=runs_ahead,
    )


# Which earlier request, blocks in common (0: all), tokens beside that, what comes then, max_tokens.
Prompt = tuple[int, int, int, list[int], int]
PROMPTS: st.SearchStrategy[Prompt] = st.tuples(
    st.integers(0, 20),
    st.integers(0, 5),
    st.sampled_from([0, 0, 0, 1, 5, -1]),
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30),
    st.integers(1, 60),
)
RIGHT = st.lists(st.integers(0, 4), min_size=1, max_size=4)  # drafts, per request in turn
TIMES = st.integers(1, 12)


class PrefixCaching(RuleBasedStateMachine):
    """What people and devices do, in any order."""

    model: Model

    @initialize(setting=drawn_settings())
    def build(self, setting: Setting) -> None:
        self.model = Model(setting)

    @rule(asked=st.lists(PROMPTS, min_size=1, max_size=3), num_right=RIGHT, times=TIMES)
    def ask(self, asked: list[Prompt], num_right: list[int], times: int) -> None:
        """Requests that begin as earlier ones, often as far as a block's border, or with all of it:
        the next turn of a conversation."""
        known, limit = self.model.known, self.model.setting.max_len
        for source, length, off_border, end, max_tokens in asked:
            earlier = known[-1 - source % len(known)] if known else [1, 2] * limit
            count = max(0, 16 * length + off_border) if length else len(earlier)
            self.model.add([*earlier[: min(count, limit - 30)], *end], max_tokens)
        self.step(num_right, times)

    @rule(num_right=RIGHT, times=TIMES)
    def step(self, num_right: list[int], times: int) -> None:
        for turn in range(times):
            self.model.step(num_right[turn % len(num_right) :] + num_right)
            self.model.check_blocks()

    @precondition(lambda self: self.model.alive)
    @rule(place=st.integers(0, 1 << 16))
    def cancel(self, place: int) -> None:
        self.model.cancel(place % len(self.model.alive))

    @precondition(lambda self: len(self.model.known) > 20)
    @rule()
    def end_the_run(self) -> None:
        self.model.clear()

    @invariant()
    def blocks_add_up(self) -> None:
        if hasattr(self, "model"):
            self.model.check_blocks()


def drive(num_examples: int, num_rules: int, *phases: Phase) -> None:
    """So many engines, each with at most so many rules, the same each time."""
    run_state_machine_as_test(
        PrefixCaching,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_rules,
            phases=phases,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_random_requests_read_what_their_tokens_wrote() -> None:
    with Model.counting() as happened:
        drive(12, 20, Phase.generate, Phase.shrink)
    assert happened["steps"] >= 500
    assert happened["hits"] >= 25
    assert happened["evicted"] >= 30
    assert happened["preempted"] >= 5
    assert happened["read in the step that wrote it"] >= 5


@pytest.mark.slow
def test_20_000_steps_read_what_their_tokens_wrote() -> None:
    with Model.counting() as happened:
        drive(400, 50, Phase.generate, Phase.shrink)
    assert happened["steps"] >= 20_000
    assert happened["hits"] >= 500
    assert happened["evicted"] >= 500
    assert happened["preempted"] >= 100
    assert happened["read in the step that wrote it"] >= 100


def stale_draft_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft group's key lacks the token after the block."""
    key = PrefixKeys.key
    monkeypatch.setattr(PrefixKeys, "key", lambda keys, end, following: key(keys, end, 0))


def early_publication(monkeypatch: pytest.MonkeyPatch) -> None:
    """All known tokens count as computed."""

    publish = KVCache.publish

    def publish_all(kv: KVCache, slot: int, keys: PrefixKeys, num_final: int) -> None:
        publish(kv, slot, keys, len(keys.token_ids))

    monkeypatch.setattr(KVCache, "publish", publish_all)


def drop_per_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draft group gives up the last block of its hit."""
    longest_hit = KVGroup.longest_hit

    def shorter(group: KVGroup, keys: PrefixKeys, end: int, alignment: int) -> int:
        dropped = alignment * group.spec.num_following_tokens
        return max(0, longest_hit(group, keys, end, alignment) - dropped)

    monkeypatch.setattr(KVGroup, "longest_hit", shorter)


def window_one_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit leaves out the oldest token that its first query sees."""

    def shorter(group: KVGroup) -> int | None:
        window = group.spec.window
        return None if window is None else ceil_div(max(0, window - 2), group.spec.block_size)

    monkeypatch.setattr(KVGroup, "num_window_blocks", property(shorter))


def all_rows_of_a_step_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests take blocks that end with a newest row or a decoding request's in the same step."""
    monkeypatch.setattr(Scheduled, "num_shared", Scheduled.seq_len)


def unaligned_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit ends within a block of 32 tokens."""
    monkeypatch.setattr(KVCache, "alignment", 16)


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (stale_draft_kv, "was written by other tokens"),
        (early_publication, "has a key"),
        (window_one_short, "have no block"),
        (all_rows_of_a_step_are_shared, "is read in the pass that writes it"),
        (unaligned_hit, "was written by other tokens"),
        (drop_per_group, "a hit of"),
    ],
)
def test_planted_bugs_are_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], found: str
) -> None:
    """By what requests read and write alone, but for the bug that only costs hits."""
    plant(monkeypatch)
    monkeypatch.setattr(Model, "compares_hits", plant is drop_per_group)
    with pytest.raises(AssertionError, match=found):
        drive(50, 30, Phase.generate)


# ------------------------------------------------------------------ blocks


def test_empty_blocks_go_first_then_the_tails_of_what_was_used_longest_ago() -> None:
    pool = BlockPool(9)
    first, second = pool.take(3), pool.take(3)
    for block in first + second:
        pool.publish(block, b"%d" % block)
    pool.give_back(first)
    pool.give_back(second)
    unused = pool.take(2)
    assert pool.take(6) == first[::-1] + second[::-1]
    assert not set(unused) & {*first, *second}
    assert all(pool.find(b"%d" % block) is None for block in first + second)


def test_what_a_window_left_behind_goes_first_unless_it_was_shared() -> None:
    pool = BlockPool(7)
    ended, passed, shared = pool.take(2), pool.take(2), pool.take(2)
    for block in ended + passed + shared:
        pool.publish(block, b"%d" % block)
    pool.give_back(ended)
    pool.share(shared)
    pool.give_back(shared)
    pool.give_back(shared, passed=True)
    pool.give_back(passed, passed=True)
    assert pool.take(6) == passed[::-1] + ended[::-1] + shared[::-1]


def test_a_copy_in_use_takes_the_place_of_one_that_is_only_kept() -> None:
    """Otherwise the copy would be evicted as the old one, which nothing shows to be used."""
    pool = BlockPool(4)
    old, new = pool.take(2)
    pool.publish(old, b"key")
    pool.publish(new, b"key")
    assert pool.find(b"key") == old  # both are in use
    pool.give_back([old])
    pool.publish(new, b"key")
    assert pool.find(b"key") == new
    assert pool.empty.count(old) == 1
    pool.give_back([new])
    assert pool.num_free == 3


# ------------------------------------------------------------------ hits


@pytest.mark.parametrize("groups", [(FULL,), (SLIDING,), (SLIDING, FULL), (SLIDING, FULL, DRAFT)])
def test_a_hit_leaves_one_row_to_compute_and_loses_no_block_for_a_drafter(
    groups: tuple[tuple[int, int | None, int], ...],
) -> None:
    model = served(groups, PROMPT)
    assert hit(model, PROMPT) == 96
    assert hit(model, PROMPT[:97]) == 96
    assert hit(model, PROMPT[:96]) == 80
    assert hit(model, [*PROMPT[:70], *PROMPT]) == 64
    assert hit(model, [*PROMPT[:97], *PROMPT]) == 96
    assert hit(model, PROMPT[1:]) == 0


def test_prompts_that_part_at_a_border_share_draft_kv_up_to_the_block_before() -> None:
    """The draft row of the last common token has read the next one."""
    other = [*PROMPT[:64], 1 - PROMPT[64], *PROMPT]
    assert hit(served((FULL,), PROMPT), other) == 64
    assert hit(served((FULL, DRAFT), PROMPT), other) == 48


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_window_leaves_no_block_behind_before_it_can_be_found(runs_ahead: bool) -> None:
    """A step ahead of results the window moves over a whole chunk that has not arrived; prompts
    with a common beginning would then hit nothing."""
    model = served(((16, 18, 0), FULL), PROMPT, runs_ahead=runs_ahead)
    other = PROMPT[::-1]
    assert [hit(model, PROMPT[:count] + other) for count in (20, 50, 70)] == [16, 48, 64]


def test_rows_in_flight_that_are_certain_are_shared() -> None:
    """The second request is launched after the first one's chunk."""
    model = served((FULL, DRAFT), runs_ahead=True)
    model.add(list(PROMPT), 2)
    model.step([0])
    assert model.alive[0].num_computed == 0  # its first 64 rows are in flight
    model.add([*PROMPT[:70], *PROMPT], 2)
    model.step([0])
    assert [start for _, start in model.admissions] == [0, 64]


def test_a_hit_is_a_multiple_of_every_block_size() -> None:
    groups = ((16, None, 0), (32, 40, 0))
    model = served(groups, PROMPT)
    assert [hit(model, PROMPT[:count]) for count in (64, 65, 96, 97)] == [32, 64, 64, 96]


def test_a_view_of_the_target_s_groups_finds_nothing_after_the_engine_s_run() -> None:
    model = served((SLIDING, FULL, DRAFT), PROMPT)
    baseline = model.kv.leading(2)
    model.clear()
    assert baseline.find_prefix(baseline.keys_of(PROMPT), 99) == 0
    assert hit(model, PROMPT) == 0


def test_a_preempted_request_hits_its_own_blocks() -> None:
    setting = Setting(
        groups=(FULL,), num_blocks=(9,), num_drafts=0, max_num_seqs=2, max_rows=64, max_len=120
    )
    model = Model(setting)
    model.add(PROMPT[:60], 40)
    model.add(PROMPT[5:55], 40)
    young = model.alive[1]
    while model.alive:
        model.step([0])
    starts = [start for sequence, start in model.admissions if sequence is young]
    assert starts[0] == 0
    assert starts[-1] == 16  # the elder one has taken the rest, from the chain's end
    assert young.num_cached == 0  # of its prompt, when it was first admitted
    assert young.finish_reason == "length"


def test_without_prefix_caching_nothing_is_found_or_kept() -> None:
    model = served((FULL,))
    model.compares_hits = False
    model.kv._prefix_root = None
    model.kv.clear()
    for _ in range(2):
        model.add(list(PROMPT), 2)
        while model.alive:
            model.step([0])
    assert model.num_hits == 0
    assert len(model.groups[0].pool.empty) == 39


def test_keys_of_another_target_or_type_differ() -> None:
    roots = {root_key("a", "bfloat16"), root_key("a", "float16"), root_key("b", "bfloat16")}
    assert len({PrefixKeys(PROMPT, 16, root).key(16, 0) for root in roots}) == 3

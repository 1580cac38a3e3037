"""A plain model of the KV cache: which tokens wrote each cache row, and what requests may read.

It runs the scheduler's plans as a device would, in the order of launches, with a target whose next
token follows from all tokens before it, and raises AssertionError where a row is read that other
tokens wrote, or a block that others may read is written.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from caches import kv_cache, kv_group
from prefix_setting import VOCAB_SIZE, Histories, Setting

from hydraspec.engine.cache.kv_cache import KVCache
from hydraspec.engine.cache.kv_group import KVGroup
from hydraspec.engine.cache.prefix import PrefixKeys
from hydraspec.engine.finish import FinishCheck
from hydraspec.engine.schedule.scheduler import Scheduler
from hydraspec.engine.schedule.sequence import Scheduled, Sequence
from hydraspec.types import Request, SamplingParams

GARBAGE = -1  # of drafts, and of rows that were rejected
FEW_ROWS = 16  # of a request: a device may write and read them in one pass over all requests


class WatchedCache(KVCache):
    """Compares every search for a prefix with all that is there, and notes what is published."""

    model: Model

    def find_prefix(self, keys: PrefixKeys, most: int) -> int:
        found = super().find_prefix(keys, most)
        assert most < len(keys.token_ids)
        if self.model.compares_hits:
            longest = self.model.longest_prefix(keys.token_ids, most)
            assert found == longest, f"a hit of {found} tokens where {longest} are cached"
        self.model.num_hits += found > 0
        return found

    def allocate(self, slot: int, num_tokens: int) -> bool:
        before = [group.num_allocated[slot] for group in self.model.groups]
        found = super().allocate(slot, num_tokens)
        for g, group in enumerate(self.model.groups):
            new = group.rows[slot][before[g] : group.num_allocated[slot]]
            size = group.spec.block_size
            self.model.content[g].reshape(-1, size)[new] = GARBAGE
        return found

    def publish(self, slot: int, keys: PrefixKeys, num_final: int) -> None:
        before = [set(group.pool._key_of) for group in self.model.groups]
        super().publish(slot, keys, num_final)
        self.model.note_promises(slot, keys.token_ids, before)
        if self.model.compares_hits:
            self.model.check_published(slot, keys.token_ids, num_final)


@dataclass(slots=True)
class Flight:
    scheduled: list[Scheduled]
    sampled: list[list[int]]  # per request; the last is the bonus token


@dataclass(slots=True)
class Slot:
    """A request as the device knows it."""

    tokens: list[int]
    num_computed: int


class Model:
    """A scheduler with its cache, a device, and requests.

    Attributes:
        compares_hits: hits are to be the longest, too; if not, only what is read is checked.
    """

    compares_hits = True
    _happened: ClassVar[Counter[str]] = Counter()

    @classmethod
    @contextmanager
    def counting(cls) -> Iterator[Counter[str]]:
        """What all models do while it lasts: steps, hits, evicted blocks, preempted requests."""
        cls._happened = Counter()
        yield cls._happened

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.histories = Histories()
        specs = [
            kv_group(f"group{index}", (index,), size, window, num_following_tokens=following)
            for index, (size, window, following) in enumerate(setting.groups)
        ]
        lookahead = setting.num_lookahead
        max_tokens = setting.max_len + setting.num_drafts + lookahead + 1
        slots, kept = setting.max_num_seqs, {"kind": WatchedCache, "prefix_root": b"root"}
        self.kv = kv_cache(specs, setting.num_blocks, slots, max_tokens, **kept)
        self.kv.model = self
        self.groups: list[KVGroup] = self.kv._groups
        self.num_ahead = setting.num_stages - 1 + setting.runs_ahead
        num_stages = setting.num_stages
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.max_rows,
            max_model_len=setting.max_len,
            num_speculative_tokens=setting.num_drafts,
            num_lookahead_tokens=lookahead,
            num_micro_batches=num_stages,
            runs_ahead=setting.runs_ahead,
        )
        self.finish = FinishCheck([], setting.max_len, None)
        # Per group [num_blocks * block size]: the history that wrote each cache row.
        self.content = [
            np.full(count * size, GARBAGE)
            for count, (size, _, _) in zip(setting.num_blocks, setting.groups, strict=True)
        ]
        # The same of blocks whose keys are there before the step that fills them is launched.
        self.promised: dict[tuple[int, int], int] = {}
        # Per group and cache row, who writes it in this step: its place from 1 on, negative where
        # no other request may read the row in the same step.
        self.writers = [np.zeros_like(content) for content in self.content]
        self.num_checked: defaultdict[int, int] = defaultdict(int)  # published blocks, by owner
        self.slots: dict[int, Slot] = {}
        self.flights: deque[Flight] = deque()
        self.alive: list[Sequence] = []
        self.known: list[list[int]] = []  # tokens of all requests so far
        self.admissions: list[tuple[Sequence, int]] = []  # with the tokens that were cached
        self.num_hits = 0
        self.num_idle = 0  # steps in a row without any rows

    # ------------------------------------------------------------------ what a test does

    def add(self, tokens: list[int], max_tokens: int) -> None:
        """Offer a request; one that can never be served fails at once."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        index = len(self.known)
        request = Request(index=index, id="", sampling=sampling, prompt_token_ids=tokens)
        sequence = Sequence.of(request)
        self.known.append(sequence.token_ids)
        self.scheduler.add(sequence)
        if sequence.finish_reason is None:
            self.alive.append(sequence)
        self.scheduler.failed.clear()

    def cancel(self, place: int) -> None:
        """End a request with the next step, wherever it is then."""
        self.scheduler.cancel([self.alive[place].request.index])

    def step(self, num_right: Seq[int]) -> None:
        """One step of the engine; num_right[i]: drafts of its i-th request that are right."""
        hits, keys = self.num_hits, self._num_keys()
        scheduled = self.scheduler.schedule()
        self._happened.update(
            steps=1,
            hits=self.num_hits - hits,
            preempted=self.scheduler.take_num_preempted(),
            evicted=max(0, keys - self._num_keys()),
        )
        for sequence in self.scheduler.admitted:
            if sequence.slot >= 0:
                tokens = list(sequence.token_ids)
                self.admissions.append((sequence, sequence.num_computed))
                self.slots[sequence.slot] = Slot(tokens, sequence.num_computed)
        for writers in self.writers:
            writers[:] = 0
        if scheduled:
            tables = [table.dense() for table in self.scheduler.plan(scheduled).block_tables]
            sampled = [
                self._run(i, item, [table[i] for table in tables], num_right[i % len(num_right)])
                for i, item in enumerate(scheduled)
            ]
            self._check_promises()
            self.flights.append(Flight(scheduled, sampled))
            if self.num_ahead:
                self.scheduler.launched(scheduled)
        self._check_progress(bool(scheduled))
        if self.flights and not (scheduled and len(self.flights) <= self.num_ahead):
            self._collect(self.flights.popleft())
        for sequence in self.scheduler.failed:
            self.alive.remove(sequence)
        self.scheduler.failed.clear()

    def clear(self) -> None:
        """The run ends; the next one finds nothing cached."""
        self.scheduler.clear()
        self.flights.clear()
        self.promised.clear()
        self.alive.clear()
        self.known.clear()

    # ------------------------------------------------------------------ the device

    def _run(
        self, place: int, item: Scheduled, tables: list[np.ndarray], num_right: int
    ) -> list[int]:
        """Write and read what the rows of the step's request `place` do; returns the sampled
        tokens."""
        slot = self.slots[item.sequence.slot]
        start, end = slot.num_computed, slot.num_computed + item.num_rows
        truth = self._continuation(slot.tokens, item.num_drafts + 1) if item.samples else []
        right = min(num_right, item.num_drafts)
        wrong = [(token + 1) % VOCAB_SIZE for token in truth[right : item.num_drafts]]
        seen = [*slot.tokens, *truth[:right], *wrong]
        assert end <= len(seen)
        final = end - item.num_drafts + right  # rows that stay
        sampled = truth[: right + 1]
        slot.tokens += sampled
        for g, table in enumerate(tables):
            following = self.setting.groups[g][2]
            source = slot.tokens if following else seen
            history = self.histories.of(source)
            stays = final if following else end
            written = history[start + 1 + following : stays + 1 + following]
            assert len(written) == stays - start, "a following token is not known yet"
            lookahead = self.setting.num_lookahead if following and item.samples else 0
            beyond = np.full(max(end, final + lookahead) - stays, GARBAGE)
            values = np.concatenate((written, beyond))
            is_shared = item.is_prefill and item.num_rows > FEW_ROWS
            num_shared = is_shared * (
                len(written) - item.samples
            )  # the newest may be written twice
            writers = np.where(np.arange(len(values)) < num_shared, place + 1, -place - 1)
            self._write(g, table, start, values, writers)
            expected = self.histories.of(slot.tokens)[1 + following :]
            self._read(g, table, start, final, expected, place)
        slot.num_computed = final
        return sampled

    def _continuation(self, tokens: list[int], count: int) -> list[int]:
        found: list[int] = []
        for _ in range(count):
            found.append((sum(tokens[-5:]) + sum(found) + len(tokens)) % VOCAB_SIZE)
        return found

    def _rows(self, g: int, table: np.ndarray, first: int, end: int) -> np.ndarray:
        """Cache rows of positions first to end - 1."""
        positions = np.arange(first, end)
        size = self.setting.groups[g][0]
        blocks = table[positions // size]
        assert blocks.all(), f"group {g}: positions {first} to {end - 1} have no block: {blocks}"
        found: np.ndarray = blocks * size + positions % size
        return found

    def _write(
        self, g: int, table: np.ndarray, first: int, values: np.ndarray, writers: np.ndarray
    ) -> None:
        rows = self._rows(g, table, first, first + len(values))
        pool = self.groups[g].pool
        for block in set((rows // self.setting.groups[g][0]).tolist()):
            if (g, block) in self.promised:
                continue
            assert block not in pool._key_of, f"group {g}: block {block} is written, and has a key"
            assert pool._num_users[block] == 1, f"group {g}: block {block} is written and shared"
        self.content[g][rows] = values
        self.writers[g][rows] = writers

    def _read(
        self, g: int, table: np.ndarray, start: int, end: int, expected: np.ndarray, place: int
    ) -> None:
        """What the queries of rows start to end - 1 see."""
        window = self.setting.groups[g][1]
        first = 0 if window is None else max(0, start - window + 1)
        rows = self._rows(g, table, first, end)
        writers, content = self.writers[g][rows], self.content[g][rows]
        by_others = (writers != 0) & (abs(writers) != place + 1)
        in_one_pass = np.flatnonzero(by_others & (writers < 0))
        assert not len(in_one_pass), (
            f"group {g}: row {first + in_one_pass[0]} is read in the pass that writes it"
        )
        self._happened["read in the step that wrote it"] += bool(by_others.any())
        wrong = np.flatnonzero(content != expected[first:end])
        assert not len(wrong), f"group {g}: row {first + wrong[0]} was written by other tokens"

    def _collect(self, flight: Flight) -> None:
        """As Collector.collect."""
        for item, sampled in zip(flight.scheduled, flight.sampled, strict=True):
            sequence = item.sequence
            if sequence.finish_reason is not None:
                continue
            num_rejected = item.num_drafts - len(sampled) + 1 if sampled else 0
            sequence.num_computed += item.num_rows - num_rejected
            if self.finish.append(sequence, sampled):
                sequence.decoding = True
            self.scheduler.arrived(item)
            if sequence.finish_reason is not None:
                self.scheduler.release(sequence)
                self.alive.remove(sequence)

    def _num_keys(self) -> int:
        return sum(len(group.pool._key_of) for group in self.groups)

    # ------------------------------------------------------------------ what has to hold

    def _check_progress(self, has_rows: bool) -> None:
        self.num_idle = 0 if has_rows or not self.alive else self.num_idle + 1
        assert self.num_idle <= self.num_ahead + 1, "requests wait for ever"

    def longest_prefix(self, tokens: Seq[int], most: int) -> int:
        """The longest prefix that all groups have what its later tokens see of."""
        alignment = int(np.lcm.reduce([size for size, _, _ in self.setting.groups]))
        cached = [self._cached(g) for g in range(len(self.groups))]
        history = self.histories.of(tokens)
        for end in range(most - most % alignment, 0, -alignment):
            if all(self._has(g, history, end, cached[g]) for g in range(len(cached))):
                return end
        return 0

    def _cached(self, g: int) -> set[int]:
        """Histories up to the last rows of blocks that have keys."""
        size = self.setting.groups[g][0]
        lasts = [block * size + size - 1 for block in self.groups[g].pool._key_of]
        promised = {value for (group, _), value in self.promised.items() if group == g}
        return promised.union(self.content[g][lasts].tolist())

    def _has(self, g: int, history: np.ndarray, end: int, cached: set[int]) -> bool:
        size, window, following = self.setting.groups[g]
        first = 0 if window is None else max(0, end - window + 1)
        blocks = range(first // size, -(-end // size)) if first < end else range(0)
        return all(history[(block + 1) * size + following] in cached for block in blocks)

    def note_promises(self, slot: int, tokens: Seq[int], before: Seq[set[int]]) -> None:
        """Which of the slot's blocks that just got keys are still to be filled."""
        history = self.histories.of(tokens)
        for g, group in enumerate(self.groups):
            size, _, following = self.setting.groups[g]
            first, end = group.live[slot, 1:].tolist()
            for place, block in enumerate(group.rows[slot][first:end].tolist(), first):
                if block in group.pool._key_of and block not in before[g]:
                    value = int(history[(place + 1) * size + following])
                    if self.content[g][block * size + size - 1] != value:
                        self.promised[g, block] = value

    def _check_promises(self) -> None:
        """Blocks that had keys before the step was launched are filled once it was."""
        for (g, block), value in self.promised.items():
            last = block * self.setting.groups[g][0] + self.setting.groups[g][0] - 1
            assert self.content[g][last] == value, f"group {g}: block {block} has a key too early"
        self.promised.clear()

    def check_published(self, slot: int, tokens: Seq[int], num_final: int) -> None:
        """Every block that a hit may need can be found, right after it was published."""
        history = self.histories.of(tokens)
        alignment = int(np.lcm.reduce([size for size, _, _ in self.setting.groups]))
        for g, group in enumerate(self.groups):
            size, window, following = self.setting.groups[g]
            end = min(num_final, len(tokens) - following) // size
            checked, owner = self.num_checked, int(group.live[slot, 0])
            for block in range(max(checked[owner], group.first_live[slot]), end):
                border = -(-(block + 1) * size // alignment) * alignment
                if window is None or (block + 1) * size - 1 >= border - window + 1:
                    value = history[(block + 1) * size + following]
                    assert value in self._cached(g), f"group {g}: block {block} was not published"
            checked[owner] = max(checked[owner], end)

    def check_blocks(self) -> None:
        """No block is in two hands unless it is shared, and none is lost."""
        for group in self.groups:
            pool = group.pool
            users = [0] * group.num_blocks
            for slot in range(self.setting.max_num_seqs):
                _, first, end = group.live[slot].tolist()
                for block in group.rows[slot][first:end].tolist():
                    users[block] += 1
            assert users == pool._num_users
            free = [*pool.empty, *pool._passed, *pool._kept]
            assert sorted(free) == [b for b in range(1, group.num_blocks) if not users[b]]
            assert {block: key for key, block in pool._blocks.items()} == pool._key_of
            assert all(block in pool._key_of for block, count in enumerate(users) if count > 1)
            assert pool._key_of.keys() >= {*pool._passed, *pool._kept}
            assert not pool._key_of.keys() & set(pool.empty)
            assert pool._was_shared <= pool._key_of.keys()

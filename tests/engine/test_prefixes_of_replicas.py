"""Requests that share prefixes over replicas: each has its replica, and none waits for it."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

from records import request

from hydraspec.parallel.engines.prefixes import NUM_TOKENS, by_prefix
from hydraspec.parallel.engines.replicas import Share, SharedQueue
from hydraspec.types import Request


def requests_of(*prefixes: str, common: int = 0) -> list[Request]:
    """A request for each letter, of which equal ones share a prefix; ids are "<letter><n>"."""
    seen: Counter[str] = Counter()
    found = []
    for index, letter in enumerate(prefixes):
        seen[letter] += 1
        prompt = [7] * common + [ord(letter)] * NUM_TOKENS + [1000 + index]
        found.append(request(index, id=f"{letter}{seen[letter]}", prompt_token_ids=prompt))
    return found


def ids(lists: list[list[Request]]) -> list[str]:
    return [" ".join(request.id for request in part) for part in lists]


def test_a_prefix_belongs_to_one_replica_and_the_load_is_even() -> None:
    assert ids(by_prefix(requests_of(*"abcabcab"), 2)) == ["a1 c1 a2 c2 a3", "b1 b2 b3"]
    assert ids(by_prefix(requests_of(*"abab", common=200), 2)) == ["a1 a2", "b1 b2"]


def test_without_several_shared_prefixes_there_is_one_list() -> None:
    """Catches a prompt that all begin with (a system prompt) making one replica serve all."""
    for letters in ("abcd", "aaaa", "a", ""):
        requests = requests_of(*letters, common=200)
        assert by_prefix(requests, 2) == [requests]


class Counters:
    """What SharedQueue needs of the controls of two replicas."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def control(self, rank: int) -> Any:
        def add(name: str, amount: int) -> int:
            self.counts[name] += amount
            return self.counts[name]

        return SimpleNamespace(
            rank=rank,
            replica=[rank],
            layout=SimpleNamespace(data=2),
            add=add,
            watch=lambda: None,
            heard=lambda *_: [],
        )


def queues(requests: list[Request], concurrency: int | None, max_num_seqs: int = 4) -> Any:
    counters, share = Counters(), Share(name="run", concurrency=concurrency)
    return [
        SharedQueue(counters.control(rank), requests, share, max_num_seqs=max_num_seqs)
        for rank in (0, 1)
    ]


def test_a_replica_takes_its_prefixes_first_and_then_what_is_left() -> None:
    zero, one = queues(requests_of(*"abababaaaa"), None, max_num_seqs=2)
    assert [r.id for r in zero.joining(0)] == ["a1", "a2"]
    assert [r.id for r in one.joining(0)] == ["b1", "b2"]
    assert [r.id for r in one.joining(0)] == ["b3", "a3"], "it has room, and no request waits"
    assert [r.id for r in zero.joining(1)] == ["a4"]


def test_random_runs_take_each_request_once_within_the_limit() -> None:
    rng = random.Random(4)
    for _ in range(100):
        requests = requests_of(*(rng.choice("abcde") for _ in range(rng.randrange(1, 25))))
        limit = rng.choice([None, 1, 2, 5])
        both, running, taken = queues(requests, limit), [[], []], Counter[int]()
        for _ in range(1000):
            number = rng.randrange(2)
            # The last wait of a replica ends when all are taken; a test cannot wait for the other.
            mine = both[number]._taken(len(running[number]))
            taken.update(r.index for r in mine)
            running[number] += mine
            assert limit is None or len(running[0]) + len(running[1]) <= limit
            if running[number] and rng.random() < 0.7:
                both[number].ended(running[number].pop().index)
        assert taken == Counter(range(len(requests)))

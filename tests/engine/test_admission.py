"""When requests join: in the order in which they arrive, at most so many unfinished, and without
one the engine sleeps."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from hydraspec.engine.schedule.admission import LONGEST_SLEEP_S, Arrivals, Pending
from hydraspec.types import Request, SamplingParams


class FakeClock:
    """Time that passes in sleeps and where a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


def requests_at(times: Sequence[float | None]) -> list[Request]:
    return [
        Request(index=i, id=str(i), sampling=SamplingParams(), prompt_token_ids=[1], arrival_s=at)
        for i, at in enumerate(times)
    ]


def pending(
    times: Sequence[float | None],
    clock: FakeClock,
    concurrency: int | None = None,
    watch: Callable[[], None] = lambda: None,
) -> Pending:
    arrivals = Arrivals(clock, clock.sleep)
    return Pending(requests_at(times), concurrency, watch=watch, arrivals=arrivals)


def joined(admission: Pending, num_unfinished: int) -> list[int] | None:
    found = admission.joining(num_unfinished)
    return None if found is None else [request.index for request in found]


def test_requests_join_when_their_time_has_come() -> None:
    clock = FakeClock()
    admission = pending([0.5, 0.6, 2.0], clock)
    assert joined(admission, 0) == [0], "it waits for the first"
    assert clock.now == pytest.approx(1000.5)
    assert joined(admission, 1) == [], "with an unfinished one it does not wait"
    clock.now += 0.2
    assert joined(admission, 1) == [1]
    assert joined(admission, 0) == [2]
    assert clock.now == pytest.approx(1002.0)
    assert joined(admission, 1) == []
    assert joined(admission, 0) is None


def test_an_idle_engine_sleeps_and_looks_at_the_other_ranks() -> None:
    """Neither a loop that polls nor a sleep of minutes in which a lost rank goes unnoticed."""
    clock, looks = FakeClock(), []
    admission = pending([10.0], clock, watch=lambda: looks.append(clock.now))
    assert joined(admission, 0) == [0]
    assert max(clock.sleeps) <= LONGEST_SLEEP_S
    assert len(clock.sleeps) <= 10.0 / LONGEST_SLEEP_S + 2
    assert len(looks) == len(clock.sleeps)


def test_what_the_watch_finds_ends_the_wait() -> None:
    def lost() -> None:
        raise RuntimeError("rank 1 is lost")

    with pytest.raises(RuntimeError, match="rank 1"):
        joined(pending([10.0], FakeClock(), watch=lost), 0)


def test_all_join_at_once_without_arrivals() -> None:
    clock = FakeClock()
    admission = pending([None] * 3, clock)
    assert joined(admission, 0) == [0, 1, 2]
    assert not clock.sleeps
    assert admission.offered_at(requests_at([None])[0]) is None


def test_the_limit_holds_arrived_requests_back_and_counts_from_arrival() -> None:
    """Time in the queue in front of the limit is a request's own: its arrival is when it was
    offered."""
    clock = FakeClock()
    admission = pending([0.1, 0.2, 0.3, 9.0], clock, concurrency=2)
    assert joined(admission, 0) == [0]
    clock.now += 1.0
    assert joined(admission, 1) == [1], "two at a time"
    assert joined(admission, 2) == []
    clock.now += 1.0
    found = admission.joining(1)
    assert found is not None
    assert [request.index for request in found] == [2]
    assert admission.offered_at(found[0]) == pytest.approx(1000.3)


def test_the_order_is_that_of_arrival() -> None:
    clock = FakeClock()
    admission = pending([3.0, 1.0, None, 1.0], clock)
    order = []
    while (found := joined(admission, 0)) is not None:
        order += found
    assert order == [2, 1, 3, 0]


def test_a_conversation_arrives_once_and_its_turns_do_not_wait_for_other_arrivals() -> None:
    """The next turn takes the place of the one before it, also where others have arrived; it has no
    time of arrival of its own."""
    clock = FakeClock()
    first, other, late = requests_at([0.0, 0.1, 50.0])
    turn = replace(first, index=3, after=0, arrival_s=None)
    arrivals = Arrivals(clock, clock.sleep)
    admission = Pending([first, turn, other, late], 1, arrivals=arrivals)
    assert joined(admission, 0) == [0]
    clock.now += 1.0
    assert joined(admission, 1) == []
    admission.ended(0)
    assert joined(admission, 0) == [3], "before the request that has arrived meanwhile"
    assert admission.offered_at(turn) is None, "it was offered as the answer before it came"
    admission.ended(3)
    assert joined(admission, 0) == [1]
    assert not clock.sleeps


def test_random_runs_lose_no_request_and_keep_the_limit() -> None:
    """Each request joins once, not before its time, and none waits while there is room."""
    rng = random.Random(0)
    for _ in range(50):
        clock = FakeClock()
        times = [rng.uniform(0, 5) for _ in range(20)]
        limit = rng.choice([None, 1, 3, 7])
        admission, unfinished, seen = pending(times, clock, limit), 0, []
        while (found := admission.joining(unfinished)) is not None:
            for request in found:
                offered = admission.offered_at(request)
                assert offered is not None
                assert offered <= clock.now
            seen += [request.index for request in found]
            unfinished += len(found)
            assert limit is None or unfinished <= limit
            waiting = [i for i, at in enumerate(times) if i not in seen and at + 1000 < clock.now]
            assert not waiting or unfinished == limit
            clock.now += rng.uniform(0, 0.5)
            unfinished -= rng.randint(0, unfinished)
        assert sorted(seen) == list(range(20))
        assert seen == sorted(seen, key=times.__getitem__)

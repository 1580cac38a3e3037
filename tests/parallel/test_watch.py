"""What a rank records of its own failure, and how it learns of another's while it waits."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from hydraspec.errors import ConfigurationError
from hydraspec.parallel import watch as watching
from hydraspec.parallel.board import Board
from hydraspec.parallel.faults import Kind, LostRankError, culprit, of_exit
from hydraspec.parallel.group import LostPeerError
from hydraspec.parallel.progress import Judge, Signs, State
from hydraspec.parallel.watch import Watch


@pytest.fixture
def board() -> Board:
    return Board(dist.HashStore(), 2)


def test_the_first_failure_of_a_rank_is_kept(board: Board) -> None:
    watch = Watch(1, 2, board=board)
    with pytest.raises(ZeroDivisionError), watch.step():
        raise ZeroDivisionError("in a head")
    watch.record(RuntimeError("a later one"))
    (fault,) = board.faults()
    assert (fault.kind, fault.step) == (Kind.error, 1)
    assert str(fault) == "rank 1 of 2 failed in step 1: ZeroDivisionError: in a head"


def test_lost_contact_is_no_culprit(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a survivor being named because it noticed first."""
    monkeypatch.setattr(watching, "NAMING_S", 0.1)
    watch = Watch(0, 2, board=board)
    with pytest.raises(LostRankError, match="rank 0 of 2 lost contact"), watch.naming_the_lost():
        raise RuntimeError("Connection reset by peer")
    board.add(of_exit(1, 2, 5, -9))
    first = culprit(board.faults())
    assert first is not None
    assert str(first).startswith("rank 1 of 2 was killed by SIGKILL in step 5")
    with pytest.raises(LostRankError, match="rank 1 of 2 was killed"), watch.naming_the_lost():
        raise RuntimeError("Connection reset by peer")


def test_a_lost_parent_is_named(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the lost connection to a rank that ended for the same reason being named."""
    monkeypatch.setattr(watching, "LOOK_EVERY_S", 0.05)

    def look() -> None:
        raise ProcessLookupError("the process that started the ranks is gone")

    watch = Watch(0, 2, board=board, each_look=look)
    told = pytest.raises(LostRankError, match="the process that started the ranks is gone")
    with watch.watching(), told, watch.naming_the_lost():
        raise RuntimeError("Connection closed by peer")


class LostStore:
    """A store whose process is gone."""

    def append(self, key: str, value: str, /) -> None:
        raise dist.DistNetworkError("Broken pipe")

    set = append

    def get(self, key: str, /) -> bytes:
        raise dist.DistNetworkError("Broken pipe")

    def check(self, keys: list[str], /) -> bool:
        raise dist.DistNetworkError("Broken pipe")


def test_a_lost_store_is_no_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a broken pipe being told where the parent of the ranks was killed."""
    monkeypatch.setattr(watching, "NAMING_S", 0.1)
    watch = Watch(0, 2, board=Board(LostStore(), 2))
    watch.record(ValueError("the last one"))
    named = watch.named(dist.DistNetworkError("Broken pipe"))
    assert isinstance(named, LostRankError)
    assert str(named).startswith("rank 0 of 2 lost contact")
    assert watch.named(mistake := ValueError()) is mistake


def test_a_mistake_keeps_its_exit_status(board: Board) -> None:
    watch = Watch(0, 2, board=board)
    watch.record(ConfigurationError("parallelism.tensor=3 does not divide"))
    (fault,) = board.faults()
    assert (fault.kind, fault.exit_code) == (Kind.mistake, 2)
    assert fault.why == "parallelism.tensor=3 does not divide"


def test_a_device_that_waited_in_vain_names_the_other_rank(board: Board) -> None:
    """Catches the rank whose device noticed being ended, and not the one that stands still."""
    Watch(0, 2, board=board).record(LostPeerError(1, 10.0))
    (fault,) = board.faults()
    assert (fault.kind, fault.rank) == (Kind.hung, 1)


class BusyEvent:
    """Of a device that never gets there."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise AssertionError("would wait for ever")


class Unfinished:
    """A collective of which a rank is missing."""

    def wait(self, timeout: timedelta) -> bool:
        time.sleep(0.02)
        raise RuntimeError(watching.STILL_WAITING)


@pytest.mark.parametrize("wait", ["device", "collective"])
def test_waits_end_when_a_rank_is_lost(
    board: Board, monkeypatch: pytest.MonkeyPatch, wait: str
) -> None:
    monkeypatch.setattr(watching, "LOOK_EVERY_S", 0.05)
    watch = Watch(0, 2, board=board)
    with watch.watching():
        board.add(of_exit(1, 2, 3, 7))
        waits = {
            "device": lambda: watch.wait_for_device(BusyEvent()),
            "collective": lambda: watch.finish(Unfinished()),
        }
        with pytest.raises(LostRankError, match="rank 1 of 2 ended with exit status 7 in step 3"):
            waits[wait]()


def test_one_rank_alone_waits_as_ever() -> None:
    class Done(BusyEvent):
        waited = False

        def synchronize(self) -> None:
            self.waited = True

    event = Done()
    watching.ALONE.wait_for_device(event)
    assert event.waited


def test_the_judge_names_who_computes_and_not_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    judge = Judge(3, timeout_s=15.0)
    for tick in range(40):
        now[0] += 0.5
        ranks = {
            0: Signs(tick, 9, 4, State.waiting),
            1: Signs(tick, 9, 4, State.busy),
            2: Signs(tick, tick, 7, State.busy),
        }
        if fault := judge.look(ranks):
            break
    assert fault is not None
    assert (fault.rank, fault.step) == (1, 4)
    assert 15 < now[0] - 100 < 17


def test_a_judge_that_was_stopped_itself_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches Ctrl-Z and fg, after which every rank would look hung."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    judge = Judge(1, timeout_s=15.0)
    row = {0: Signs(1, 1, 1, State.busy)}
    assert judge.look(row) is None
    now[0] += 60
    assert judge.look(row) is None
    now[0] += 1
    assert judge.look(row) is None


def test_ranks_outside_a_step_may_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches loading, a report or a pause between two runs being taken for a hang."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    judge = Judge(1, timeout_s=15.0)
    for tick in range(100):
        now[0] += 1
        assert judge.look({0: Signs(tick, 9, 4, State.idle)}) is None


@pytest.mark.parametrize(
    ("is_stopped", "steps", "found_after"), [(False, 0, 60), (True, 0, 10), (False, 1, 10)]
)
def test_a_rank_may_be_silent_while_it_imports(
    monkeypatch: pytest.MonkeyPatch, is_stopped: bool, steps: int, found_after: int
) -> None:
    """Catches a cold import of torch, in which no thread runs, being taken for a stopped process,
    and one that is stopped being waited for as long."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    judge = Judge(2, timeout_s=15.0, is_stopped=lambda rank: is_stopped)
    for waited in range(100):
        now[0] = 100.0 + waited
        ticks = {0: Signs(waited, 1, steps, State.idle), 1: Signs(1, 1, steps, State.idle)}
        if fault := judge.look(ticks):
            break
    assert fault is not None
    assert fault.rank == 1
    assert waited == found_after + 1
    assert fault.what == f"gave no sign of life for {found_after} s"

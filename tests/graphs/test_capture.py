"""How `CudaGraphBackend` drives torch.cuda, against a stand-in that keeps a diary.

What the diary must show: everything on the capture stream, one pool a manager, every piece replayed
before the eager call after it, and a failure that leaves nothing open.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hydraspec_kernels.runtime import breaks

from hydraspec.graphs import CudaGraphBackend


class Diary:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.num_graphs = 0
        self.num_pools = 0

    def __call__(self, line: str) -> None:
        self.lines.append(line)


class FakeStream:
    def __init__(self, name: str, diary: Diary) -> None:
        self.name, self._diary = name, diary

    def wait_stream(self, other: FakeStream) -> None:
        self._diary(f"{self.name} waits for {other.name}")


@pytest.fixture
def diary(monkeypatch: pytest.MonkeyPatch) -> Diary:
    diary = Diary()

    class Graph:
        def __init__(self) -> None:
            diary.num_graphs += 1
            self.name = diary.num_graphs

        def capture_begin(self, *, pool: str, capture_error_mode: str) -> None:
            assert capture_error_mode == "thread_local"
            diary(f"begin {self.name} in {pool}")

        def capture_end(self) -> None:
            diary(f"end {self.name}")

        def replay(self) -> None:
            diary(f"replay {self.name}")

    @contextmanager
    def on(stream: FakeStream) -> Any:
        diary(f"on {stream.name}")
        yield
        diary(f"off {stream.name}")

    def new_pool() -> str:
        diary.num_pools += 1
        return f"pool {diary.num_pools}"

    fakes = {
        "CUDAGraph": Graph,
        "Stream": lambda device: FakeStream("side", diary),
        "current_stream": lambda device: FakeStream("main", diary),
        "stream": on,
        "graph_pool_handle": new_pool,
        "memory_reserved": lambda device: 100 * diary.num_graphs,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return diary


def make_backend() -> CudaGraphBackend:
    return CudaGraphBackend(torch.device("cuda"))


def test_a_whole_call_is_one_graph(diary: Diary) -> None:
    backend = make_backend()
    out, graph = backend.capture(
        lambda: breaks.run(lambda: torch.ones(1)), in_pieces=False, pool="step"
    )
    graph.replay()
    assert out.tolist() == [1]
    assert diary.lines == [
        "side waits for main",
        "on side",
        "begin 1 in pool 1",
        "end 1",
        "replay 1",
        "off side",
        "main waits for side",
        "replay 1",
    ]
    assert backend.num_bytes() == 100


def test_pieces_replay_before_the_calls_after_them(diary: Diary) -> None:
    backend = make_backend()

    def attend(name: str) -> torch.Tensor:
        diary(f"{name}, capturing={backend.is_capturing}")
        return torch.ones(1)

    def run() -> torch.Tensor:
        return breaks.run(attend, "first") + breaks.run(attend, "second")

    _, graph = backend.capture(run, in_pieces=True, pool="step")
    assert diary.lines[2:-2] == [
        "begin 1 in pool 1",
        "end 1",
        "replay 1",
        "first, capturing=True",
        "begin 2 in pool 1",
        "end 2",
        "replay 2",
        "second, capturing=True",
        "begin 3 in pool 1",
        "end 3",
        "replay 3",
    ]
    diary.lines.clear()
    graph.replay()
    assert diary.lines == [
        "replay 1",
        "first, capturing=False",
        "replay 2",
        "second, capturing=False",
        "replay 3",
    ]


def test_managers_do_not_share_memory(diary: Diary) -> None:
    """A draft graph is replayed between the pieces of a step: it must not write what they hold."""
    backend = make_backend()
    for pool in ("step", "draft", "step"):
        backend.capture(lambda: None, in_pieces=False, pool=pool)
    begun = [line for line in diary.lines if line.startswith("begin")]
    assert begun == ["begin 1 in pool 1", "begin 2 in pool 2", "begin 3 in pool 1"]


@pytest.mark.parametrize("at_a_break", [False, True])
def test_a_failure_leaves_nothing_open(diary: Diary, at_a_break: bool) -> None:
    backend = make_backend()

    def fail() -> torch.Tensor:
        assert not gc.isenabled(), "a collection may free memory of another stream"
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        backend.capture(
            (lambda: breaks.run(fail)) if at_a_break else fail, in_pieces=True, pool="step"
        )
    assert sum(line.startswith("begin") for line in diary.lines) == 1
    assert sum(line.startswith("end") for line in diary.lines) == 1
    assert not backend.is_capturing
    assert gc.isenabled()
    assert breaks.run(lambda: 3) == 3, "the recorder is gone"
    assert backend.capture(lambda: 5, in_pieces=False, pool="step")[0] == 5


def test_warm_up_runs_aside_and_serves_no_graph(diary: Diary) -> None:
    backend = make_backend()
    backend.warm_up(lambda: diary(f"run, capturing={backend.is_capturing}"))
    assert diary.lines == [
        "side waits for main",
        "on side",
        "run, capturing=True",
        "off side",
        "main waits for side",
    ]

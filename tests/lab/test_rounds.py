"""The rounds of a measurement: their parts of the workload, what is built in them, and Ctrl-C."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Behaviour, FakeEngine
from records import json_lines, request

import hydraspec
from hydraspec.lab import recorder
from hydraspec.lab.rounds import Measurement, _num_rounds, _parts
from hydraspec.metrics.sinks import Side
from hydraspec.types import Request

Use = Callable[[FakeEngine], FakeEngine]
Run = Callable[[], dict[str, Any]]
NOTHING = {"kernels": 0, "graphs": 0}
NUM_REQUESTS = 8
STEPS_OF_ROUND_2 = 3  # the interrupt comes after so many


def conversations(*lengths: int) -> list[Request]:
    turns = [turn for length in lengths for turn in range(length)]
    return [
        request(i, after=i - 1 if turn else None, turn=turn + 1) for i, turn in enumerate(turns)
    ]


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ((1, 1, 1, 1, 1), [2, 3]),
        ((1,), [1]),
        ((8,), [8]),
        ((3, 3), [3, 3]),
        ((2, 3, 2), [2, 5]),
        ((1, 6), [1, 6]),
        ((4, 1, 1), [4, 2]),
    ],
)
def test_conversations_stay_whole(lengths: tuple[int, ...], sizes: list[int]) -> None:
    requests = conversations(*lengths)
    parts = [list(part) for part in _parts(requests, 2)]
    assert [len(part) for part in parts] == sizes
    assert [r for part in parts for r in part] == requests
    assert all(part[0].after is None for part in parts)


@pytest.mark.parametrize("concurrency", [2, None])
def test_engines_learn_how_many_requests_run_at_once(
    concurrency: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before they measure or capture anything for more."""
    told: list[tuple[int, int | None]] = []

    def prepare(engine: FakeEngine, requests: list[Request], *, concurrency: int | None) -> None:
        told.append((len(requests), concurrency))

    monkeypatch.setattr(FakeEngine, "prepare", prepare)
    requests = conversations(1, 1, 1)
    engine = FakeEngine()
    engine.tokenize(requests)
    Measurement({Side.method: engine}, requests, [], concurrency=concurrency).warm_up()
    assert told == [(3, concurrency)]


def test_builds_of_the_warm_up_are_not_counted(use_engine: Use, run_config: Run) -> None:
    use_engine(FakeEngine(Behaviour(builds_at_step=0)))
    summary = run_config()
    assert summary["built_in_rounds"] == summary["baseline"]["built_in_rounds"] == NOTHING
    assert not [warning for warning in summary["warnings"] if "measured rounds" in warning]


@pytest.mark.parametrize("share", [0.4, 0.9], ids=["round 1", "round 2"])
def test_a_capture_in_a_measured_round_is_warned_of(
    use_engine: Use, run_config: Run, share: float
) -> None:
    """The bug: a way of sampling or a batch size whose graph is captured when it is first met."""
    engine = use_engine(FakeEngine())
    run_config()
    use_engine(FakeEngine(Behaviour(builds_at_step=int(share * engine.num_steps))))
    summary = run_config()
    assert summary["built_in_rounds"] == {"kernels": 1, "graphs": 1}
    assert summary["baseline"]["built_in_rounds"] == NOTHING
    (warning,) = [w for w in summary["warnings"] if "measured rounds" in w]
    assert warning.startswith("1 kernels were compiled and 1 graphs captured")


def test_a_warm_up_goes_on_while_kernels_are_compiled(use_engine: Use, run_config: Run) -> None:
    """Without graphs a step's kernels depend on its rows, and more of them are met by whole
    requests than by a few tokens. What an endless compiler builds is reported, not waited for."""
    quiet = use_engine(FakeEngine())
    run_config()
    once = use_engine(FakeEngine(Behaviour(builds_at_step=0)))
    run_config()
    eager = use_engine(FakeEngine(Behaviour(is_eager=True)))
    run_config()
    assert once.num_steps == eager.num_steps > quiet.num_steps
    always = use_engine(FakeEngine(Behaviour(builds_always=True)))
    assert run_config()["built_in_rounds"]["kernels"] > 0
    assert always.num_steps > once.num_steps


@pytest.mark.parametrize(
    ("side", "runs_ahead"), [(Side.method, "true"), (Side.baseline, "false")], ids=str
)
def test_an_interrupt_in_round_2_keeps_both_sides_of_round_1(
    side: Side, runs_ahead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a verdict, a speedup or a baseline that is lost with the round that was cut, and an
    engine that cannot judge because its run was closed in the middle.
    """

    class Interrupting(recorder.ConsoleSink):
        where: tuple[Side, int] = (Side.method, 0)
        num_steps = 0

        def on_round(self, side, number, num_rounds):  # type: ignore[no-untyped-def]
            self.where = (side, number)

        def on_step(self, side_of_step, record, meter):  # type: ignore[no-untyped-def]
            self.num_steps += self.where == (side, 2)
            if self.num_steps == STEPS_OF_ROUND_2:
                raise KeyboardInterrupt

    monkeypatch.setattr(recorder, "ConsoleSink", Interrupting)
    typed = [f"workload.limit={NUM_REQUESTS}", f"engine.async_scheduling={runs_ahead}"]
    with pytest.raises(KeyboardInterrupt):
        hydraspec.run([*typed, "tracker=none", f"hydra.run.dir={tmp_path}"], quiet=True)
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    baseline, lossless = summary["baseline"], summary["lossless"]
    assert summary["status"] == "interrupted"
    finished_by_method = NUM_REQUESTS // (2 if side is Side.method else 1)
    assert (summary["num_requests"], baseline["num_requests"]) == (finished_by_method, 4)
    assert (lossless["verdict"], lossless["num_requests_checked"]) == ("identical", 4)
    assert summary["speedup"]["mean"] > 0
    assert baseline["output_tokens_per_second"] > 0
    assert baseline["accuracy"]["num_scored"] == 4
    assert len(json_lines(tmp_path / "requests.jsonl")) == finished_by_method


@pytest.mark.parametrize(
    ("num_requests", "concurrency", "num_rounds"),
    [
        pytest.param(64, 4, 8, id="the default run"),
        pytest.param(63, 4, 7, id="a turnover less"),
        pytest.param(16, 4, 2, id="few turnovers"),
        pytest.param(1000, None, 2, id="all at once"),
        pytest.param(1000, 1, 8, id="one at a time"),
    ],
)
def test_a_long_workload_has_more_rounds(
    num_requests: int, concurrency: int | None, num_rounds: int
) -> None:
    """Catches rounds in which as many requests as asked for never run at once."""
    assert _num_rounds(num_requests, concurrency) == num_rounds

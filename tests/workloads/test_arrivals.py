"""Times of arrival: their distribution, seeds, and runs of the tiny target with them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine
from records import json_lines, request
from scipy import stats

import hydraspec
from hydraspec.config.schema import RunConfig
from hydraspec.types import Request
from hydraspec.workloads.arrivals import ArrivalProcess


def process(rate: float | None = 4.0, burstiness: float = 1.0, seed: int = 0) -> ArrivalProcess:
    return ArrivalProcess(rate=rate, burstiness=burstiness, seed=seed)


def gaps(process: ArrivalProcess, count: int) -> np.ndarray:
    return np.diff(process.times(count, 1), prepend=0.0)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 6.0])
def test_gaps_are_gamma_with_the_mean_of_the_rate(burstiness: float) -> None:
    """Kolmogorov-Smirnov over 20,000 gaps, which finds a shape that is 15 % off, as the
    planted one is. Catches shape and scale exchanged, and a rate used as a scale."""
    found = gaps(process(8.0, burstiness), 20_000)
    assert found.mean() == pytest.approx(1 / 8, rel=1e-9)
    right = stats.gamma(burstiness, scale=1 / (8 * burstiness))
    assert stats.kstest(found, right.cdf).pvalue > 0.001
    planted = stats.gamma(1.15 * burstiness, scale=1 / (8 * 1.15 * burstiness))
    assert stats.kstest(found, planted.cdf).pvalue < 0.001


def test_arrivals_of_a_poisson_process_are_uniform_and_independent() -> None:
    """Given its length; gaps do not depend on the gaps before them."""
    times = process().times(5_001, 1)
    assert stats.kstest(times[:-1] / times[-1], "uniform").pvalue > 0.001
    found = np.diff(times)
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 4 / math.sqrt(found.size)


def test_the_last_request_arrives_after_count_over_rate_seconds() -> None:
    for seed in range(5):
        times = process(2.5, 0.5, seed).times(40, 2)
        assert times[-1] == pytest.approx(16.0)
        assert (np.diff(times) >= 0).all()
        assert times[0] >= 0


def test_a_seed_gives_the_same_times_and_rounds_differ() -> None:
    assert (process(seed=3).times(9, 1) == process(seed=3).times(9, 1)).all()
    assert (process(seed=3).times(9, 1) != process(seed=4).times(9, 1)).any()
    assert (process(seed=3).times(9, 1) != process(seed=3).times(9, 2)).any()


@pytest.mark.parametrize("burstiness", [1e-300, 1e300])
def test_extreme_shapes_give_finite_times_in_order(burstiness: float) -> None:
    times = process(1.0, burstiness).times(16, 1)
    assert np.isfinite(times).all()
    assert (np.diff(times) >= 0).all()


def requests(count: int) -> list[Request]:
    return [request(i) for i in range(count)]


def test_requests_keep_their_order_and_the_workload_is_not_changed() -> None:
    given = requests(6)
    found = process().offered(given, 1)
    times = [request.arrival_s for request in found]
    assert [request.index for request in found] == list(range(6))
    assert times == sorted(times, key=lambda at: at or 0.0)
    assert None not in times
    assert all(request.arrival_s is None for request in given)
    assert process(None).offered(given, 1) is given


def test_of_a_conversation_the_first_turn_arrives() -> None:
    """The rate is one of conversations: later turns would dilute it."""
    given = requests(6)
    for turn in (1, 2, 4):
        given[turn].after = turn - 1
    found = process(10.0).offered(given, 1)
    times = [request.arrival_s for request in found if request.after is None]
    assert times == process(10.0).times(3, 1).tolist()
    assert [r.arrival_s for r in found if r.after is not None] == [None] * 3


def test_only_a_rate_that_takes_days_is_warned_of() -> None:
    assert not process(None).warnings(10**6, 2)
    assert not process(1.0).warnings(3600, 2)
    (warning,) = process(0.001).warnings(864, 2)
    assert "20.0 days" in warning
    assert "workload.request_rate=0.001" in warning


SMALL = ["tracker=none", "workload.limit=4", "sampling.max_tokens=12", "sampling.ignore_eos=true"]


def test_a_run_with_arrivals_waits_for_them_and_decodes_the_same(tmp_path: Path) -> None:
    """2 requests in each of 2 rounds, a side's arrivals within 0.2 s a round. Idle time is in the
    wall time and not in that of steps."""
    load = ["workload.request_rate=10", "workload.goodput.inter_token_ms=60000"]
    found = hydraspec.run([*SMALL, *load, f"hydra.run.dir={tmp_path}"], quiet=True)
    assert found["lossless"]["verdict"] == "identical"
    assert found["request_rate"] == 10
    for side in (found, found["baseline"]):
        assert side["goodput"]["share"] == 1.0
        duration = 4 / side["goodput"]["requests_per_second"]
        assert duration > 0.4, "the last request of each round arrives after 0.2 s"
        assert side["total_step_time_s"] < duration
        assert all(value > 0 for known in side["latency_ms"].values() for value in known.values())
    for row in json_lines(tmp_path / "requests.jsonl"):
        assert 0 < row["queue_ms"] < row["ttft_ms"] < row["latency_ms"]
        assert 0 < row["inter_token_ms"]["p50"] <= row["inter_token_ms"]["p99"]


def test_method_and_baseline_are_offered_the_same_at_the_same_times(
    config: RunConfig,
    use_engine: Callable[[FakeEngine], FakeEngine],
    run_config: Callable[[], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two rounds of each side; the warm-up has no arrivals. A fake engine waits for none, so that
    the rate, which is warned of, may be one in eleven days."""
    offered: dict[bool, list[list[tuple[int, float | None]]]] = {False: [], True: []}
    run = FakeEngine.run

    def noted(self: FakeEngine, requests: Sequence[Request], *, concurrency: int | None) -> Any:
        offered[self.is_baseline].append([(r.index, r.arrival_s) for r in requests])
        return run(self, requests, concurrency=concurrency)

    monkeypatch.setattr(FakeEngine, "run", noted)
    config.workload.request_rate = 1e-6
    use_engine(FakeEngine())
    with caplog.at_level(logging.WARNING):
        found = run_config()
    assert offered[False] == offered[True]
    warm_up, *rounds = offered[False]
    assert {at for _, at in warm_up} == {None}
    assert [[index for index, _ in part] for part in rounds] == [[0, 1, 2], [3, 4, 5]]
    assert all(part[-1][1] == pytest.approx(3e6) for part in rounds)
    assert rounds[0][0][1] != rounds[1][0][1]
    said = "makes this run wait for arrivals for 138.9 days"
    assert said in caplog.text
    assert [said in warning for warning in found["warnings"]].count(True) == 1

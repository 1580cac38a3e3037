"""bench=serve: the same arrivals for every engine and method, and the table of their latencies."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import bench_runs
import pytest
from bench_runs import in_process, offered_to_fakes, reported, run_bench, small
from fake_engine import FakeEngine

from hydraspec.bench import load
from hydraspec.bench import measure as bench_measure
from hydraspec.bench import run as bench
from hydraspec.bench import study as bench_study
from hydraspec.bench.choices import BENCHMARKS
from hydraspec.bench.serve import summary_of
from hydraspec.cli.compose import plan

planned = partial(bench_runs.planned, bench="serve")


def test_every_rate_offers_the_same_requests_with_stretched_gaps(
    build: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = offered_to_fakes(monkeypatch)
    config = planned("bench.rates=[0.5,2]", "bench.peak_rate=10")
    part = bench_measure.measure(config)
    assert [row["request_rate"] for row in part["rows"]] == [None, 5.0, 20.0]
    _, warm_up, at_once, slow, fast, *_ = offered
    assert warm_up == at_once == load.requests_of(config, FakeEngine())
    assert [r.prompt_token_ids for r in slow] == [r.prompt_token_ids for r in at_once]
    assert [r.sampling for r in slow] == [r.sampling for r in at_once]
    times = [r.arrival_s for r in slow]
    assert times[-1] == pytest.approx(4 / 5)  # the last of 4 requests at 5 a second
    assert times == sorted(times)
    assert [r.arrival_s for r in fast] == [pytest.approx(t / 4) for t in times]


def test_without_a_peak_rate_shares_are_of_what_was_measured(build: list[FakeEngine]) -> None:
    at_once, half = bench_measure.measure(planned("bench.rates=[0.5]"))["rows"]
    assert half["request_rate"] == at_once["requests_per_second"] / 2
    assert at_once["requests_per_second"] == pytest.approx(4 / at_once["seconds"])


def test_a_row_has_the_waits_and_the_goodput_of_its_requests(build: list[FakeEngine]) -> None:
    """The fake's first tokens come after 5 ms, its others after 2 ms each."""
    config = planned("bench.rates=[1]", "bench.goodput.ttft_ms=6", "bench.goodput.inter_token_ms=3")
    row = bench_measure.measure(config)["rows"][1]
    assert row["ttft"] == {"mean": 5.0, "p50": 5.0, "p90": 5.0, "p99": 5.0}
    assert row["queue"] == dict.fromkeys(("mean", "p50", "p90", "p99"))
    assert row["goodput"]["share"] == 1.0
    assert row["goodput"]["requests_per_second"] == pytest.approx(row["requests_per_second"])
    config = planned("bench.rates=[1]", "bench.goodput.ttft_ms=4")
    assert bench_measure.measure(config)["rows"][1]["goodput"]["share"] == 0.0


def test_a_summary_of_waits() -> None:
    found = summary_of([float(i) for i in range(101)] + [1000.0])
    assert found["mean"] == pytest.approx(6050 / 102)
    assert (found["p50"], found["p90"]) == (50.5, pytest.approx(90.9))
    assert summary_of([])["mean"] is None


def test_later_engines_and_methods_get_the_first_ones_rates(
    build: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_process(monkeypatch, {})
    typed = ["bench.methods=[none]", "bench.rates=[0.25,0.5]"]
    result = run_bench(tmp_path, *typed, bench_name="serve")
    parts = result["parts"]
    assert [(p["engine"], p["method"]) for p in parts] == [("native", "none"), ("vllm", "none")]
    peak = parts[0]["rows"][0]["requests_per_second"]
    for part in parts:
        rates = [row["request_rate"] for row in part["rows"]]
        assert rates == [None, pytest.approx(peak / 4), pytest.approx(peak / 2)]
    ours, theirs = (part["rows"][2] for part in parts)
    assert result["ratios"]["none"]["rates"][2]["seconds"] == pytest.approx(
        ours["seconds"] / theirs["seconds"]
    )
    assert result["ratios"]["none"]["rates"][1]["ttft"]["p99"] == 1.0
    lines = list(bench_study.cells_of(result))
    assert [line[:2] for line in lines[-3:]] == [
        *(["none", "native"], ["none", "vllm"], ["", "native / vllm"])
    ]
    shown = [line[2] for line in lines]
    assert shown == ["all at once"] * 2 + [""] + [f"{peak / 4:.2f}"] * 2 + [""] + [
        *([f"{peak / 2:.2f}"] * 2),
        "",
    ]
    assert {len(line) for line in lines} == {len(bench_study.header_of(result))}
    assert [bool(line[-2]) for line in lines] == [True] * 3 + [False] * 6  # of the whole part
    del parts[1]["rows"][2:]  # as an interrupt leaves it
    assert [line[:2] for line in bench_study.cells_of(result)][-1:] == [["none", "native"]]
    noted = {name: text for name, text in bench_study.notes_of(result)}
    parts[0]["rows"][2]["num_built"] = 3
    (added,) = dict(bench_study.notes_of(result)).items() - noted.items()
    assert added == ("native, none, kernels and graphs built while measured", "3 in line 3")
    assert "Latencies at several request rates" in (tmp_path / "run" / "bench.html").read_text()
    said, page, lines = reported(tmp_path / "run")
    assert said.startswith("Without drafts, native and vllm: p99 at ")
    assert said.endswith("/s: first token 5 ms and 5 ms.")
    assert "Time to first token, p90" in page
    assert "without drafts on vllm: 90% of requests or more in limits up to" in page
    assert lines == {"without drafts on native", "without drafts on vllm"}


def test_a_given_peak_rate_is_typed_for_all(tmp_path: Path) -> None:
    serve, parts = BENCHMARKS["serve"], [{"rows": [{"requests_per_second": 30.0}]}]
    assert serve.carried(planned("bench.peak_rate=7"), parts) == []
    assert serve.carried(planned(), [{"rows": []}]) == []
    (carried,) = serve.carried(planned(), [{"rows": []}, *parts])
    command = bench.command_of("vllm", "none", tmp_path, [*small("serve")], serve)
    config = plan([*command[3:], carried]).jobs[0].config
    assert config.bench.peak_rate == 30.0
    assert config.engine.vllm.record_steps  # times of tokens
    assert not config.engine.prefix_caching

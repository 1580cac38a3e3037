"""bench=context: every choice of drafts in turn on requests whose KV is filled, cell by cell."""

from __future__ import annotations

import inspect
import json
from functools import partial
from pathlib import Path

import bench_runs
import pytest
from bench_runs import in_process, offered_to_fakes, reported, run_bench, small
from fake_engine import Behaviour, FakeEngine

import hydraspec
from hydraspec.bench import context
from hydraspec.bench import measure as bench_measure
from hydraspec.bench import study as bench_study
from hydraspec.cli.compose import plan
from hydraspec.config.benches import drafts_of
from hydraspec.types import ConfigurationError

planned = partial(bench_runs.planned, bench="context")
AUTO = "method.num_speculative_tokens=auto"
SYNTHETIC = ("method.verification=synthetic", "method.synthetic_acceptance_length=2")
HERE = ("bench.isolate=false", "tracker=none", "engine.device=cpu", "engine.num_threads=1")


def test_the_method_is_timed_beside_none_with_its_number_of_drafts() -> None:
    config = planned()
    assert context.choices_of(config) == ["none", "K=3"]
    assert context.choices_of(planned(AUTO)) == ["none", "K=1", "K=3", "K=5", "auto"]
    assert drafts_of(planned(AUTO, "method.max_speculative_tokens=4")) == [1, 3]
    assert drafts_of(planned(AUTO, "bench.drafts=[2]")) == [2]
    assert not config.engine.prefix_caching


def test_the_preset_has_room_for_its_longest_context() -> None:
    config = plan(["experiment=context_map", "target=gemma4_31b"]).jobs[0].config
    assert config.target.max_model_len > config.bench.contexts[-1] + config.bench.output_tokens
    assert config.bench.batches[-1] == config.engine.max_num_seqs == 64
    assert context.choices_of(config) == ["none", "K=1", "K=3", "K=5", "auto"]


@pytest.mark.parametrize(
    ("typed", "parts"),
    [
        (["bench.contexts=[]"], ["bench.contexts=[]", "e.g. [512, 4096, 32768]"]),
        (["bench.contexts=[1,8]"], ["contexts=[1, 8]", "from 2 on"]),
        (["bench.contexts=[8,4]"], ["contexts=[8, 4]", "rising"]),
        (["bench.drafts=[1]"], ["drafts=[1] holds other numbers", "[3] (method.num", AUTO]),
        ([AUTO, "bench.drafts=[7]"], ["drafts=[7]", "1 to 6 (method.max_speculative_tokens)"]),
        ([AUTO, "bench.drafts=[]"], ["drafts=[]", "rising whole numbers"]),
        (["bench.cell_timeout_s=0"], ["bench.cell_timeout_s=0", "1 or more"]),
        (["bench.engines=[native,vllm]"], ["cannot be filled", "[native]"]),
        (["bench.methods=[none]"], ["methods=[none]", "[gemma4_mtp], or null"]),
        (["method=none"], ["method=none has nothing", "choose method=<choice>"]),
        (["parallelism=tp2"], ["parallelism=tp2 has several", "leave parallelism out"]),
        (["bench.batches=[64]"], ["add engine.max_num_seqs=64"]),
        (["target.max_model_len=20"], ["bench.output_tokens x (K + 1) + 1 = 49"]),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_one_message(typed: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        planned(*typed)
    message = str(caught.value)
    assert message.count("\n") == 2
    for part in parts:
        assert part in message


def test_choices_take_turns_on_the_same_filled_requests_of_a_round(
    build: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm-up of each, then rounds in alternating order; every prompt is filled but for a row."""
    offered = offered_to_fakes(monkeypatch)
    part = bench_measure.measure(planned("bench.batches=[2]", "bench.contexts=[16]"))
    _, *passes = offered[: 1 + 2 * (1 + 2)]
    assert {requests[0].sampling.max_tokens for requests in passes} == {8 * (3 + 1)}
    warm, first, second = passes[:2], passes[2:4], passes[4:]
    assert all(requests == warm[0] for requests in [*warm, *first])
    assert all([r.index for r in requests] == [2, 3] for requests in second), "the next ones"
    assert second[0] == second[1]
    assert second[0][0].prompt_token_ids != first[0][0].prompt_token_ids
    assert {(len(r.prompt_token_ids or ()), r.num_filled) for r in passes[2]} == {(16, 15)}
    (row,) = part["rows"]
    assert (row["status"], row["num_rounds"], row["choice"]) == ("ok", 2, "K=3")
    # A step of 2 ms, or of 1 ms without drafts; 3, 0, 2, 1 accepted in turn are 16 tokens in 6.
    assert row["tokens_per_step"] == {"none": 1.0, "K=3": pytest.approx(16 / 6)}
    assert row["tpot_ms"] == {"none": 1.0, "K=3": pytest.approx(2 * 6 / 16)}
    assert row["ratio_to_none"] == row["tpot_ms"]["K=3"] / row["tpot_ms"]["none"]
    best = min(row["tpot_ms"], key=lambda name: row["tpot_ms"][name])
    assert row["best_fixed"] == best
    assert row["ratio_to_best"] == row["tpot_ms"]["K=3"] / row["tpot_ms"][best]


def test_cells_that_do_not_fit_are_left_out_and_say_so(
    build: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(FakeEngine, "most_at_once", lambda self, n: 1 if n > 45 else 9)
    in_process(monkeypatch, {})
    result = run_bench(tmp_path, bench_name="context")
    rows = {(row["batch"], row["context"]): row for row in result["parts"][0]["rows"]}
    assert [place for place, row in rows.items() if row["status"] == "does not fit"] == [(2, 16)]
    assert rows[2, 16]["tpot_ms"] == {}
    assert rows[2, 16]["ratio_to_none"] is None
    lines = list(bench_study.cells_of(result))
    assert {len(line) for line in lines} == {len(bench_study.header_of(result))}
    said, page, _ = reported(tmp_path / "run")
    assert "time per token with K=3 at most" in said.lower().replace("k=3", "K=3")
    assert "Speed of K=3 over none" in page
    assert "does not fit" in page
    assert "Speed of auto over the best" not in page


def test_a_request_that_ends_early_is_no_figure_and_the_run_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = FakeEngine(Behaviour(error_indices={1}))
    requests = context.requests_of(planned(), engine, 2, 8, 16)
    events = engine.run(requests, concurrency=None)
    monkeypatch.setattr(engine, "run", lambda *args, **kwargs: events)
    with pytest.raises(RuntimeError, match="request 1 ended: prompt is too long"):
        context.Choice("none", engine, None).run(requests, 8)
    assert inspect.getgeneratorstate(events) == inspect.GEN_CLOSED  # type: ignore[arg-type]


def test_a_cell_out_of_time_has_one_round_at_least(
    build: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = planned("bench.batches=[1]", "bench.contexts=[8]", "bench.repeats=5")
    config.bench.cell_timeout_s = -1
    (row,) = bench_measure.measure(config)["rows"]
    assert (row["status"], row["num_rounds"]) == ("out of time", 1)
    assert row["ratio_to_none"] is not None


def test_choices_are_compared_within_rounds(
    build: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of other requests, one of them slow throughout: by medians of times K=1 would be best
    and the ratios others."""
    times = {"none": [10.0, 10, 40], "K=1": [5.0, 8, 36], "K=3": [4.0, 9, 20], "auto": [4.0, 9, 18]}

    def run(
        self: context.Choice, requests: object, num_tokens: int, *, counts: bool = True
    ) -> None:
        if counts:
            self.tpot_ms.append(times[self.name][len(self.tpot_ms)])

    monkeypatch.setattr(context.Choice, "run", run)
    typed = [AUTO, "method.max_speculative_tokens=3", "bench.batches=[1]", "bench.contexts=[8]"]
    (row,) = bench_measure.measure(planned(*typed, "bench.repeats=3"))["rows"]
    assert row["tpot_ms"] == {"none": 10, "K=1": 8, "K=3": 9, "auto": 9}
    assert (row["best_fixed"], row["ratio_to_none"]) == ("K=3", 0.45)
    assert row["ratio_to_best"] == 1.0


def test_nothing_measured_is_no_error_of_the_report() -> None:
    row = {"ratio_to_none": None}
    assert context.Context().summary_line({"rows": [row]}) == "no cell was measured"


def test_auto_and_fixed_drafts_of_a_shipped_pair(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing faked: fixed numbers are kept in every step, costs know the contexts, and half of the
    requests follow a record while the others reject all drafts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hydraspec.engine.run.step_costs.LADDER", (64,))
    monkeypatch.setattr("hydraspec.engine.run.step_costs.NUM_STEPS", 2)
    seen: dict[str, set[int | None]] = {}
    tokens: dict[tuple[int, ...], list[float]] = {}  # a step, with K=3, by the requests
    whole = context.Choice.run

    def noted(self, requests, *args, **kwargs):  # type: ignore[no-untyped-def]
        seen.setdefault(self.name, set()).add(self.num_drafts)
        whole(self, requests, *args, **kwargs)
        if self.name == "K=3":
            indices = tuple(request.index for request in requests)
            tokens.setdefault(indices, []).extend(self.tokens_per_step[-1:])

    monkeypatch.setattr(context.Choice, "run", noted)
    pair = ["target=tiny_qwen3", "method=eagle3", *HERE]
    record = hydraspec.run(
        [
            *("workload.limit=2", "metrics.trace=true", "baseline=false", "hydra.run.dir=record"),
            *("method.num_speculative_tokens=3", *pair[:2], *HERE[1:]),
        ]
    )
    assert record["num_accepted_tokens"] > 0
    typed = [*small("context"), *pair, AUTO, "method.max_speculative_tokens=3", *SYNTHETIC[:1]]
    typed += ["method.synthetic_trace=record", "method.synthetic_undraftable=0.5"]
    typed += ["bench.contexts=[32,300]", "bench.output_tokens=16", "hydra.run.dir=run"]
    (part,) = hydraspec.run(typed)["parts"]
    assert seen == {"none": {None}, "K=1": {1}, "K=3": {3}, "auto": {None}}
    by_cell = {(row["batch"], row["context"]): row for row in part["rows"]}
    assert set(by_cell) == {(b, c) for b in (1, 2) for c in (32, 300)}
    assert tokens[1,] == [1.0, 1.0], "the second request is undraftable"
    assert min(tokens[0,]) > max(tokens[0, 1] + tokens[2, 3]) > 1.0
    for row in by_cell.values():
        steps = row["tokens_per_step"]
        assert steps["none"] == 1.0
        assert 1.0 < steps["K=1"] <= 2.0
        assert steps["K=1"] < steps["K=3"]
        assert row["ratio_to_best"] >= row["ratio_to_none"]
    saved = json.loads((tmp_path / "run" / "bench.json").read_text())
    assert saved["choices"] == ["none", "K=1", "K=3", "auto"]
    assert saved["parts"][0]["costs"]["contexts"][-1] >= 300
    page = (tmp_path / "run" / "bench.html").read_text()
    assert "Speed of auto over the best" in page
    assert "50% of the requests undraftable" in page
    speeds = [1 / row["ratio_to_best"] for (batch, _), row in by_cell.items() if batch > 1]
    assert f"{min(speeds):.2f} to {max(speeds):.2f} times the speed of the best fixed K" in page


def test_an_earlier_result_has_a_title() -> None:
    """It does not say which requests were undraftable."""
    assert context.Context().title({"output_tokens": 8}).endswith("context, 8 tokens out")

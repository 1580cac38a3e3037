"""W&B: what is logged, and that nothing it does can stop or hold up a run."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import records
from wandb_reader import inspected

from hydraspec.metrics import tracker as tracker_module
from hydraspec.metrics.media import PlainTable
from hydraspec.metrics.meter import Meter
from hydraspec.metrics.sinks import Side
from hydraspec.metrics.tracker import SORTED, TrackerOptions, WandbSink, flattened
from hydraspec.types import PrefixCaching, StepRecord

SUMMARY = {
    "acceptance_rate_per_position": [0.8, 0.5],
    "conditional_acceptance_rate_per_position": [0.8, 0.625],
    "acceptance_length": {"mean": 2.3, "ci95": None},
    "lossless": {"verdict": "identical"},
    "time_per_output_token_ms": 4.0,
    "assessment": {"says": "worth_it", "sentence": "worth it: 2x"},
    "latency_ms": {"ttft": {"p50": 1.0, "p90": None, "p99": 9.0}},
    "goodput": {"ttft_ms": 200.0, "inter_token_ms": None, "share": 0.5, "requests_per_second": 2.0},
    "baseline": {"latency_ms": {"queue": {"p99": 3.0}}, "goodput": None},
}
ROW = {
    "id": "a",
    "category": "math",
    "prompt_token_ids": [1],
    "output_token_ids": [1, 2, 3, 4],
    "text": "secret",
    "num_drafts": 4,
    "accepted_per_position": [3, 1],
    "ttft_ms": 2.0,
    "latency_ms": 9.0,
    "decode_ms": 6.0,
    "decode_tokens": 3,
    "inter_token_ms": {"p50": 1.0, "p90": 1.0, "p99": 3.0},
    "num_cached_tokens": 0,
    "finish_reason": "stop",
    "correct": True,
    "error": None,
    "baseline": {"decode_ms": 12.0, "decode_tokens": 3},
}
HANG_SECONDS = 5.0


@pytest.fixture(autouse=True)
def _no_thread_outlives_its_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tracker's thread that goes on without the fake would import the real wandb meanwhile."""
    yield
    for thread in threading.enumerate():
        if thread.name == "wandb":
            thread.join(2 * HANG_SECONDS)


class FakeWandb:
    """As much of wandb as the tracker touches; `hang` names a call that never returns in time."""

    def __init__(self, *, failing: str = "", hang: str = "") -> None:
        self.failing, self.hang = failing, hang
        self.release = threading.Event()
        self.logged: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.modes: list[str] = []
        self.init_arguments: dict[str, Any] = {}
        self.finished = False
        self.threads: set[str] = set()

    def call(self, name: str) -> None:
        self.threads.add(threading.current_thread().name)
        if self.hang == name:
            self.release.wait(HANG_SECONDS)
        if self.failing == name:
            raise RuntimeError(f"{name} broke\nsecond line")

    class Settings(SimpleNamespace):
        model_fields = ("mode", "silent", "console", "disable_git", "x_disable_stats")

    def Table(self, columns: list[str], data: list[list[Any]]) -> Any:
        return ("table", columns, data)

    def Histogram(self, np_histogram: tuple[list[int], list[float]]) -> Any:
        return ("histogram", *np_histogram)

    def login(self, prompt: bool = True) -> bool:
        return True

    def init(self, **arguments: Any) -> Any:
        mode = arguments["settings"].mode
        self.modes.append(mode)
        if self.failing == f"init {mode}":
            raise RuntimeError("unreachable")
        self.call("init")
        self.init_arguments = arguments
        self.config.update(arguments["config"])
        self.run = SimpleNamespace(
            log=self.log,
            finish=self.finish,
            config=SimpleNamespace(
                update=lambda values, allow_val_change: self.config.update(values)
            ),
            summary=self.summary,
            notes=arguments["notes"],
            define_metric=lambda *args, **kwargs: None,
        )
        return self.run

    def log(self, values: dict[str, Any]) -> None:
        self.call("log")
        self.logged.append(values)

    def finish(self) -> None:
        self.call("finish")
        self.finished = True


def start(fake: FakeWandb, monkeypatch: pytest.MonkeyPatch, mode: str = "offline") -> WandbSink:
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    options = TrackerOptions(
        project="p",
        entity=None,
        group="g",
        mode=mode,
        name="n",
        init_timeout_seconds=0.2,
        finish_timeout_seconds=0.2,
    )
    sink = WandbSink(options, Path("/run"), {"seed": 3})
    sink.wait_until_ready()
    return sink


def record(step: int) -> StepRecord:
    return records.step(records.part(0, 2, 1), ms=4.0, step=step, num_running=1)


def feed(sink: WandbSink, count: int) -> None:
    meter = Meter([records.request()])
    for step in range(count):
        meter.add_step(record(step))
        sink.on_step(Side.method, record(step), meter)


def test_what_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setattr(tracker_module, "SECONDS_BETWEEN_POINTS", 0.0)
    sink = start(fake, monkeypatch)
    sink.add_config(draft_spec={"layers": 2})
    feed(sink, 2)
    sink.on_requests([ROW])
    assert sink.on_summary(SUMMARY) == []
    assert fake.finished
    assert fake.config == {"seed": 3, "draft_spec": {"layers": 2}}
    assert fake.init_arguments["group"] == "g"
    assert fake.init_arguments["dir"] == "/run"
    assert fake.logged[1] == {
        "steps/method/step": 1,
        "steps/method/acceptance_length": 2.0,
        "steps/method/output_tokens_per_second": 500.0,
        "steps/method/step_ms": 4.0,
        "steps/method/num_running": 1,
        "steps/method/num_waiting": 0,
        "steps/method/kv_usage": 0.0,
    }
    columns = ["position", "acceptance_rate", "conditional_acceptance_rate"]
    rows = [[1, 0.8, 0.8], [2, 0.5, 0.625]]
    last = fake.logged[-1]
    assert last["acceptance_by_position"] == ("table", columns, rows)
    _, columns, ((*row,),) = last["requests"]
    assert dict(zip(columns, row, strict=True))["speedup"] == 2.0
    assert "secret" not in str(last), "prompts and outputs stay in requests.jsonl"
    accepted = ("histogram", [1, 2, 1], [-0.5, 0.5, 1.5, 2.5])
    assert last["histograms/accepted_per_verification"] == accepted
    assert sum(last["histograms/step_ms"][1]) == 2
    assert fake.run.notes == "worth it: 2x"
    assert fake.summary["acceptance_rate_per_position/1"] == 0.5
    assert fake.summary["tokens_per_second_per_user"] == 250.0
    curves = {key for point in fake.logged[:-1] for key in point}
    assert not curves & set(fake.summary), "a curve's last value would replace a final figure"
    assert fake.summary["lossless/verdict"] == "identical"
    assert fake.summary["latency_ms/ttft/p99"] == 9.0
    assert fake.summary["goodput/share"] == 0.5
    assert ["baseline/latency_ms/queue/p99", "3.0"] in last["figures"][2]
    assert not {name for name, _ in last["figures"][2]} & set(fake.summary)
    assert set(fake.summary) <= set(SORTED)
    assert len(set(SORTED)) == len(SORTED) <= 40
    assert fake.threads == {"wandb"}, "wandb is called from the tracker's thread only"


def test_curves_of_the_kv_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use by group, and the hit rate over the requests that have ended."""
    fake = FakeWandb()
    sink = start(fake, monkeypatch)
    meter = Meter([records.request()], prefix_caching=PrefixCaching(block_size=4))
    step = replace(record(0), kv_usage_per_group={"full": 0.5, "sliding": 0.25})
    meter.add_step(step)
    prompt = list(range(16))
    meter.add_completion(records.completion(prompt_token_ids=prompt, num_cached_tokens=12))
    sink.on_step(Side.method, step, meter)
    sink.close()
    (point,) = fake.logged
    assert point["steps/method/kv_usage/full"] == 0.5
    assert point["steps/method/kv_usage/sliding"] == 0.25
    assert point["steps/method/prefix_cache_hit_rate"] == 0.75


def test_the_curve_of_k_is_the_mean_since_the_last_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where K is chosen per step; steps that only read prompts have none to choose."""
    fake = FakeWandb()
    sink = start(fake, monkeypatch)
    meter = Meter([records.request()])
    prompt = replace(record(3), draft_length=6)
    prompt.requests[0].is_prefill = True
    steps = [
        replace(records.step(records.part(0, length, 0), step=i), draft_length=length)
        for i, length in enumerate((4, 0, 3))
    ]
    for step, seconds in zip([*steps, prompt, record(4)], (1.0, 0.0, 1.0, 0.0, 1.0), strict=True):
        monkeypatch.setattr(tracker_module, "SECONDS_BETWEEN_POINTS", 1e9 * (seconds == 0.0) - 1)
        sink.on_step(Side.method, step, meter)
    sink.close()
    assert [point.get("steps/method/draft_length") for point in fake.logged] == [4.0, 1.5, None]


def test_curves_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    sink = start(fake, monkeypatch)
    feed(sink, 500)
    sink.close()
    assert len(fake.logged) <= 2


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_a_failure_is_a_warning(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    sink = start(FakeWandb(failing=call), monkeypatch)
    feed(sink, 1)
    (warning,) = sink.on_summary(SUMMARY)
    assert warning.startswith(f"wandb failed: RuntimeError: {call} broke (project p")


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_a_hang_is_a_warning_and_bounded(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    fake = FakeWandb(hang=call)
    started = time.monotonic()
    sink = start(fake, monkeypatch)
    feed(sink, 1)
    (warning,) = sink.on_summary(SUMMARY)
    assert time.monotonic() - started < 2
    fake.release.set()
    assert "did not start" in warning or "did not finish" in warning


def test_steps_never_wait_for_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a log call on the engine's thread."""
    fake = FakeWandb(hang="log")
    monkeypatch.setattr(tracker_module, "SECONDS_BETWEEN_POINTS", 0.0)
    sink = start(fake, monkeypatch)
    started = time.monotonic()
    feed(sink, 100)
    assert time.monotonic() - started < HANG_SECONDS
    fake.release.set()
    sink.close()


def test_offline_where_the_server_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb(failing="init online")
    sink = start(fake, monkeypatch, mode="online")
    (warning,) = sink.on_summary(SUMMARY)
    assert fake.modes == ["online", "offline"]
    assert "could not go online (RuntimeError: unreachable): recorded offline" in warning
    assert fake.finished


def test_nothing_drafted_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches NaN and null of steps and runs that drafted nothing."""
    fake = FakeWandb()
    monkeypatch.setattr(tracker_module, "SECONDS_BETWEEN_POINTS", 0.0)
    sink = start(fake, monkeypatch)
    meter = Meter([records.request()], num_speculative_tokens=2)
    padding = replace(records.part(), draft_token_ids=[-1, -1])
    for number, part in enumerate((records.part(prefill_rows=1), padding, records.part())):
        step = records.step(part, ms=0.0, step=number)
        meter.add_step(step)
        sink.on_step(Side.method, step, meter)
    rates = meter.acceptance_rate_per_position()
    told = {
        "acceptance_length": asdict(meter.acceptance_length()),
        "acceptance_rate": meter.acceptance_rate(),
        "acceptance_rate_per_position": rates,
        "conditional_acceptance_rate_per_position": rates,
        "output_tokens_per_second": meter.output_tokens_per_second(),
    }
    assert sink.on_summary(told) == []
    *points, last = fake.logged
    assert [point["steps/method/step"] for point in points] == [0, 1, 2]
    for point in (*points, fake.summary):
        assert all(math.isfinite(value) for value in point.values()), point
        assert not any("acceptance" in name for name in point)
    assert last["acceptance_by_position"][2] == [[1, None, None], [2, None, None]]
    assert set(last) == {"acceptance_by_position", "histograms/step_ms"}


def test_no_key_is_prompted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setattr(fake, "login", lambda prompt: False)
    sink = start(fake, monkeypatch, mode="online")
    (warning,) = sink.on_summary(SUMMARY)
    assert fake.modes == ["offline"]
    assert "no API key is configured" in warning


def test_flattened() -> None:
    nested = {"a": {"b": [1, None]}, "c": None, "d": "x"}
    assert flattened(nested) == {"a/b/0": 1, "d": "x"}


def test_the_real_wandb_writes_into_the_run_folder_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a renamed setting, and secrets of the environment in the run folder."""
    wandb = pytest.importorskip("wandb")
    secrets = {"WANDB_API_KEY": "a1b2c3d4e5" * 4, "SOME_SECRET": "s3cr3t-of-the-environment"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    options = TrackerOptions(
        project="p", entity=None, group=None, mode="offline", name="n", tags=("night",)
    )
    sink = WandbSink(options, tmp_path, {"seed": 3})
    sink.wait_until_ready()
    feed(sink, 1)
    sink.on_requests([ROW])
    assert sink.on_summary(SUMMARY) == []
    wandb.teardown()  # ends its process: tests of this worker count their children
    written = [path for path in (tmp_path / "wandb").rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in written)
    for path in written:
        content = path.read_bytes()
        assert not any(value.encode() in content for value in secrets.values()), path
    found = inspected(tmp_path / "wandb")
    assert (found["name"], found["state"], found["tags"]) == ("n", "finished", ["night"])
    assert found["notes"] == "worth it: 2x"
    assert found["config"] == {"seed": 3}
    assert found["summary"]["acceptance_rate_per_position/0"] == 0.8
    assert found["summary"]["requests"]["nrows"] == 1
    assert found["summary"]["histograms/step_ms"]["_type"] == "histogram"
    assert not [name for name in found["summary"] if name.startswith("steps/")]


def test_what_is_logged_of_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    sink = start(fake, monkeypatch)
    jobs = PlainTable(columns=("job", "speedup"), rows=[["0", 2.0]])
    assert sink.on_sweep(jobs, {"best/all/job": "0"}) == []
    assert fake.logged == [{"jobs": ("table", ["job", "speedup"], [["0", 2.0]])}]
    assert fake.summary == {"best/all/job": "0"}
    assert fake.finished

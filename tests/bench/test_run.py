"""Benchmarks: what each process is told, what it measures, and the table made of it."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench_runs import ALONE, BENCHES, SMALL, in_process, planned, reported, run_bench, small
from fake_engine import Behaviour, FakeEngine

import hydraspec
from hydraspec.bench import decode as bench_decode
from hydraspec.bench import measure as bench_measure
from hydraspec.bench import run as bench
from hydraspec.bench import study as bench_study
from hydraspec.bench.choices import BENCHMARKS
from hydraspec.bench.passes import Passes
from hydraspec.cli import main as cli
from hydraspec.cli.compose import plan
from hydraspec.config.choices import choices_of
from hydraspec.config.schema import Device, Weights
from hydraspec.errors import ConfigurationError
from hydraspec.lab import run as run_module
from hydraspec.lab.outcome import outcome
from hydraspec.types import Request

SYNTHETIC = ("method.verification=synthetic", "method.synthetic_acceptance_length=2")
DEEPSEEK = "bench_mtp target=custom target.checkpoint=shape:deepseek_v3_6_layers"
# what follows experiment= -> shape, method, drafter's shape, tokens a step
PRESETS = {
    "bench_gemma4": ("gemma4_e4b", "gemma4_mtp", "gemma4_e4b-assistant", 2.5),
    **{
        f"bench_gemma4 target={name}": (name, "gemma4_mtp", f"{name}-assistant", 2.5)
        for name in ("gemma4_e2b", "gemma4_e4b", "gemma4_12b", "gemma4_26b_a4b", "gemma4_31b")
    },
    "bench_heads target=gemma4_31b": ("gemma4_31b", "eagle3", "gemma4_31b-eagle3", 2.5),
    "bench_heads target=gemma4_31b method=dflash": (
        *("gemma4_31b", "dflash", "gemma4_31b-dflash", 2.5),
    ),
    "bench_heads method=dspark": ("qwen3_8b", "dspark", "qwen3_8b-dspark", 2.5),
    "bench_heads": ("qwen3_8b", "eagle3", "qwen3_8b-eagle3", 2.5),
    "bench_heads method=peagle": ("qwen3_8b", "peagle", "qwen3_8b-peagle", 2.5),
    "bench_heads target=mistral_7b method=eagle": ("mistral_7b", "eagle", "mistral_7b-eagle", 2.5),
    DEEPSEEK: ("deepseek_v3_6_layers", "mtp", "deepseek_v3_6_layers", 1.75),
    "bench_mtp": ("mimo_7b", "mtp", "mimo_7b", 1.75),
}


def test_every_preset_is_listed() -> None:
    presets = {name for name in choices_of("experiment") if name.startswith("bench_")}
    assert presets == {name.split()[0] for name in PRESETS}


# ------------------------------------------------------------------ configuration


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_the_table_of_its_target(preset: str) -> None:
    config = plan(f"experiment={preset}".split()).jobs[0].config
    target, method, drafter, length = PRESETS[preset]
    assert (config.target.name, config.target.checkpoint) == (target, f"shape:{target}")
    assert (config.method.name, config.method.checkpoint) == (method, f"shape:{drafter}")
    assert {config.target.weights, config.method.weights} == {Weights.random}
    assert (config.method.synthetic_acceptance_length, config.baseline) == (length, False)
    assert config.engine.device is Device.cuda  # lest gigabytes are drawn for a CPU
    assert bench.methods_of(config) == ["none", method]
    assert (config.bench.batches, config.bench.engines) == ([1, 8, 32], ["native", "vllm"])


@pytest.mark.parametrize("preset", ["bench_gemma4", "bench_heads method=peagle", DEEPSEEK])
@pytest.mark.parametrize("engine", ["native", "vllm"])
@pytest.mark.parametrize("drafts", [False, True], ids=["none", "drafts"])
def test_the_command_of_every_process_composes(
    preset: str, engine: str, drafts: bool, tmp_path: Path
) -> None:
    target, method, *_ = PRESETS[preset]
    method = method if drafts else "none"
    typed = [*f"experiment={preset}".split(), "bench.batches=[1,8]", "hydra.run.dir=x"]
    typed += ["engine=native", "tracker=wandb", "tracker.project=mine"]  # which no part has
    command = bench.command_of(engine, method, tmp_path / "it's here", typed, BENCHMARKS["decode"])
    assert command[:3] == [sys.executable, "-m", "hydraspec"]
    told = plan(command[3:])
    config = told.jobs[0].config
    assert told.folder == tmp_path / "it's here"
    assert (config.engine.name, config.method.name) == (engine, method)
    assert (config.bench.engines, bench.methods_of(config)) == ([engine], [method])
    assert (config.bench.isolate, config.bench.batches) == (False, [1, 8])
    assert config.engine.vllm.record_steps is (engine == "native")
    assert (config.engine.max_num_seqs, config.engine.max_num_batched_tokens) == (32, 16384)
    assert config.target.checkpoint == f"shape:{target}"


@pytest.mark.parametrize(
    ("bench", "typed", "parts"),
    [
        ("decode", "bench.engines=[vlm]", ["=[vlm]", "native, transformers, vllm"]),
        ("decode", "bench.engines=[]", ["bench.engines=[]"]),
        ("decode", "bench.methods=[eagle3]", ["=[eagle3]", "gemma4_mtp, none"]),
        ("decode", "bench.batches=[8,1]", ["bench.batches=[8, 1]", "rising"]),
        (
            "decode",
            "bench.batches=[64]",
            ["engine.max_num_seqs=16", "add engine.max_num_seqs=64"],
        ),
        ("decode", "bench.output_tokens=1", ["bench.output_tokens=1", "2 or more"]),
        ("decode", "bench.repeats=0", ["bench.repeats=0", "1 or more"]),
        ("decode", "bench.timeout_s=0", ["bench.timeout_s=0"]),
        ("decode", "target.max_model_len=13", ["max_model_len=13", "= 14", "14 or more"]),
        ("decode", "bench.isolate=false", ["bench.isolate=false", "one engine and one method"]),
        ("decode", "bench.name=x", ["bench.name=x", "context, decode, load, none, ser"]),
        ("decode", "bench=none", ["bench.", "choose bench=context or bench=decode"]),
        ("load", "bench.num_requests=0", ["bench.num_requests=0", "1 or more"]),
        ("load", "bench.max_prompt_tokens=4", ["=4", "bench.prompt_tokens=5 or more"]),
        ("load", "bench.max_output_tokens=3", ["=3", "bench.output_tokens=4 or more"]),
        ("load", "bench.batches=[1]", ["bench.batches", "bench=decode"]),
        ("load", "target.max_model_len=16", ["max_prompt_tokens + bench.max_output_tokens = 17"]),
        ("serve", "bench.rates=[]", ["bench.rates=[]", "[0.25, 0.5, 0.75, 0.9]"]),
        ("serve", "bench.rates=[0.5,0.25]", ["bench.rates=[0.5, 0.25]", "rising"]),
        ("serve", "bench.rates=[0,1]", ["bench.rates=[0.0, 1.0]", "above 0"]),
        ("serve", "bench.peak_rate=0", ["bench.peak_rate=0", "null to measure it"]),
        ("serve", "bench.goodput.ttft_ms=-1", ["bench.goodput.ttft_ms=-1", "for no limit"]),
        ("turns", "bench.num_turns=0", ["bench.num_turns=0", "1 or more"]),
        ("turns", "bench.cold_turns=[2,4]", ["bench.cold_turns=[2, 4]", "1 to 3"]),
        ("turns", "bench.cold_turns=[]", ["bench.cold_turns=[]"]),
        (
            "turns",
            "target.max_model_len=29",
            ["num_turns x (bench.turn_tokens + bench.output_tokens) = 30", "30 or more"],
        ),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_refused(bench: str, typed: str, parts: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        planned(typed, bench=bench)
    for part in parts:
        assert part in str(caught.value)


def test_prefix_caching_that_is_typed_in_vain_is_a_warning() -> None:
    (warning,) = planned("engine.prefix_caching=true").warnings
    assert warning.startswith("engine.prefix_caching=true has no effect with bench=decode")
    assert planned("engine.prefix_caching=false").warnings == planned().warnings == []


def test_requests_longer_than_the_target_takes_are_refused_once_it_is_loaded(
    build: list[FakeEngine],
) -> None:
    config = planned("target.max_model_len=null", "bench.prompt_tokens=100000")
    with pytest.raises(ConfigurationError, match="tokens of a request"):
        bench_measure.measure(config)
    assert build[0].closed


def test_requests_longer_than_a_folder_says_are_refused_before_a_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bench=serve as shipped, on the default target: the last process said so after 26 seconds."""
    told = in_process(monkeypatch, {})
    config = plan(["bench=serve"]).jobs[0].config
    with pytest.raises(ConfigurationError, match="= 2432: target tiny_gemma4 takes 2048 tokens"):
        bench.run(config, run_dir=tmp_path / "run", overrides=[])
    assert told == []


@pytest.mark.parametrize(
    ("typed", "count"),
    [
        (["bench=serve", "bench.max_prompt_tokens=300"], 1),
        (["bench=decode", *SMALL], 1),
        (["bench=decode", *SMALL, "method=none"], 0),
        (["bench=decode", *SMALL, *SYNTHETIC], 0),
    ],
    ids=["a load", "batches", "no drafts", "a given acceptance"],
)
def test_acceptance_on_random_tokens_is_warned_of(
    typed: list[str],
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As a run over workload=random is."""
    monkeypatch.setattr(bench, "_in_processes", lambda *_: iter(()))
    config = plan([*typed, "bench.engines=[native]"]).jobs[0].config
    result = bench.run(config, run_dir=tmp_path, overrides=typed, quiet=True)
    said = [text for text in result["warnings"] if "prompts of random tokens" in text]
    assert len(said) == count
    assert [text for text in caplog.messages if "prompts of random tokens" in text] == said
    assert [("warning", text) for text in result["warnings"]] == list(bench_study.notes_of(result))


def test_a_benchmark_of_which_every_part_is_refused_exits_as_a_refused_run() -> None:
    parts = [{"status": "refused"}, {"status": "refused"}]
    assert outcome({"status": "failed", "parts": parts}).status == 2
    assert outcome({"status": "failed", "parts": [*parts, {"status": "failed"}]}).status == 1


def test_method_auto_is_a_method_of_the_table() -> None:
    config = planned("method=auto", "bench.methods=null")
    assert bench.methods_of(config) == ["none", "auto"]


# ------------------------------------------------------------------ what is measured


def test_a_part_loads_once_and_measures_every_batch(build: list[FakeEngine]) -> None:
    part = bench_measure.measure(planned("bench.repeats=2"))
    assert len(build) == 1
    assert build[0].closed
    assert (part["engine"], part["method"], part["status"]) == ("native", "gemma4_mtp", "ok")
    assert [row["batch"] for row in part["rows"]] == [1, 2]
    assert 0 < part["load_s"] < part["first_step_s"]
    assert part["memory_bytes"]["weights"] == 1000
    for row in part["rows"]:
        assert len(row["whole_s"]) == len(row["one_token_s"]) == 2
        assert row["tpot_ms"] > 0
        assert row["output_tokens_per_second"] == pytest.approx(1e3 * row["batch"] / row["tpot_ms"])
        # 3, 0, 2, 1 accepted in turn, until 9 tokens are out: 1 + 4 + 1 + 3
        assert row["acceptance_length"] == pytest.approx(1 + 5 / 3)


def test_a_part_without_drafts_has_no_acceptance(build: list[FakeEngine]) -> None:
    part = bench_measure.measure(planned("method=none"))
    assert [row["acceptance_length"] for row in part["rows"]] == [None, None]


@pytest.mark.parametrize("bench", BENCHES)
def test_requests_are_the_same_for_every_engine_and_change_with_the_seed(bench: str) -> None:
    def requests(*typed: str) -> list[Request]:
        config = planned(*typed, bench=bench)
        found = BENCHMARKS[bench].heavy_requests(config, FakeEngine())
        assert all(request.sampling.ignore_eos for request in found)
        return found

    ours = requests()
    prompts = [request.prompt_token_ids for request in ours]
    assert prompts[0] != prompts[1]
    others = [] if bench == "context" else ["engine=vllm", "method=none"]
    assert requests(*others) == ours
    assert [request.prompt_token_ids for request in requests("seed=1")] != prompts


def test_a_request_that_ends_early_spoils_the_figure(build: list[FakeEngine]) -> None:
    engine = FakeEngine(Behaviour(error_indices={1}))
    requests = bench_decode.requests_of(planned(), engine, 2, 9)
    with pytest.raises(RuntimeError, match="prompt is too long"):
        Passes(engine, requests).run()


# ------------------------------------------------------------------ the table


def test_engines_stand_side_by_side(
    build: list[FakeEngine],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PYTHONPATH", "ours")
    told = in_process(monkeypatch, {})
    result = run_bench(tmp_path, "bench.vllm_pythonpath=/opt/vllm", "bench.timeout_s=7")
    names = ["native-none", "vllm-none", "native-gemma4_mtp", "vllm-gemma4_mtp"]
    assert [name for name, *_ in told] == names
    assert [part["status"] for part in result["parts"]] == ["ok"] * 4
    assert [env["PYTHONPATH"] for _, env, _ in told] == ["ours", "/opt/vllm:ours"] * 2
    assert told[1][1]["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert {timeout_s for *_, timeout_s in told} == {7}
    ours, theirs = result["parts"][2]["rows"], result["parts"][3]["rows"]
    found = result["ratios"]["gemma4_mtp"]
    assert found["tpot"] == {
        str(a["batch"]): pytest.approx(a["tpot_ms"] / b["tpot_ms"])
        for a, b in zip(ours, theirs, strict=True)
    }
    assert set(result["ratios"]) == {"none", "gemma4_mtp"}
    printed = capsys.readouterr().out
    assert "native / vllm" in printed
    assert "gemma4_mtp K=3" in printed
    assert f"{ours[0]['tpot_ms']:.2f}" in printed
    assert "memory in GiB" in printed
    assert "native / vllm" in (tmp_path / "run" / "bench.html").read_text()
    said, page, lines = reported(tmp_path / "run")
    assert "Without drafts, native and vllm: ratio of times per output token " in said
    assert "Milliseconds per output token" in page
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("codes", "status", "said"),
    [
        ({"vllm-none": 2, "vllm-gemma4_mtp": 2}, "ok", "vllm, none refused: engine.name=vllm"),
        ({"vllm-none": 1}, "failed", "vllm, none failed: engine.name=vllm needs it; allowed: y"),
        ({"native-gemma4_mtp": None}, "failed", "native, gemma4_mtp timed out"),
        (
            {f"{e}-{m}": 2 for e in ("native", "vllm") for m in ("none", "gemma4_mtp")},
            "failed",
            "native, none refused",
        ),
    ],
    ids=["vLLM is not installed", "a crash", "too slow", "nothing ran"],
)
def test_what_is_missing_has_its_reason(
    build: list[FakeEngine],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    codes: dict[str, int | None],
    status: str,
    said: str,
) -> None:
    in_process(monkeypatch, codes)
    result = run_bench(tmp_path)
    assert result["status"] == status
    assert said in capsys.readouterr().out
    assert len([part for part in result["parts"] if part["rows"]]) == 4 - len(codes)
    assert bench_study.page_of(result)


@pytest.mark.parametrize("bench_name", ["decode", "load"])
def test_a_bench_of_the_shipped_model_in_this_process(
    bench_name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing faked: what a process of a benchmark runs; a load with fewer slots than requests."""
    monkeypatch.chdir(tmp_path)
    typed = [*small(bench_name), *ALONE, "bench.repeats=1", "engine.max_num_seqs=2"]
    result = hydraspec.run([*typed, "hydra.run.dir=run"])
    assert (result["status"], result["bench"]) == ("ok", bench_name)
    (part,) = result["parts"]
    assert 1 <= part["rows"][-1]["acceptance_length"] <= 4
    if bench_name == "load":
        assert part["bound"]["ratio"] == part["rows"][-1]["seconds"] / part["bound"]["seconds"]
        assert 0 < part["rows"][-1]["inter_token"]["p50"] <= part["rows"][-1]["inter_token"]["p99"]
    saved = json.loads((tmp_path / "run" / "bench.json").read_text(encoding="utf-8"))
    assert saved["parts"][0]["rows"] == part["rows"]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        *("bench.json", "bench.html", "config.yaml", "overrides.yaml")
    }


# ------------------------------------------------------------------ and as a sweep of runs


@pytest.fixture
def logging_as_it_was() -> Iterator[None]:
    """Hydra sets up logging for the whole process."""
    root, ours = logging.getLogger(), logging.getLogger("hydraspec")
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers[:], root.level, ours.level = before


@pytest.mark.usefixtures("logging_as_it_was")
def test_the_side_by_side_as_a_sweep(
    build: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Random weights need no download: the shapes of the targets ship with the package."""
    assert run_module.factory is bench_measure.factory
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    typed = ["-m", "engine=native,vllm", "method=none,gemma4_mtp", "target=gemma4_e4b"]
    typed += ["target.weights=random", "workload=random", "workload.num_requests=2"]
    typed += ["workload.prompt_tokens=5", "workload.output_tokens=9", "tracker=none"]
    monkeypatch.setattr(sys, "argv", ["hydraspec", *typed, "hydra.sweep.dir=sweep"])
    assert cli.main() == 0
    rows = json.loads((tmp_path / "sweep" / "compare.json").read_text())["rows"]
    assert [(row["engine"], row["method"]) for row in rows] == [
        *(("native", "none"), ("native", "gemma4_mtp")),
        *(("vllm", "none"), ("vllm", "gemma4_mtp")),
    ]
    assert all(row["time_per_output_token_ms"] > 0 for row in rows)
    summaries = [
        json.loads((tmp_path / "sweep" / str(i) / "summary.json").read_text()) for i in range(4)
    ]
    assert {summary["target_checkpoint"] for summary in summaries} == {"shape:gemma4_e4b"}
    assert [summary["baseline"] is None for summary in summaries] == [True, False, True, True]
    assert any("baseline=true is not available" in text for text in summaries[3]["warnings"])

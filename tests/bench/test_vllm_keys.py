"""Keys of engine.vllm with a benchmark: for its parts on vLLM alone, refused without any."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from bench_runs import in_process, planned, run_bench
from fake_engine import FakeEngine

from hydraspec.bench import run as bench
from hydraspec.bench.choices import BENCHMARKS
from hydraspec.cli.compose import plan
from hydraspec.errors import ConfigurationError

SHARE = "engine.vllm.gpu_memory_utilization"
BOTH = "bench.engines=[native,vllm]"
OURS = "bench.engines=[native]"


@pytest.mark.parametrize(
    "typed",
    [
        f"{SHARE}=0.94",
        f"+{SHARE}=0.94",
        "engine.vllm={gpu_memory_utilization: 0.94}",
        f"engine=vllm {SHARE}=0.94",
    ],
)
def test_only_the_command_of_vllm_has_them(typed: str, tmp_path: Path) -> None:
    given = ["bench=load", *typed.split(maxsplit=typed.startswith("engine=vllm"))]
    assert plan(given).jobs[0].config.engine.vllm.gpu_memory_utilization == 0.94
    for engine, share in (("native", 0.9), ("transformers", 0.9), ("vllm", 0.94)):
        command = bench.command_of(engine, "none", tmp_path, given, BENCHMARKS["load"])
        config = plan(command[3:]).jobs[0].config
        assert config.engine.name == engine
        assert config.engine.vllm.gpu_memory_utilization == share
        assert any("gpu_memory_utilization" in line for line in command) == (engine == "vllm")


@pytest.mark.parametrize(
    ("typed", "parts"),
    [
        (
            [BOTH, "engine.vllm.gpu_memory_utilisation=0.9"],
            ["keys of engine.vllm are", f"did you mean {SHARE}=0.9?"],
        ),
        ([BOTH, f"{SHARE}=1.5"], [f"{SHARE}=1.5 is out of range", "above 0, up to 1"]),
        ([BOTH, f"{SHARE}=much"], [f"{SHARE}=much is text", "a number"]),
        ([BOTH, "engine.vllm.nnodes=2", "parallelism=tp2"], ["1 with bench=load"]),
        (
            [OURS, f"{SHARE}=0.94"],
            ["bench.engines=[native] does not have", "add bench.engines=[native,vllm], or leave"],
        ),
        ([OURS, f"{SHARE}=0.9"], ["bench.engines=[native] does not have"]),  # its default
        ([OURS, "engine=vllm", f"{SHARE}=0.94"], ["bench.engines=[native] does not have"]),
        (
            ["bench=none", f"{SHARE}=0.9"],
            ["no key of engine=native", "choose engine=vllm, or leave"],
        ),
    ],
    ids=str,
)
def test_what_vllm_does_not_take_is_refused(typed: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        plan(["bench=load", *typed])
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert [line[:9] for line in message.splitlines()[1:]] == ["  allowed", "  to do: "]


def test_a_benchmark_that_vllm_cannot_run_does_not_offer_it() -> None:
    with pytest.raises(ConfigurationError, match="to do: leave it out"):
        planned(f"{SHARE}=0.5", "method.num_speculative_tokens=2", bench="context")


def test_they_are_recorded_and_reach_one_part(
    build: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_process(monkeypatch, {})
    result = run_bench(tmp_path, BOTH, f"{SHARE}=0.94", "bench.methods=[none]")
    assert [part["status"] for part in result["parts"]] == ["ok", "ok"]
    folders = {"": True, "native-none": False, "vllm-none": True}
    for name, has_it in folders.items():
        typed = yaml.safe_load((tmp_path / "run" / name / "overrides.yaml").read_text())
        assert (f"{SHARE}=0.94" in typed) == has_it
    again = yaml.safe_load((tmp_path / "run" / "overrides.yaml").read_text())
    assert plan(again).jobs[0].config.engine.vllm.gpu_memory_utilization == 0.94


def test_an_experiment_may_have_them(tmp_path: Path) -> None:
    """Each part composes the experiment again, with its own engine."""
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults: [{override /bench: load}]\n"
    text += "engine: {vllm: {gpu_memory_utilization: 0.5}}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    typed = [f"hydra.searchpath=['file://{tmp_path}']", "experiment=mine"]
    assert plan(typed).jobs[0].config.engine.vllm.gpu_memory_utilization == 0.5
    for engine in ("native", "vllm"):
        command = bench.command_of(engine, "none", tmp_path, typed, BENCHMARKS["load"])
        assert plan(command[3:]).jobs[0].config.engine.name == engine
    with pytest.raises(ConfigurationError, match=r"add bench\.engines"):
        plan([*typed, OURS])
    with pytest.raises(ConfigurationError, match="choose engine=vllm"):
        plan([*typed, "bench=none"])

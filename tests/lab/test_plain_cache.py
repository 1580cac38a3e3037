"""A run with an FP8 KV cache says how many outputs are those of a cache that rounds nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_targets import gemma4_config, write_folder

import hydraspec
from hydraspec.engine import notes
from hydraspec.engine.native import NativeEngine
from hydraspec.types import ConfigurationError


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Runs of a random target, in which rounded keys and values soon change a token."""
    monkeypatch.chdir(tmp_path)
    folder = write_folder(tmp_path / "target", gemma4_config())
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        f'{{"prompt_token_ids": [{i}, 3, 7, {i}, 5], "category": "{i % 2}"}}' for i in range(20)
    ]
    prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def run_here(*overrides: str):  # type: ignore[no-untyped-def]
        return hydraspec.run(
            [
                *("target=custom", f"target.checkpoint={folder}", "target.weights=random"),
                *("target.dtype=float32", "workload=jsonl", f"workload.path={prompts}"),
                *("sampling.max_tokens=24", "tracker=none", "method=none", *overrides),
            ]
        )

    return run_here


def tokens(summary) -> dict[str, list[int]]:  # type: ignore[no-untyped-def]
    text = (Path(summary["run_dir"]) / "requests.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    return {row["id"]: row["output_token_ids"] for row in rows}


def test_the_figures_are_those_of_two_runs(run) -> None:  # type: ignore[no-untyped-def]
    rounded, plain = run("engine.kv_cache.dtype=fp8"), run()
    ours, theirs = tokens(rounded), tokens(plain)
    found = rounded["lossless"]["kv_cache"]
    assert found["num_requests"] == 16
    compared = [i for i in ours if int(i.split("-")[-1]) < 16]
    assert len(compared) == 16
    equal = [ours[i] == theirs[i] for i in compared]
    assert found["num_equal"] == sum(equal) < 16
    assert sum(equal) / 16 < found["equal_prefix"] < 1
    said = [w for w in rounded["warnings"] if f"{sum(equal)} of 16 outputs" in w]
    assert len(said) == 1
    assert "a cache in float32" in said[0]
    assert plain["lossless"]["kv_cache"] is None


def test_nothing_is_compared_without_a_baseline_or_without_memory(  # type: ignore[no-untyped-def]
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(self: NativeEngine) -> None:
        raise ConfigurationError("engine.kv_cache.memory_gib=0.001: too small\n  to do: more")

    monkeypatch.setattr(NativeEngine, "plain_cache", no_memory)
    summary = run("engine.kv_cache.dtype=fp8")
    assert summary["lossless"]["kv_cache"] is None
    assert any("memory_gib=0.001: too small" in w for w in summary["warnings"])
    assert (
        run("engine.kv_cache.dtype=fp8", "method=ngram", "baseline=false")["lossless"]["kv_cache"]
        is None
    )


def test_rounding_is_warned_of_once_a_run(  # type: ignore[no-untyped-def]
    run, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a warning that every engine of a run logs and its summary repeats."""
    words = "engine.kv_cache.dtype=fp8 rounds keys and values"
    summary = run("engine.kv_cache.dtype=fp8", "method=ngram", "workload.limit=2")
    seen = capsys.readouterr()
    assert (caplog.text + seen.out + seen.err).count(words) == 1
    assert sum(words in warning for warning in summary["warnings"]) == 1


def test_an_engine_without_a_run_logs_the_warning_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_folder(tmp_path / "target", gemma4_config())
    typed = ["target=custom", f"target.checkpoint={folder}", "target.weights=random"]
    monkeypatch.setattr(notes, "_logged", set())
    for _ in range(2):
        engine = hydraspec.build_engine([*typed, "method=none", "engine.kv_cache.dtype=fp8"])
        engine.baseline()
        engine.close()
    assert caplog.text.count("rounds keys and values") == 1

"""A whole run with a fake engine: the run folder to the letter, and runs that do not end well."""

from __future__ import annotations

import errno
import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_engine import Behaviour, FakeEngine
from fake_runs import write_lines
from records import json_lines

from hydraspec.config import to_dict
from hydraspec.config.schema import MethodConfig, RunConfig, Verification
from hydraspec.lab import run as run_module
from hydraspec.metrics import files
from hydraspec.types import ConfigurationError, WorkloadError

Use = Callable[[FakeEngine], FakeEngine]
Run = Callable[[], dict[str, Any]]

# Keys of the contract, to the letter.
SUMMARY_KEYS = """
schema_version status engine target target_checkpoint method drafter num_speculative_tokens
num_requests num_errors num_output_tokens num_image_tokens
num_drafts num_draft_tokens num_accepted_tokens num_jump_forward_tokens
acceptance_length acceptance_rate acceptance_rate_per_position
conditional_acceptance_rate_per_position acceptance_length_by_category output_tokens_per_second
time_per_output_token_ms time_to_first_token_ms time_breakdown_ms accuracy baseline speedup lossless
cudagraph warnings
"""
SPEED_KEYS = """
output_tokens_per_second time_per_output_token_ms time_to_first_token_ms time_breakdown_ms accuracy
"""
REQUEST_KEYS = """
id category prompt_token_ids output_token_ids text finish_reason error num_drafts
drafted_per_position accepted_per_position reached_per_position speculative_decoding ttft_ms
latency_ms num_cached_tokens num_image_tokens
decode_tokens decode_ms decode_steps queue_ms inter_token_ms correct baseline meta
"""
TRACE_KEYS = """
request step num_computed_tokens draft_token_ids num_accepted jump_forward_places output_token_ids
target_ranks target_probabilities
"""


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} in a JSON file")


def read_summary(tmp_path: Path) -> dict[str, Any]:
    text = (tmp_path / "run" / "summary.json").read_text(encoding="utf-8")
    summary: dict[str, Any] = json.loads(text, parse_constant=no_constant)
    return summary


def test_the_run_folder(
    config: RunConfig, use_engine: Use, run_config: Run, tmp_path: Path
) -> None:
    config.metrics.steps = config.metrics.trace = True
    engine = use_engine(FakeEngine())
    summary = run_config()
    folder = tmp_path / "run"
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.yaml",
        "env.json",
        "overrides.yaml",
        "report.html",
        "requests.jsonl",
        "step_costs.json",
        "steps.jsonl",
        "summary.json",
        "trace.jsonl",
    ]
    assert read_summary(tmp_path) == summary
    assert summary.keys() >= {*SUMMARY_KEYS.split()}
    assert (summary["target_checkpoint"], summary["drafter"]) == ("zoo:tiny_fake", None)
    assert summary["baseline"].keys() >= {*SPEED_KEYS.split()}
    assert summary["lossless"].keys() >= {"verdict", "num_requests_checked", "first_divergence"}
    assert yaml.safe_load((folder / "config.yaml").read_text()) == to_dict(config)
    assert yaml.safe_load((folder / "overrides.yaml").read_text()) == ["method=gemma4_mtp"]
    env = json.loads((folder / "env.json").read_text())
    assert {"python", "versions", "device", "git"} <= env.keys()
    assert {"hydraspec", "torch", "transformers", "hydra-core", "numpy"} <= env["versions"].keys()
    assert engine.closed


def test_figures_agree_with_each_other(
    config: RunConfig, use_engine: Use, run_config: Run, tmp_path: Path
) -> None:
    """Catches a summary whose counts are not those of requests.jsonl and trace.jsonl."""
    config.metrics.trace = True
    use_engine(FakeEngine())
    summary = run_config()
    rows = json_lines(tmp_path / "run" / "requests.jsonl")
    trace = json_lines(tmp_path / "run" / "trace.jsonl")
    assert [list(row) for row in rows] == [REQUEST_KEYS.split()] * 6
    assert [row["id"] for row in rows] == [f"task-{i}" for i in range(6)]
    assert {tuple(line) for line in trace} == {tuple(TRACE_KEYS.split())}
    assert summary["num_drafts"] == sum(row["num_drafts"] for row in rows) == len(trace)
    assert summary["num_accepted_tokens"] == sum(line["num_accepted"] for line in trace)
    assert summary["num_output_tokens"] == sum(len(row["output_token_ids"]) for row in rows)
    mean = summary["acceptance_length"]["mean"]
    assert mean == pytest.approx(1 + summary["num_accepted_tokens"] / summary["num_drafts"])
    assert sum(summary["acceptance_rate_per_position"]) == pytest.approx(mean - 1)
    assert summary["speedup"]["mean"] == pytest.approx(
        summary["output_tokens_per_second"] / summary["baseline"]["output_tokens_per_second"]
    )
    assert summary["accuracy"]["exact_match"] == pytest.approx(4 / 6)
    assert summary["baseline"]["accuracy"] == summary["accuracy"]
    assert summary["lossless"]["verdict"] == "identical"
    for row in rows:  # a trace line's outputs directly follow its newest token
        whole = row["prompt_token_ids"] + row["output_token_ids"]
        for line in (line for line in trace if line["request"] == row["id"]):
            start = line["num_computed_tokens"] + 1
            assert whole[start : start + len(line["output_token_ids"])] == line["output_token_ids"]


def test_steps_are_the_methods_and_count_on_through_rounds(
    config: RunConfig, use_engine: Use, run_config: Run, tmp_path: Path
) -> None:
    config.metrics.steps = True
    use_engine(FakeEngine())
    summary = run_config()
    steps = json_lines(tmp_path / "run" / "steps.jsonl")
    assert [line["step"] for line in steps] == list(range(summary["num_steps"]))
    assert steps[0].keys() >= {"phase_ms", "total_ms", "requests", "num_preempted", "kv_usage"}
    assert any(part["draft_token_ids"] for line in steps for part in line["requests"])


def test_method_none_has_no_baseline(
    config: RunConfig, use_engine: Use, run_config: Run, tmp_path: Path
) -> None:
    """Catches NaN and a baseline of itself where nothing is drafted."""
    config.method = MethodConfig(name="none", num_speculative_tokens=0)
    config.warnings.append("K has no effect")
    use_engine(FakeEngine(method="none", num_speculative_tokens=0))
    summary = run_config()
    assert read_summary(tmp_path) == summary
    assert (summary["baseline"], summary["speedup"]) == (None, None)
    assert summary["lossless"]["verdict"] == "not_checked"
    assert summary["lossless"]["reason"] == "method=none is the baseline"
    nothing = {"mean": None, "ci95": None, "mean_over_requests": None}
    assert summary["acceptance_length"] == nothing
    assert summary["acceptance_rate_per_position"] == []
    assert summary["warnings"] == ["K has no effect"]


def test_without_baseline_or_with_synthetic_verification_nothing_is_judged(
    config: RunConfig, use_engine: Use, run_config: Run
) -> None:
    use_engine(FakeEngine())
    config.baseline = False
    config.sampling.temperature = 0.5
    lossless = run_config()["lossless"]
    assert (lossless["verdict"], lossless["reason"]) == ("not_checked", "baseline=false")
    assert lossless["num_requests_sampled"] == 6
    config.sampling.temperature = 0
    config.baseline = True
    config.method.verification = Verification.synthetic
    use_engine(FakeEngine(Behaviour(wrong_from={0: 2})))
    lossless = run_config()["lossless"]
    assert (lossless["verdict"], lossless["reason"]) == ("not_checked", "synthetic verification")


def test_a_wrong_token_is_found(config: RunConfig, use_engine: Use, run_config: Run) -> None:
    use_engine(FakeEngine(Behaviour(wrong_from={4: 3})))
    lossless = run_config()["lossless"]
    assert lossless["verdict"] == "diverged"
    assert lossless["first_divergence"]["request"] == "task-4"
    assert lossless["first_divergence"]["position"] == 3


def test_requests_that_fail_leave_the_others_alone(
    config: RunConfig, use_engine: Use, run_config: Run, tmp_path: Path
) -> None:
    use_engine(FakeEngine(Behaviour(error_indices={1, 5})))
    summary = run_config()
    assert (summary["status"], summary["num_requests"], summary["num_errors"]) == ("ok", 6, 2)
    assert summary["lossless"] == summary["lossless"] | {
        "verdict": "identical",
        "num_requests_checked": 4,
    }
    rows = json_lines(tmp_path / "run" / "requests.jsonl")
    assert (rows[1]["finish_reason"], rows[1]["error"]) == ("error", "prompt is too long")
    assert rows[1]["correct"] is None
    assert summary["warnings"] == ["2 requests ended with an error: prompt is too long"]


def test_a_run_in_which_nothing_finished_has_failed(
    config: RunConfig, use_engine: Use, run_config: Run, tmp_path: Path
) -> None:
    use_engine(FakeEngine(Behaviour(error_indices=set(range(6)))))
    summary = run_config()
    assert read_summary(tmp_path) == summary
    assert (summary["status"], summary["num_errors"]) == ("failed", 6)
    assert summary["output_tokens_per_second"] is None


@pytest.mark.parametrize("step", [2, 17], ids=["while warming up", "in the second round"])
def test_an_interrupt_saves_what_finished(
    config: RunConfig, use_engine: Use, run_config: Run, tmp_path: Path, step: int
) -> None:
    engine = use_engine(FakeEngine(Behaviour(raise_at_step={step: KeyboardInterrupt()})))
    with pytest.raises(KeyboardInterrupt):
        run_config()
    summary = read_summary(tmp_path)
    rows = json_lines(tmp_path / "run" / "requests.jsonl")
    assert summary["status"] == "interrupted"
    assert summary["num_requests"] == len(rows) == (0 if step == 2 else 5)
    assert summary["num_requests_in_workload"] == 6
    assert summary["lossless"]["verdict"] == ("not_checked" if step == 2 else "identical")
    assert (tmp_path / "run" / "report.html").exists()
    assert engine.closed


def test_an_interrupt_while_saving_waits_for_whole_files(
    config: RunConfig,
    use_engine: Use,
    run_config: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a second Ctrl-C that leaves a summary half written or missing."""
    use_engine(FakeEngine())
    write_requests = run_module.RunFolder.write_requests

    def interrupted(folder: run_module.RunFolder, rows: list[Any]) -> None:
        signal.raise_signal(signal.SIGINT)
        write_requests(folder, rows)

    monkeypatch.setattr(run_module.RunFolder, "write_requests", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_config()
    assert read_summary(tmp_path)["num_requests"] == 6
    assert len(json_lines(tmp_path / "run" / "requests.jsonl")) == 6


def test_a_crash_saves_what_finished_and_is_raised(
    config: RunConfig, use_engine: Use, run_config: Run, tmp_path: Path
) -> None:
    use_engine(FakeEngine(Behaviour(raise_at_step={17: RuntimeError("out of memory")})))
    with pytest.raises(RuntimeError, match="out of memory"):
        run_config()
    summary = read_summary(tmp_path)
    assert summary["status"] == "failed"
    assert summary["num_requests"] == 5
    assert "RuntimeError: out of memory" in summary["warnings"][0]


def test_a_bad_workload_is_refused_before_anything_is_loaded(
    config: RunConfig, run_config: Run, workload_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload_file.write_text("{", encoding="utf-8")
    monkeypatch.setattr(run_module.factory, "build_engine", lambda config: pytest.fail("loaded"))
    with pytest.raises(WorkloadError, match=r"workload\.jsonl:1: not JSON"):
        run_config()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"prompt_token_ids": [64]}, "prompt_token_ids: 64 is outside"),
        ({"prompt": "untokenisable"}, "request '1': cannot be tokenised"),
    ],
)
def test_what_the_target_cannot_read_is_refused_with_its_line(
    config: RunConfig,
    use_engine: Use,
    run_config: Run,
    workload_file: Path,
    line: dict[str, Any],
    says: str,
) -> None:
    write_lines(workload_file, [{"prompt": "a"}, line])
    engine = use_engine(FakeEngine())
    with pytest.raises(WorkloadError, match=rf"workload\.jsonl:2: {says}"):
        run_config()
    assert engine.closed


def test_configured_stop_ids_outside_the_vocabulary_are_refused(
    config: RunConfig, use_engine: Use, run_config: Run
) -> None:
    use_engine(FakeEngine())
    config.sampling.stop_token_ids = [64]
    with pytest.raises(ConfigurationError, match=r"sampling\.stop_token_ids\[0\]=64 is outside"):
        run_config()


def test_a_folder_that_cannot_be_made_is_one_clear_error(
    config: RunConfig, run_config: Run, tmp_path: Path
) -> None:
    (tmp_path / "run").write_text("a file", encoding="utf-8")
    with pytest.raises(OSError, match=r"cannot write the run folder: .*hydra\.run\.dir") as caught:
        run_config()
    assert caught.value.filename == str(tmp_path / "run")


def test_a_full_disk_leaves_no_half_written_file(
    config: RunConfig,
    use_engine: Use,
    run_config: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_engine(FakeEngine())

    def full(descriptor: int) -> None:
        if (tmp_path / "run" / "requests.jsonl").exists():
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device; free some space") as caught:
        run_config()
    assert caught.value.errno == errno.ENOSPC
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "config.yaml",
        "env.json",
        "overrides.yaml",
        "requests.jsonl",
    ]
    assert len(json_lines(tmp_path / "run" / "requests.jsonl")) == 12, "as they finished"


def test_a_full_disk_under_a_growing_file_is_one_clear_error(
    config: RunConfig, use_engine: Use, run_config: Run, tmp_path: Path
) -> None:
    config.metrics.steps = True
    use_engine(FakeEngine())
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "steps.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device; free some space") as caught:
        run_config()
    assert caught.value.filename == str(tmp_path / "run" / "steps.jsonl")


def test_numbers_that_are_not_finite_become_null() -> None:
    line = files.json_line({"a": math.nan, "b": [math.inf, 1.5], "c": (1, 2)})
    assert json.loads(line, parse_constant=no_constant) == {
        "a": None,
        "b": [None, 1.5],
        "c": [1, 2],
    }

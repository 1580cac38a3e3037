"""Whole runs of the shipped models with the native engine, as a user of `hydraspec.run` has them.

Nothing is faked. What a figure must be is wide enough for another machine's rounding.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import hydraspec
from hydraspec.models.checkpoint.reader import resolve_folder

MIN_ACCEPTANCE_LENGTH = 2.3  # of 4 with K=3; a drafter that is read wrongly falls below 1.5
SYNTHETIC_TOLERANCE = 0.3  # of a mean over 8 requests, about 4 of its standard errors


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Requests of the tiny workload; the summary, checked against summary.json."""
    monkeypatch.chdir(tmp_path)

    def run_here(*overrides: str, limit: int = 4) -> dict[str, Any]:
        few = [f"workload.limit={limit}", "tracker=none", "hydra.run.dir=run"]
        summary = hydraspec.run([*overrides, *few])
        text = (tmp_path / "run" / "summary.json").read_text(encoding="utf-8")
        assert Path(summary.pop("run_dir")) == tmp_path / "run"
        assert json.loads(text) == summary
        assert (summary["status"], summary["engine"]) == ("ok", "native")
        assert (summary["num_requests"], summary["num_errors"]) == (limit, 0)
        return summary

    return run_here


def check_lossless(summary: dict[str, Any]) -> None:
    lossless, baseline = summary["lossless"], summary["baseline"]
    assert (lossless["verdict"], lossless["num_requests_checked"]) == ("identical", 4)
    assert summary["acceptance_length"]["mean"] >= MIN_ACCEPTANCE_LENGTH
    assert summary["accuracy"]["exact_match"] == baseline["accuracy"]["exact_match"] == 1.0
    assert baseline["num_requests"] == 4
    assert baseline["num_output_tokens"] == summary["num_output_tokens"]
    assert summary["speedup"]["mean"] > 0


@pytest.mark.parametrize(
    "target", ["tiny_gemma4", "tiny_gemma4_e", "tiny_gemma4_moe", "tiny_gemma4_unified"]
)
def test_a_shipped_drafter_is_lossless_and_accepted(run, target):  # type: ignore[no-untyped-def]
    """Catches a drafter on the wrong layers or positions (acceptance), and a verifier that lets
    wrong drafts through (verdict).
    """
    summary = run(f"target={target}")
    assert (summary["target"], summary["method"]) == (target, "gemma4_mtp")
    check_lossless(summary)


def test_where_k_is_chosen_a_broken_drafter_is_sent_to_the_doctor(run, tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    """Catches the advice to lower K where the engine chose 0 since no draft was ever accepted."""
    monkeypatch.setattr("hydraspec.engine.run.step_costs.NUM_STEPS", 4)
    head = Path(shutil.copytree(resolve_folder("zoo:tiny_gemma4-eagle3"), tmp_path / "head"))
    (file,) = head.glob("*.safetensors")
    tensors = load_file(file)
    file.unlink()
    save_file({**tensors, "fc.weight": -tensors["fc.weight"]}, file, metadata={"format": "pt"})
    typed = f"method.checkpoint={head}"
    chosen = ["method.num_speculative_tokens=auto", "method.max_speculative_tokens=4"]
    summary = run("method=eagle3", typed, *chosen, limit=8)
    said = [each for each in summary["warnings"] if "hardly ever accepted" in each]
    assert said, summary["warnings"]
    assert "in the steps whose costs were measured" in said[0] or summary["num_drafts"] >= 50
    command = f"python -m hydraspec.doctor target=tiny_gemma4 method=eagle3 {typed}"
    assert summary["warnings"][-1].endswith(command)


def test_block_verification_is_lossless(run):  # type: ignore[no-untyped-def]
    summary = run("method.verification=block")
    assert summary["verification"] == "block"
    check_lossless(summary)


def test_synthetic_verification_has_the_length_asked_for(run):  # type: ignore[no-untyped-def]
    typed = ["method.verification=synthetic", "method.synthetic_acceptance_length=2.5"]
    summary = run(*typed, limit=8)
    assert summary["acceptance_length"]["mean"] == pytest.approx(2.5, abs=SYNTHETIC_TOLERANCE)
    assert summary["lossless"]["verdict"] == "not_checked"
    assert summary["baseline"]["accuracy"]["exact_match"] == 1.0


def test_probabilistic_drafts_of_a_sampled_run(run):  # type: ignore[no-untyped-def]
    summary = run("sampling=stochastic", "method.draft_sampling=probabilistic", "baseline=false")
    assert summary["draft_sampling"] == "probabilistic"
    assert summary["lossless"]["verdict"] == "not_checked"
    assert 1.5 < summary["acceptance_length"]["mean"] <= 4


def test_prompts_that_are_too_long_say_so(run, tmp_path, capsys):  # type: ignore[no-untyped-def]
    """Catches a failed run whose reason stands in requests.jsonl alone."""
    path = tmp_path / "long.jsonl"
    path.write_text((json.dumps({"prompt_token_ids": [7] * 5000}) + "\n") * 2)
    summary = hydraspec.run(["workload=jsonl", f"workload.path={path}", "tracker=none"])
    assert (summary["status"], summary["num_errors"]) == ("failed", 2)
    (warning,) = summary["warnings"]
    assert warning.startswith("2 requests ended with an error: ")
    assert "max_model_len" in warning
    assert "5000" in warning
    assert "2 requests ended with an error" in capsys.readouterr().out

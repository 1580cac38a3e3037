"""A run whose outputs are not the target's: exit status, last line, sweeps and Python.

The lab is real, the engine a fake one that is wrong from some output token on.
"""

import json
from pathlib import Path

import pytest
from fake_engine import Behaviour, FakeEngine

import hydraspec
from hydraspec.errors import CheckpointError, ConfigurationError
from hydraspec.lab import run as run_module

TYPED = ("workload=jsonl", "workload.path=lines.jsonl", "tracker=none")
WRONG_K, UNUSABLE_K, FAILED_K = 3, 5, 6  # jobs of a sweep that do not end well


@pytest.fixture
def engines(command, monkeypatch):
    """The engines that were built; those with WRONG_K are wrong in request b from output token 2,
    and with FAILED_K no request finishes.
    """
    built = []

    def build(config):
        k = config.method.num_speculative_tokens
        if k == UNUSABLE_K:
            raise CheckpointError("model.safetensors is cut off")
        behaviour = Behaviour(
            wrong_from={1: 2} if k == WRONG_K else {},
            error_indices={0, 1, 2} if k == FAILED_K else set(),
        )
        built.append(FakeEngine(behaviour, num_speculative_tokens=k))
        return built[-1]

    monkeypatch.setattr(run_module.factory, "build_engine", build)
    lines = [{"id": name, "prompt": name * 3, "max_tokens": 6} for name in "abc"]
    Path("lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return built


@pytest.fixture
def hydraspec_main(engines, command, capsys):
    """Exit status, and the last line of stderr; the log is left out."""

    def call(*argv):
        status = command(*argv, *TYPED)
        said = [line for line in capsys.readouterr().err.splitlines() if line[0] != "["]
        return status, said[-1] if said else ""

    return call


def sweep(hydraspec_main, *argv, ks="1,3,2"):
    keys = ("-m", "hydra.sweep.dir=sweep", f"method.num_speculative_tokens={ks}")
    return hydraspec_main(*keys, *argv)


def test_a_diverged_run_exits_with_4_once_it_is_saved(hydraspec_main):
    status, said = hydraspec_main("hydra.run.dir=run")
    assert status == 4
    assert said.startswith(
        "hydraspec: diverged: request b differs from the baseline at output token 2 "
        "(1 of 3 requests differ; target margin 1, "
    )
    saved = json.loads(Path("run/summary.json").read_text())
    assert (saved["status"], saved["lossless"]["verdict"]) == ("ok", "diverged")
    assert Path("run/report.html").is_file()
    assert hydraspec_main("hydra.run.dir=run", "method.num_speculative_tokens=2") == (0, "")


def test_one_diverged_job_of_a_sweep(hydraspec_main, engines):
    """Also where the sweep is started again, and the job is not run again."""
    for _ in range(2):
        status, said = sweep(hydraspec_main)
        assert status == 4
        assert said.startswith("hydraspec: job 1 diverged: request b differs from the baseline ")
        assert len(engines) == 3
    assert len(json.loads(Path("sweep/compare.json").read_text())["rows"]) == 3


def test_other_failures_of_a_sweep_come_first(hydraspec_main):
    status, said = sweep(hydraspec_main, ks="6,3,5")
    assert status == 1
    assert "hydraspec: job 1 diverged: request b " in said


def test_python_gets_the_verdict_the_folder_and_no_exception(engines, capsys):
    result = hydraspec.run(TYPED)
    assert (result["status"], result["lossless"]["verdict"]) == ("ok", "diverged")
    folder = Path(result["run_dir"])
    assert folder.is_absolute()
    assert json.loads((folder / "summary.json").read_text()) == {
        key: value for key, value in result.items() if key != "run_dir"
    }
    assert capsys.readouterr().err.startswith("hydraspec: diverged: request b ")


@pytest.mark.parametrize("k", [WRONG_K, 1])
def test_a_quiet_run_prints_nothing(engines, capfd, k):
    """Also where it diverges, or has warnings: both are in what it returns."""
    typed = [*TYPED, f"method.num_speculative_tokens={k}", "sampling.top_k=5"]
    result = hydraspec.run(typed, quiet=True)
    assert result["warnings"]
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ConfigurationError):
        hydraspec.run(["method.k=1"], quiet=True)

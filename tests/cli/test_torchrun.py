"""Under torchrun a process is a rank: how many there must be, and a run from its command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hydraspec
from hydraspec.cli import torchrun
from hydraspec.cli.compose import plan
from hydraspec.distributed.launch import PARENT
from hydraspec.errors import ConfigurationError

QUICK = ["method=none", "workload.limit=2", "tracker=none", "engine.device=cpu"]


def check(monkeypatch: pytest.MonkeyPatch, world_size: int, *typed: str) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    torchrun.check_size([job.config for job in plan(typed).jobs])


@pytest.mark.parametrize(
    ("world_size", "typed", "said"),
    [
        (4, ["parallelism=tp2"], "parallelism.tensor=2 makes 2 ranks, and torchrun started 4"),
        (2, ["parallelism=tp2_pp2"], "parallelism.tensor=2 makes 4 ranks, and torchrun started 2"),
        (1, ["parallelism=dp2"], "parallelism.data=2 makes 2 ranks, and torchrun started 1"),
        (2, [], "parallelism.tensor=1 makes 1 ranks, and torchrun started 2"),
        (2, ["engine=vllm"], "engine.name=vllm is one process, and torchrun started 2"),
        (2, ["engine=transformers"], "engine.name=transformers is one process"),
        (
            2,
            ["bench=decode", "engine.max_num_seqs=32", "parallelism=tp2"],
            "bench.isolate=true starts processes of its own",
        ),
    ],
)
def test_another_number_of_ranks_is_refused(
    monkeypatch: pytest.MonkeyPatch, world_size: int, typed: list[str], said: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check(monkeypatch, world_size, *typed)
    assert str(caught.value).startswith(said)
    assert len(str(caught.value).splitlines()) == 3


def test_as_many_ranks_as_asked_for_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, 4, "parallelism=tp2_pp2")
    check(monkeypatch, 1, "engine=vllm", "parallelism=tp2")
    monkeypatch.setenv(PARENT, "1")  # a rank of ours has nothing to do with torchrun
    check(monkeypatch, 3, "parallelism=tp2")


def test_ranks_do_not_call_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches every rank of a script starting ranks of its own."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="called by each of 2 ranks"):
        hydraspec.run(["parallelism=tp2"])


def under_torchrun(folder: Path, *typed: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    return subprocess.run(
        [*command, "-m", "hydraspec", *typed, f"hydra.run.dir={folder}"],
        capture_output=True,
        text=True,
        timeout=150,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.mark.slow
def test_a_run_of_torchrun(tmp_path: Path) -> None:
    done = under_torchrun(tmp_path, *QUICK, "parallelism=tp2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Report: ") == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["num_requests"]) == ("ok", 2)


@pytest.mark.slow
def test_a_refusal_of_torchrun_is_told_once(tmp_path: Path) -> None:
    done = under_torchrun(tmp_path, *QUICK, "parallelism=tp4")
    assert done.returncode != 0
    assert done.stderr.count("hydraspec: parallelism.tensor=4 makes 4 ranks") == 1
    assert "exitcode: 2" in done.stderr
    assert "exitcode: 1" not in done.stderr

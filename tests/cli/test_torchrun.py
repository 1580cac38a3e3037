"""Under torchrun a process is a rank: how many there must be, and a run from its command."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from commands import Command

import hydraspec
from hydraspec import factory
from hydraspec.cli.compose import plan
from hydraspec.cli.rank_job import rank_job
from hydraspec.cli.ranks import PROGRAM
from hydraspec.errors import ConfigurationError
from hydraspec.parallel import torchrun
from hydraspec.parallel.faults import LostRankError, of_exit
from hydraspec.parallel.job import RankJob
from hydraspec.parallel.launch import PARENT
from hydraspec.signals import interrupts_stay_interrupts

QUICK = ["method=none", "workload.limit=2", "tracker=none", "engine.device=cpu"]
ENDS_WITHIN_S = 30.0


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


def planned(folder: Path) -> RankJob:
    (job,) = plan(["parallelism=tp2", f"hydra.run.dir={folder}"]).jobs
    return rank_job(job, quiet=True, logs=False)


def test_a_lost_rank_is_named_despite_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches torchrun's interrupt, which a killed rank brings about, being told instead."""
    fleet = MagicMock()
    fleet.watch.failed = False
    fleet.fault.return_value = of_exit(1, 2, 40, -9)
    monkeypatch.setattr(torchrun, "met", lambda: fleet)
    monkeypatch.setattr(factory, "check_split", lambda config: None)
    monkeypatch.setattr(torchrun, "ignore_interrupts", lambda: None)
    for lost in (KeyboardInterrupt(), LostRankError("rank 1")):
        lost.__context__ = KeyboardInterrupt()
        fleet.joined.side_effect = lost
        told = pytest.raises(LostRankError, match="rank 1 of 2 was killed")
        with told, interrupts_stay_interrupts():
            torchrun.run(planned(tmp_path), PROGRAM)
    fleet.fault.return_value = None
    fleet.joined.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        torchrun.run(planned(tmp_path), PROGRAM)


class Left(Exception):
    """In place of the end of the process."""


@pytest.mark.parametrize("failed", [True, False])
def test_the_first_rank_takes_nothing_down_once_one_is_lost(
    monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    fleet = MagicMock()
    fleet.watch.failed = failed
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torchrun, "_meet", lambda: fleet)
    monkeypatch.setattr(torchrun, "leave", MagicMock(side_effect=Left))
    monkeypatch.setattr(torchrun, "ignore_interrupts", lambda: None)
    with pytest.raises(Left) if failed else nullcontext():
        assert torchrun.end(3) == 3
    with pytest.raises(Left if failed else ZeroDivisionError), torchrun.leading():
        raise ZeroDivisionError
    fleet.end.assert_called_with()
    assert fleet.kill_hung.called == failed


@pytest.mark.slow
def test_a_run_of_torchrun(tmp_path: Path) -> None:
    command = Command(tmp_path, *QUICK, "parallelism=tp2", torchrun=2)
    errors = command.wait()
    assert command.process.returncode == 0, errors
    assert command.output.count("Report: ") == 1
    summary = command.summary()
    assert (summary["status"], summary["num_requests"]) == ("ok", 2)


@pytest.mark.slow
def test_a_refusal_of_torchrun_is_told_once(tmp_path: Path) -> None:
    command = Command(tmp_path, *QUICK, "parallelism=tp4", torchrun=2)
    errors = command.wait()
    assert command.process.returncode != 0
    assert errors.count("hydraspec: parallelism.tensor=4 makes 4 ranks") == 1
    assert "exitcode: 2" in errors
    assert "exitcode: 1" not in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "fault", "said"),
    [
        (1, "raise", "failed in step 40: ValueError: the seventh head is missing"),
        (1, "kill", "was killed or has exited in step "),
        (1, "stop", "gave no sign of life for 4 s in step "),
        (0, "raise", "failed in step 40: ValueError: the seventh head is missing"),
        (0, "kill", "was killed or has exited in step "),
        (0, "stop", "gave no sign of life for 4 s in step "),
    ],
)
def test_a_rank_of_torchrun_that_fails_is_named(
    tmp_path: Path, rank: int, fault: str, said: str
) -> None:
    """Catches an interrupt of torchrun being told instead, and a rank that stays: a stopped one for
    ever, as only SIGKILL ends it, and the first one, as it takes its groups down."""
    few = ["workload.limit=12", "sampling.max_tokens=8"]
    split = ["parallelism=tp2", "parallelism.timeout_s=6"]
    command = Command(tmp_path, *QUICK, *few, *split, fault=f"{rank}:40:{fault}", torchrun=2)
    errors = command.wait()
    command.ends_within(ENDS_WITHIN_S)
    assert time.time() - command.reached.stat().st_mtime < ENDS_WITHIN_S
    if rank or fault != "raise":
        assert errors.count(f"hydraspec: rank {rank} of 2 {said}") == 1, errors
    else:
        assert "ValueError: the seventh head is missing" in errors
    assert "exitcode  : 1 " in errors
    assert "interrupted" not in errors
    assert command.summary()["status"] == "failed"
    if rank or fault != "raise":
        assert f"saved: the requests that were finished, in {command.folder}" in errors

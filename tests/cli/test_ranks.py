"""A command that runs as several ranks, end to end, and what it says and saves when one fails."""

from __future__ import annotations

import errno
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from commands import Command

import hydraspec
from hydraspec.cli import ranks
from hydraspec.cli.compose import plan
from hydraspec.cli.folders import folder_message
from hydraspec.errors import CannotWriteError, UserError
from hydraspec.metrics.run_files import UNSAVED
from hydraspec.parallel.faults import Fault, Kind
from hydraspec.parallel.launch import Ended

QUICK = ["method=none", "tracker=none", "engine.device=cpu", "workload.limit=12"]
ENDS_WITHIN_S = 30.0


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]


def tokens(folder: Path) -> dict[str, list[int]]:
    return {row["id"]: row["output_token_ids"] for row in rows(folder)}


def test_two_ranks_decode_what_one_does(tmp_path: Path) -> None:
    few = [*QUICK, "workload.limit=3", "sampling.max_tokens=12"]
    one = hydraspec.run([*few, f"hydra.run.dir={tmp_path / 'one'}"], quiet=True)
    two = hydraspec.run([*few, f"hydra.run.dir={tmp_path / 'two'}", "parallelism=tp2"], quiet=True)
    assert tokens(tmp_path / "two") == tokens(tmp_path / "one")
    assert two["num_output_tokens"] == one["num_output_tokens"] > 0
    assert two["status"] == "ok"


def test_a_mistake_of_every_rank_is_told_once(tmp_path: Path) -> None:
    command = Command(tmp_path, *QUICK, "parallelism=tp2", "target.max_model_len=100000000")
    errors = command.wait()
    assert command.process.returncode == 2, errors
    assert errors.count("target.max_model_len=100000000") == 1
    assert "Traceback" not in errors
    assert not command.processes()


def test_a_full_disk_is_told_as_one_process_tells_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches the fault of rank 0, which has no remedy, being told instead."""
    (job,) = plan(["parallelism=tp2", f"hydra.run.dir={tmp_path}"]).jobs
    full = CannotWriteError(errno.ENOSPC, "No space left on device", "outputs/requests.jsonl")

    fault = Fault(rank=0, num_ranks=2, kind=Kind.error, step=40, what="failed")
    told = json.dumps({"cannot_write": [full.errno, full.strerror, full.filename]})
    ended = Ended(fault=fault, interrupted=False, result=told)
    monkeypatch.setattr(ranks, "run_ranks", lambda *_, **__: ended)
    with pytest.raises(CannotWriteError) as caught:
        ranks.run(job, quiet=True, logs=False)
    assert folder_message(caught.value) == folder_message(full)


@pytest.mark.parametrize(
    ("rank", "kind", "interrupted", "saves"),
    [
        (0, Kind.ended, False, True),
        (0, Kind.hung, True, True),
        (1, Kind.ended, False, True),
        (1, Kind.mistake, False, False),
    ],
)
def test_what_a_journal_holds_is_saved_whoever_failed_first(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    rank: int,
    kind: Kind,
    interrupted: bool,
    saves: bool,
) -> None:
    """Catches the loss of a first rank that is ended after another one, or that hangs until the
    person who waits presses Ctrl-C."""
    (job,) = plan(["parallelism=tp2", f"hydra.run.dir={tmp_path}"]).jobs
    saved: list[Fault] = []
    fault = Fault(rank=rank, num_ranks=2, kind=kind, step=40, what="failed", exit_code=2)
    ended = Ended(fault=fault, interrupted=interrupted)
    monkeypatch.setattr(ranks, "run_ranks", lambda *_, **__: ended)
    monkeypatch.setattr(ranks, "save_for_first", lambda job, fault, *_, **__: saved.append(fault))
    with pytest.raises(KeyboardInterrupt if interrupted else UserError):
        ranks.run(job, quiet=True, logs=False)
    assert saved == ([fault] if saves else [])


@pytest.mark.slow
def test_an_interrupt_of_a_first_rank_that_hangs_saves_what_was_finished(tmp_path: Path) -> None:
    command = Command(
        tmp_path, *QUICK, "parallelism=tp2", "sampling.max_tokens=8", fault="0:40:stop"
    )
    command.reaches_fault()
    command.process.send_signal(signal.SIGINT)
    errors = command.wait()
    assert command.process.returncode == 130, errors
    assert errors.rstrip().endswith("hydraspec: interrupted: what was finished is saved")
    assert 0 < len(rows(command.folder)) == command.summary()["num_requests"] < 12
    assert not command.processes()


@pytest.mark.slow
def test_a_full_disk_is_one_message(tmp_path: Path) -> None:
    typed = ["parallelism=tp2", "sampling.max_tokens=8"]
    command = Command(tmp_path, *QUICK, *typed, fault="0:40:disk")
    errors = command.wait()
    assert command.process.returncode == 1, errors
    assert errors.count("hydraspec: ") == 1
    assert "hydraspec: outputs/requests.jsonl: there is no space left\n  allowed: " in errors
    assert "Traceback" not in errors
    assert not command.processes()


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["pp2", "dp2", "tp2_pp2"])
def test_every_split_decodes_what_one_rank_does(tmp_path: Path, choice: str) -> None:
    few = ["tracker=none", "engine.device=cpu", "workload.limit=4", "baseline=false"]
    for name, typed in (("one", few), ("several", [*few, f"parallelism={choice}"])):
        hydraspec.run([*typed, f"hydra.run.dir={tmp_path / name}"], quiet=True)
    assert tokens(tmp_path / "several") == tokens(tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "fault", "said"),
    [
        (1, "raise", "failed in step 40: ValueError: the seventh head is missing"),
        (1, "memory", "failed in step 40: MemoryError: out of memory"),
        (1, "kill", "was killed by SIGKILL in step 40"),
        (1, "stop", "gave no sign of life for 4 s in step 40"),
        (1, "spin", "made no progress for 6 s in step 40"),
        (0, "raise", "failed in step 40: ValueError: the seventh head is missing"),
        (0, "kill", "was killed by SIGKILL in step 40"),
        (0, "stop", "gave no sign of life for 4 s in step 40"),
    ],
)
def test_a_rank_that_fails_ends_the_run(tmp_path: Path, rank: int, fault: str, said: str) -> None:
    """Catches a run that hangs, that names a survivor, or that loses what was finished."""
    typed = ["parallelism=tp2", "parallelism.timeout_s=6", "sampling.max_tokens=8"]
    command = Command(tmp_path, *QUICK, *typed, fault=f"{rank}:40:{fault}")
    errors = command.wait()
    assert time.time() - command.reached.stat().st_mtime < ENDS_WITHIN_S
    assert command.process.returncode == 1, errors
    assert f"hydraspec: rank {rank} of 2 {said}" in errors
    assert errors.count("hydraspec: ") == 1
    assert ("Traceback" in errors) == ((rank, fault) == (0, "raise"))
    assert not command.processes()
    assert f"saved: the requests that were finished, in {command.folder}" in errors
    assert command.summary()["status"] == "failed"
    assert 0 < len(rows(command.folder)) < 12
    assert not (command.folder / UNSAVED).exists()
    if rank == 1 or fault != "raise":
        warning = next(w for w in command.summary()["warnings"] if "ended early" in w)
        assert f"rank {rank}" in warning
        assert said.rpartition("step 40: ")[2] in warning


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_saves_what_was_finished(tmp_path: Path, number: signal.Signals) -> None:
    typed = ["parallelism=tp2", "sampling.max_tokens=8", "workload.limit=64"]
    command = Command(tmp_path, *QUICK, *typed, fault="0:40:none")
    command.reaches_fault()
    command.process.send_signal(number)
    errors = command.wait()
    assert command.process.returncode == 130, errors
    assert errors.count("hydraspec: interrupted: what was finished is saved") == 1
    assert command.summary()["status"] == "interrupted"
    assert 0 < len(rows(command.folder)) < 64
    assert not command.processes()


@pytest.mark.slow
@pytest.mark.parametrize("split", ["tp2", "dp2"])
def test_a_termination_saves_in_the_background_too(tmp_path: Path, split: str) -> None:
    typed = [f"parallelism={split}", "sampling.max_tokens=8", "workload.limit=64"]
    command = Command(tmp_path, *QUICK, *typed, fault="0:40:none", in_background=True)
    command.reaches_fault()
    command.process.send_signal(signal.SIGTERM)
    errors = command.wait()
    assert command.process.returncode == 130, errors
    assert command.summary()["status"] == "interrupted"
    assert not command.processes()


@pytest.mark.slow
def test_a_sweep_over_ranks(tmp_path: Path) -> None:
    sweep = ["-m", "parallelism=single,tp2", "workload.limit=3", "baseline=false"]
    command = Command(tmp_path, *QUICK, *sweep, f"hydra.sweep.dir={tmp_path / 'sweep'}")
    errors = command.wait()
    assert command.process.returncode == 0, errors
    assert tokens(tmp_path / "sweep" / "0") == tokens(tmp_path / "sweep" / "1")
    assert (tmp_path / "sweep" / "compare.json").is_file()


@pytest.mark.slow
def test_a_killed_parent_is_named_in_the_summary(tmp_path: Path) -> None:
    typed = ["parallelism=tp2", "sampling.max_tokens=8", "workload.limit=64"]
    command = Command(tmp_path, *QUICK, *typed, fault="0:40:none")
    command.reaches_fault()
    command.process.kill()
    command.process.communicate(timeout=60)
    command.ends_within(ENDS_WITHIN_S)
    (warning,) = (w for w in command.summary()["warnings"] if "ended early" in w)
    assert "the process that started the ranks is gone" in warning


@pytest.mark.slow
def test_ranks_end_with_their_parent(tmp_path: Path) -> None:
    command = Command(tmp_path, *QUICK, "parallelism=tp2", fault="9:1:none")
    while len(command.processes()) < 3:
        time.sleep(0.1)
    time.sleep(3)
    command.process.kill()
    command.process.communicate(timeout=60)
    command.ends_within(ENDS_WITHIN_S)

"""A process whose environment makes it a rank: what is refused, and a rank that meets no other."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta

import pytest

from hydraspec.cli.main import main
from hydraspec.cli.ranks import PROGRAM
from hydraspec.parallel import fleet as fleets
from hydraspec.parallel import torchrun
from hydraspec.parallel.launch import PARENT

GOOD = {
    **{"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
    **{"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE=abc is no whole number\n  allowed: a whole number, 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 is out of range\n  allowed: a whole number, 1 or more"),
        ({"RANK": ""}, "RANK='' is no whole number\n  allowed: 0 to 1"),
        ({"RANK": "2"}, "RANK=2 is out of range\n  allowed: 0 to 1"),
        ({"LOCAL_RANK": "gpu"}, "LOCAL_RANK=gpu is no whole number\n  allowed: 0 to 1"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set, and RANK=1 and WORLD_SIZE=2 are\n"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR='' names no host"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set, and RANK=1 and WORLD_SIZE=2 are"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT=-1 is out of range\n  allowed: 1 to 65535"),
    ],
    ids=str,
)
def test_an_environment_of_no_rank_is_one_message(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changed: dict[str, str | None],
    said: str,
) -> None:
    for name, value in (GOOD | changed).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    assert main() == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"hydraspec: {said}")
    assert len(printed.splitlines()) == 3


def test_other_environments_pass() -> None:
    torchrun.check_environment({"RANK": "a job's name"})  # of another tool
    torchrun.check_environment({"RANK": "0", "WORLD_SIZE": "1"})
    torchrun.check_environment({"RANK": "0", "WORLD_SIZE": "x", PARENT: "1"})
    torchrun.check_environment(GOOD)


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def test_a_rank_that_meets_no_other_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in (GOOD | place).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(fleets, "TO_START", timedelta(seconds=1))
    torchrun._meet.cache_clear()
    try:
        assert torchrun.follow(PROGRAM) == 1
    finally:
        torchrun._meet.cache_clear()
    printed = capsys.readouterr().err
    where = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={place['MASTER_PORT']}"
    assert f"hydraspec: rank 1 of 2 did not meet the others at {where} within 1 s: " in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("rank", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_a_rank_that_waits_for_others_is_ended_by_a_termination(rank: str) -> None:
    """Catches one that waits five minutes in torch, which handles no signal."""
    place = {"RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with subprocess.Popen(
        [sys.executable, "-m", "hydraspec", "--help"],  # rank 0 meets the others at its end
        env=os.environ | GOOD | place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        time.sleep(6)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=10)
    assert process.returncode in (-signal.SIGTERM, 130)
    assert b"Traceback" not in errors

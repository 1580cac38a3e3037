"""Sweeps by Hydra's launchers: who runs, on which devices, and what comes back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hydraspec.cli import devices, hydra_keys, launchers
from hydraspec.cli.compose import Plan, plan
from hydraspec.cli.devices import own_devices, visible_devices
from hydraspec.cli.launched import Ended, num_devices
from hydraspec.cli.run import _run_by_launcher
from hydraspec.config import to_dict
from hydraspec.errors import ConfigurationError
from hydraspec.lab.outcome import Outcome

needs_launchers = pytest.mark.skipif(
    find_spec("hydra_plugins") is None
    or find_spec("hydra_plugins.hydra_joblib_launcher") is None
    or find_spec("hydra_plugins.hydra_submitit_launcher") is None,
    reason="needs what make test installs: pip install -c constraints.txt -e '.[test]'",
)

# ------------------------------------------------------------------ devices


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(devices.SLURM, raising=False)
    monkeypatch.setenv(devices.VISIBLE, "0, GPU-7b,5")
    monkeypatch.setattr(devices, "LOOK_EVERY_S", 0.01)
    return monkeypatch


def test_jobs_side_by_side_have_different_devices(host: pytest.MonkeyPatch) -> None:
    """Catches two jobs on one device, and a job that keeps one of the two that it needs."""
    asked: list[bool] = []

    def is_stopped() -> bool:
        asked.append(True)
        return len(asked) > 2

    with own_devices(2, is_stopped) as first, own_devices(1, is_stopped) as second:
        assert (first, second) == (["0", "GPU-7b"], ["5"])
        with pytest.raises(InterruptedError), own_devices(1, is_stopped):
            pass
        assert len(asked) == 3
    asked.clear()
    with own_devices(1, is_stopped):
        with pytest.raises(InterruptedError), own_devices(3, is_stopped):
            pass
        with own_devices(2, is_stopped) as rest:
            assert rest == ["GPU-7b", "5"]


def test_nothing_is_chosen_where_there_is_no_choice(host: pytest.MonkeyPatch) -> None:
    never = lambda: False  # noqa: E731
    with own_devices(4, never) as more_than_there_are, own_devices(0, never) as on_the_cpu:
        assert more_than_there_are is on_the_cpu is None
    host.setenv(devices.SLURM, "17")
    with own_devices(2, never) as first, own_devices(2, never) as second:
        assert first == second == ["0", "GPU-7b"], "Slurm's, which are this job's alone"
    host.delenv(devices.VISIBLE)
    host.setattr(devices, "_num_devices", lambda: 2)
    assert visible_devices() == ["0", "1"]


def test_a_wait_for_devices_ends(host: pytest.MonkeyPatch) -> None:
    host.setattr(devices, "LONGEST_WAIT_S", 0.0)
    never = lambda: False  # noqa: E731
    with own_devices(3, never), pytest.raises(TimeoutError), own_devices(1, never):
        pass


@pytest.mark.parametrize(
    ("typed", "count"),
    [
        ([], 1),
        (["engine.device=cpu", "parallelism=tp2"], 0),
        (["parallelism=tp2_pp2"], 4),
        (
            [
                *("engine=vllm", "method=none", "parallelism.tensor=8"),
                *("engine.vllm.nnodes=2", "engine.vllm.master_addr=a"),
            ],
            4,
        ),
    ],
    ids=str,
)
def test_a_job_takes_a_device_for_each_rank_on_its_host(typed: list[str], count: int) -> None:
    assert num_devices(plan(typed).jobs[0].config) == count


# ------------------------------------------------------------------ refusals


@needs_launchers
def test_launchers_that_cannot_launch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"joblib has no meaning for one run(.|\n)*add -m"):
        plan(["hydra/launcher=joblib"])
    with pytest.raises(ConfigurationError, match="allowed: basic, joblib, submitit_local, submit"):
        plan(["hydra/launcher=ray"], multirun=True)
    assert len(plan(["hydra/launcher=joblib", "seed=1,2"], multirun=True).jobs) == 2
    monkeypatch.setattr(hydra_keys, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install hydra-submitit-launcher==1\.2\.0"):
        plan(["hydra/launcher=submitit_slurm"], multirun=True)


# ------------------------------------------------------------------ who runs


SWEEP = ["hydra/launcher=joblib", "method=none,eagle3", "method.num_speculative_tokens=1,2"]


@pytest.fixture
def planned(tmp_path: Path) -> Plan:
    """Jobs 0 and 1 are equal (method=none knows no K)."""
    found = plan([*SWEEP, "tracker=none"], multirun=True)
    found.move_to(tmp_path / "sweep")
    return found


def finish(planned: Plan, number: int) -> None:
    job = planned.jobs[number]
    job.folder.mkdir(parents=True, exist_ok=True)
    (job.folder / "config.yaml").write_text(OmegaConf.to_yaml(to_dict(job.config)))
    (job.folder / "overrides.yaml").write_text(OmegaConf.to_yaml(job.overrides))
    (job.folder / "summary.json").write_text('{"status": "ok", "warnings": []}')


@needs_launchers
def test_finished_and_equal_jobs_are_not_launched(planned: Plan) -> None:
    division = launchers.divide(planned)
    assert [job.number for job in division.launched] == [0, 2, 3]
    assert (division.here, division.twins) == ([], {1: 0})
    finish(planned, 2)
    division = launchers.divide(planned)
    assert [job.number for job in division.launched] == [0, 3]
    assert [job.number for job in division.here] == [2]


@needs_launchers
@pytest.mark.parametrize("status", [0, 3])
def test_a_job_that_equals_another_ends_as_that_one(
    planned: Plan,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches a job that equals a failed one and is run on the host that started the sweep."""

    def launch(planned: Plan, jobs: list[object]) -> dict[int, Ended]:
        finish(planned, 0)
        ends = {job.number: Outcome(status=0, job=str(job.number)) for job in jobs}  # type: ignore[attr-defined]
        ends[0] = Outcome(status=status, job="0")
        return {n: Ended(outcome=e, said=f"{n}!" if e.status else None) for n, e in ends.items()}

    monkeypatch.setattr(launchers, "launch", launch)
    outcomes, here = _run_by_launcher(planned)
    ends = {end.job: end.status for end in outcomes}
    assert ends == {"0": status, "2": 0, "3": 0} | ({"1": status} if status else {})
    assert [job.number for job in here] == ([] if status else [1])
    assert ("hydraspec: 0!" in capsys.readouterr().err) == (status != 0)


# ------------------------------------------------------------------ for real


def start(folder: Path, *typed: str, n_jobs: int = 2) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hydraspec", "-m", f"hydra.sweep.dir={folder}", *typed]
    if "hydra/launcher=joblib" in typed:
        command.append(f"hydra.launcher.n_jobs={n_jobs}")
    return subprocess.Popen(
        [*command, "tracker=none", "baseline=false"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, devices.VISIBLE: "3,4"},
        start_new_session=True,
    )


SHORT = ("workload.limit=2", "sampling.max_tokens=8")
LONG = ("workload.limit=60", "workload.concurrency=1", "sampling.max_tokens=900")
ENDLESS = (*LONG, "sampling.ignore_eos=true")


def summary(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "summary.json").read_text())
    return found


@needs_launchers
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_a_sweep_runs_side_by_side_and_resumes(launcher: str, tmp_path: Path) -> None:
    """One job of four cannot run; one equals another; the second command runs nothing again."""
    missing = tmp_path / "missing"
    typed = (
        f"hydra/launcher={launcher}",
        "method=none",
        f"target.checkpoint=zoo:tiny_gemma4,{missing}",
    )
    for attempt in range(2):
        process = start(tmp_path / "s", *typed, "method.num_speculative_tokens=1,2", *SHORT)
        out, errors = process.communicate(timeout=280)
        assert process.returncode == 3, errors
        assert f"job 2: target.checkpoint={missing} does not exist" in errors
        assert summary(tmp_path / "s" / "0")["status"] == "ok"
        assert summary(tmp_path / "s" / "1")["reused_from"] == "0"
        assert (tmp_path / "s" / "compare.html").is_file()
        assert "Comparison" in out
        assert ("job 0 begins" in errors) == (attempt == 0 and launcher == "joblib")
        assert "is finished: not run again" in errors + out or attempt == 0
    if launcher == "joblib":
        assert "job 2 begins, on devices 3" in errors or "job 2 begins, on devices 4" in errors


@needs_launchers
@pytest.mark.slow
@pytest.mark.parametrize("n_jobs", [1, 2])
def test_an_interrupt_saves_what_is_finished(n_jobs: int, tmp_path: Path) -> None:
    process = start(tmp_path / "s", "hydra/launcher=joblib", "seed=1,2,3", *ENDLESS, n_jobs=n_jobs)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "s").glob("*/env.json")) and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "interrupted: jobs save what is finished" in errors
    assert errors.rstrip().endswith("hydraspec: interrupted: what was finished is saved")
    assert summary(tmp_path / "s" / "0")["status"] == "interrupted"
    assert not (tmp_path / "s" / "2" / "summary.json").exists()
    assert not (tmp_path / "s" / ".stop").exists()


@needs_launchers
@pytest.mark.slow
def test_jobs_end_with_a_command_that_is_killed(tmp_path: Path) -> None:
    """Catches processes that decode on for hours, and a job that is not saved."""
    process = start(tmp_path / "s", "hydra/launcher=joblib", "seed=1,2,3", *ENDLESS)
    files = [tmp_path / "s" / job / "env.json" for job in "01"]
    deadline = time.monotonic() + 120
    while not all(file.is_file() for file in files) and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(3)
    process.kill()
    process.communicate(timeout=60)  # until no process holds its pipes
    assert not (tmp_path / "s" / "2" / "config.yaml").exists()
    deadline = time.monotonic() + 30
    while not all(file.with_name("summary.json").is_file() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert {summary(file.parent)["status"] for file in files} == {"interrupted"}


@needs_launchers
@pytest.mark.slow
def test_a_job_that_is_killed_leaves_the_others_running(tmp_path: Path) -> None:
    typed = ("seed=1,2", *ENDLESS[:-2], "sampling.max_tokens=64")
    process = start(tmp_path / "s", "hydra/launcher=joblib", *typed)
    lock = tmp_path / "s" / "1" / ".lock"
    deadline = time.monotonic() + 120
    while not (lock.is_file() and lock.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(json.loads(lock.read_text())["pid"], signal.SIGKILL)
    _, errors = process.communicate(timeout=280)
    assert process.returncode == 1, errors
    assert "job 1 died of signal 9: see " in errors
    assert summary(tmp_path / "s" / "0")["status"] == "ok"

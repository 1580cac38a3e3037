"""Step costs of jobs, pooled: what speedups of a comparison rest on, and when timings are left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from studied_runs import copied, edit, edit_rows

import hydraspec
from hydraspec.study.job_costs import JobCosts, job_costs
from hydraspec.study.jobs import Job, pool
from hydraspec.study.runs import read_run

MS = {"0": (15.0, 10.0), "1": (12.0, 10.0), "2": (10.0,)}  # of steps of job and baseline
ROUNDS = 2


def time_steps(run: Path, *, seed: int = 0) -> None:
    """Blocks of 2 % noise, sides in turn."""
    rng, now = np.random.default_rng(seed), 0.0
    sides = dict(zip(("method", "baseline"), MS[run.name], strict=False))
    file: dict[str, Any] = {"schema_version": 1, **{side: [] for side in sides}}
    for _ in range(ROUNDS):
        for side, ms in sides.items():
            for _ in range(8):
                took = float(10 * ms * np.exp(0.02 * rng.standard_normal()))
                steps = [[4, 16, 10, took]]
                file[side].append({"start_s": now, "end_s": now + took / 1000, "steps": steps})
                now += took / 1000
    (run / "step_costs.json").write_text(json.dumps(file), encoding="utf-8")

    def retime(row: dict[str, Any]) -> None:
        for side, of in (("method", row), ("baseline", row["baseline"])):
            if of:
                of |= {"decode_tokens": 40, "decode_steps": 40 if side == "baseline" else 20}
                of["decode_ms"] = of["decode_steps"] * sides[side] / 4

    edit_rows(run, retime)


@pytest.fixture
def timed(studied: Path) -> Path:
    for number, job in enumerate(MS):
        time_steps(studied / job, seed=number)
    return studied


def costs_of(folder: Path) -> tuple[dict[str, Job], JobCosts | None]:
    jobs = pool([read_run(folder / job) for job in MS])
    return {job.name: job for job in jobs}, job_costs(jobs)


def test_a_speedup_has_the_error_of_costs_pooled_over_jobs(timed: Path) -> None:
    jobs, costs = costs_of(timed)
    assert costs is not None
    own = costs.ratio(jobs["0"])
    assert own.log_error == pytest.approx(0.02 * np.sqrt(1 / 16 + 1 / 48), rel=0.6)
    assert costs.ratio(jobs["2"]).log_error == 0
    versus = costs.ratio(jobs["0"], jobs["1"])
    assert versus.log_error == pytest.approx(0.02 * np.sqrt(2 / 16), rel=0.6)
    assert costs.ratio(jobs["0"], jobs["2"]) == own
    found = hydraspec.compare([timed])
    speeds = {job["job"]: job["speedup"] for job in found["jobs"]}
    assert speeds["0"]["mean"] == pytest.approx(2 * 10 / 15, rel=0.03)
    low, high = speeds["0"]["ci95"]
    assert 0.005 < high / low - 1 < 0.06, "equal requests: the costs' error is all there is"
    assert found["answer"]["method"] == "gemma4_mtp"
    assert all(job["told_from_best"] for job in found["jobs"][1:])


def test_runs_of_an_earlier_version_have_timings(timed: Path) -> None:
    """Also one whose requests alone are of an earlier version, or that has too few steps."""
    (timed / "1" / "step_costs.json").unlink()
    assert costs_of(timed)[1] is None
    assert hydraspec.compare([timed])["answer"]["method"] == "gemma4_mtp"
    time_steps(timed / "1")
    assert costs_of(timed)[1] is not None
    edit_rows(timed / "1", lambda row: row.pop("decode_steps"))
    assert costs_of(timed)[1] is None
    time_steps(timed / "1")
    file = json.loads((timed / "0" / "step_costs.json").read_text(encoding="utf-8"))
    file["method"] = file["method"][:3]
    (timed / "0" / "step_costs.json").write_text(json.dumps(file), encoding="utf-8")
    assert costs_of(timed)[1] is None


def test_a_machine_that_was_slow_for_one_job_cancels(timed: Path) -> None:
    """Catches a common baseline that is taken for as fast during each job."""
    file = json.loads((timed / "0" / "step_costs.json").read_text(encoding="utf-8"))
    for side in ("method", "baseline"):
        for block in file[side]:
            block["steps"][0][3] *= 1.3
    (timed / "0" / "step_costs.json").write_text(json.dumps(file), encoding="utf-8")
    jobs, costs = costs_of(timed)
    assert costs is not None
    assert costs.ratio(jobs["0"]).correction == pytest.approx(0.0, abs=0.02), "both sides were slow"


def test_what_is_not_known_of_a_job_is_taken_from_those_alike(timed: Path) -> None:
    """Catches a step with one draft that costs less than one without: the error of a loud run. What
    is known well stays, also where it is not as its neighbours are."""
    jobs = {}
    for k, ms in ((1, 11.0), (2, 12.0), (3, 20.0), (4, 14.0)):
        run = copied(timed / "1", f"k{k}", method__num_speculative_tokens=k)
        edit(run, num_speculative_tokens=k)
        MS[run.name] = (ms, 10.0)
        time_steps(run, seed=k)
        (jobs[k],) = pool([read_run(run)])
    del MS["k1"], MS["k2"], MS["k3"], MS["k4"]
    quiet = job_costs(list(jobs.values()))
    assert quiet is not None
    assert all(abs(quiet.ratio(job).correction) < 0.03 for job in jobs.values())
    blocks = jobs[3].runs[0].blocks["method"]
    for number, block in enumerate(blocks):
        block.sizes = {size: (n, ms * (1 + number % 2)) for size, (n, ms) in block.sizes.items()}
    loud = job_costs(list(jobs.values()))
    assert loud is not None
    known = loud.ratio(jobs[3]).correction
    assert np.log(10 / 20) + known == pytest.approx(np.log(10 / 13), abs=0.15)
    assert loud.ratio(jobs[3]).log_error > 3 * quiet.ratio(jobs[3]).log_error
    assert loud.ratio(jobs[2]).log_error < 1.2 * quiet.ratio(jobs[2]).log_error

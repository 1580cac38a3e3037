"""The comparison with the CPU sees each way in which a run can be wrong."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import comparison
import pytest
from cells import CUT_SHORT, Side, judge
from comparison import Outputs, judge_bfloat16, judge_float32, troubles
from matrix import Cell

STEP = {"num_computed_tokens": 9, "draft_token_ids": [3, 4], "num_accepted": 1}


def outputs(verdict: str = "identical", device: str = "cuda", exact: float = 1.0) -> Outputs:
    requests = [
        {
            "id": name,
            "output_token_ids": [1, 3, 5],
            "finish_reason": "stop",
            "drafted_per_position": [1, 1],
            "accepted_per_position": [1, 0],
            "ttft_ms": 1.0,
            "latency_ms": 2.0,
            "baseline": {"decode_ms": 3.0, "correct": True},
        }
        for name in ("a", "b", "c")
    ]
    summary = {
        "status": "ok",
        "num_errors": 0,
        "device": device,
        "accuracy": {"exact_match": exact},
        "baseline": {"accuracy": {"exact_match": exact}},
        "acceptance_length": {"mean": 2.0},
        "output_tokens_per_second": 100.0,
        "speedup": {"mean": 1.5},
        "cudagraph": {"target": "full", "draft": "full"},
        "lossless": {
            "verdict": verdict,
            "first_beyond_margin": {"request": "b", "position": 1},
            "num_requests_diverged": 1,
            "num_requests_checked": 3,
        },
    }
    steps = {name: [{**STEP, "output_token_ids": [3, 5]}] for name in ("a", "b", "c")}
    return Outputs(summary=summary, requests=requests, trace=copy.deepcopy(steps))


def write(folder: Path, side: Outputs) -> Side:
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(side.summary))
    (folder / "requests.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in side.requests))
    lines = [{"request": n, "step": 7, **step} for n, own in side.trace.items() for step in own]
    (folder / "trace.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return Side(folder=folder, problem=None, seconds=1.0, log=folder / "log.txt")


def changed_token(side: Outputs) -> None:
    side.requests[1]["output_token_ids"][2] = 6


def missing_row(side: Outputs) -> None:
    del side.requests[1]


def accepted_count(side: Outputs) -> None:
    side.requests[1]["accepted_per_position"] = [0, 1]


def other_draft(side: Outputs) -> None:
    side.trace["b"][0]["draft_token_ids"] = [3, 7]


def missing_step(side: Outputs) -> None:
    side.trace["b"].clear()


def other_verdict(side: Outputs) -> None:
    side.summary["lossless"]["verdict"] = "numerical"


def other_accuracy(side: Outputs) -> None:
    side.summary["baseline"]["accuracy"]["exact_match"] = 0.0


FAULTS: dict[Callable[[Outputs], None], str] = {
    changed_token: "b: output token at 2: 6 on the device, 5 on the CPU",
    missing_row: "b: missing on the device",
    accepted_count: "b: accepted_per_position",
    other_draft: "b: verify step at 0: {'draft_token_ids': [3, 7]}",
    missing_step: "b: verify step at 0",
    other_verdict: "verdict numerical, identical on the CPU",
    other_accuracy: "exact match of the baseline: 0.0, 1.0 on the CPU",
}


def test_equal_runs_pass_whatever_their_times_and_steps(tmp_path: Path):
    ours, cpu = outputs(), outputs(device="cpu")
    ours.requests[0]["ttft_ms"] = 99.0
    ours.requests[0]["baseline"]["decode_ms"] = 99.0
    assert judge_float32(ours, cpu, greedy=True) == ([], [])
    ours, cpu = write(tmp_path / "device", ours), write(tmp_path / "cpu", cpu)
    result = judge(Cell(name="x", overrides=()), ours, cpu, "cuda")
    assert (result.status, result.problems) == ("passed", [])
    assert result.figures["graphs"] == "full/full"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_greedy_faults_are_seen(fault: Callable[[Outputs], None]):
    ours = outputs()
    fault(ours)
    problems, excused = judge_float32(ours, outputs(device="cpu"), greedy=True)
    assert len(problems) == 1, problems
    assert problems[0].startswith(FAULTS[fault])
    assert not excused


def test_one_sampled_request_is_excused_and_listed_and_two_are_not():
    ours, cpu = outputs("not_checked"), outputs("not_checked", device="cpu")
    changed_token(ours)
    problems, excused = judge_float32(ours, cpu, greedy=False)
    assert problems == []
    assert excused == ["b: output token at 2: 6 on the device, 5 on the CPU"]
    ours.requests[0]["output_token_ids"] = [1, 2]
    problems, excused = judge_float32(ours, cpu, greedy=False)
    assert (len(problems), excused) == (2, [])


def test_a_missing_sampled_request_is_never_excused():
    ours, cpu = outputs("not_checked"), outputs("not_checked", device="cpu")
    missing_row(ours)
    assert judge_float32(ours, cpu, greedy=False) == (["b: missing on the device"], [])


@pytest.mark.parametrize(
    ("verdict", "wrong"), [("identical", 0), ("numerical", 0), ("not_checked", 1), ("diverged", 1)]
)
def test_bfloat16_may_round_and_not_diverge(verdict: str, wrong: int):
    ours = outputs(verdict)
    problems = troubles(ours, "cuda") + judge_bfloat16(ours, outputs(device="cpu"))
    assert len(problems) == wrong, problems


def test_two_engines_that_are_wrong_alike_are_seen_in_bfloat16():
    """`identical` says that method and baseline agree; the CPU says what is right."""
    problems = judge_bfloat16(outputs(exact=0.0), outputs(device="cpu"))
    assert len(problems) == 2
    drafter = outputs()
    drafter.summary["acceptance_length"]["mean"] = 1.02
    assert "acceptance length 1.02" in judge_bfloat16(drafter, outputs(device="cpu"))[0]


def test_a_run_that_fell_back_to_the_cpu_is_no_run_on_the_device():
    assert troubles(outputs(device="cpu"), "cuda") == ["ran on cpu, not on cuda"]


def test_cut_processes_fail_and_say_so(tmp_path: Path):
    cell = Cell(name="x", overrides=())
    cpu = write(tmp_path / "cpu", outputs(device="cpu"))
    log = tmp_path / "device.txt"
    log.write_text("loading\n")
    gone = tmp_path / "device"
    cut = Side(folder=gone, problem="cut after 60 s: loading", seconds=60.0, log=log)
    result = judge(cell, cut, cpu, "cuda")
    assert result.status == "failed"
    assert result.problems == ["cut after 60 s: loading"]
    assert result.log_tail == ["loading"]
    unstarted = Side(folder=gone, problem=CUT_SHORT, seconds=0.0, log=log)
    assert judge(cell, unstarted, cpu, "cuda").status == "not run"
    silent = Side(folder=gone, problem=None, seconds=1.0, log=log)
    assert "FileNotFoundError" in judge(cell, silent, cpu, "cuda").problems[0]
    assert comparison.read(cpu.folder).trace == outputs().trace

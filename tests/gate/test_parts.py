"""The other parts: device tests that are cut, the sanitizer's count, the speed table's checks."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
from pathlib import Path

import device_tests
import memcheck
import processes
import pytest
import speed
from cells import Queue, _Worker, run_both
from matrix import Cell
from setting import PartResult, Result, Setting, site_of

TESTS = """
import os, time
import pytest

pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("number", range(4))
def test_right(number): pass

def test_wrong(): assert 1 == 2, "a wrong answer"

def test_hangs(): time.sleep(60)

def test_dies(): os._exit(3)

@pytest.mark.skip(reason="two devices")
def test_skipped(): pass

class TestInside:
    def test_too(self): pass
"""


def setting_in(folder: Path, **fields: object) -> Setting:
    own = {"tree": folder, "work": folder / "work", "device": "cpu", "say": lambda line: None}
    made = Setting(**{**own, **fields})
    return dataclasses.replace(made.for_part("part"), deadline=time.monotonic() + 60)


@pytest.mark.slow  # pytest in four processes
def test_a_run_of_tests_goes_on_after_one_that_hangs(tmp_path: Path):
    """The thread method ends the worker: its test is named, and no other is lost."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    setting = setting_in(tmp_path)
    results = device_tests.run_pytest(setting, ["-m", "gpu"], ["tests"], workers=2, limit_s=1)
    rows = {result.name: result for result in results}
    row = rows["test_some"]
    counts = {key: row.figures[key] for key in ("collected", "passed", "failed", "skipped")}
    assert counts == {"collected": 9, "passed": 5, "failed": 3, "skipped": 1}
    assert row.notes == ["skipped 1: two devices"]
    assert sorted(problem.split(":")[0] for problem in row.problems) == [
        *("test_dies", "test_hangs", "test_wrong"),
    ]
    assert sum("cut: its worker ended" in problem for problem in row.problems) == 2
    assert rows["all"].status == "failed"


@pytest.mark.slow  # pytest in two processes
def test_without_workers_one_process_has_all_devices(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    said = "import os\ndef test_all(): assert os.environ['CUDA_VISIBLE_DEVICES'] == '0,1'\n"
    (tmp_path / "test_spanning.py").write_text(said)
    results = device_tests.run_pytest(setting_in(tmp_path), [], ["test_spanning.py"], workers=0)
    total = results[-1]
    assert (total.name, total.status) == ("all that span GPUs", "passed"), total.log_tail
    assert total.figures["passed"] == 1


def test_fewer_results_than_collected_is_a_failure():
    report = device_tests.Report(passed=[("tests.test_a", "test_one")])
    nodes = ("tests/test_a.py::test_one", "tests/test_a.py::test_b[x::y]")
    expected = [device_tests.key_of(node) for node in nodes]
    (row,) = device_tests.summarise(report, expected)
    assert row.status == "failed"
    assert row.problems == ["test_b[x::y]: collected, and no result"]
    inside = device_tests.key_of("tests/a/test_c.py::TestX::test_d")
    assert inside == ("tests.a.test_c.TestX", "test_d")


def test_a_test_that_ended_its_worker_is_a_failure_that_says_so(tmp_path: Path):
    """As xdist reports it: an error entry, with nothing else of that test."""
    entry = "<error message='failed'>worker 'gw1' crashed while running 'a.py::test_x'</error>"
    case = f'<testcase classname="a" name="test_x" time="0">{entry}</testcase>'
    (tmp_path / "report.xml").write_text(f"<testsuites><testsuite>{case}</testsuite></testsuites>")
    report = device_tests.read_report(tmp_path / "report.xml")
    assert report.failed == {("a", "test_x"): "cut: its worker ended (the time limit, or a crash)"}


SLEEPER = """
import json, os, sys, time
for line in sys.stdin:
    said = json.loads(line)["overrides"][0]
    if said == "target=hang": time.sleep(60)
    if said == "target=die": os._exit(7)
    print(json.dumps({"problem": None}), flush=True)
"""


def test_a_worker_that_hangs_or_dies_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    worker = tmp_path / "sleeper.py"
    worker.write_text(SLEEPER)
    monkeypatch.setattr("cells.WORKER", worker)
    monkeypatch.setattr("cells.CELL_LIMIT_S", 1.5)
    names = ("good", "hang", "die", "fine")
    cells = [Cell(name=name, overrides=(f"target={name}",)) for name in names]
    runs = list(_Worker(setting_in(tmp_path), "cpu", "device").run(cells))
    assert [cell.name for cell, _ in runs] == list(names)
    problems = [run.problem for _, run in runs]
    assert (problems[0], problems[3]) == (None, None)
    assert str(problems[1]).startswith("cut after 2 s")
    assert str(problems[2]).startswith("its process ended with 7")


# A cell that waits ends once another process has run the cell after it.
WAITER = """
import json, sys, time
from pathlib import Path
for line in sys.stdin:
    said = json.loads(line)["overrides"][0]
    while said == "target=wait" and not Path("mark").exists(): time.sleep(0.01)
    if said == "target=mark": Path("mark").touch()
    print(json.dumps({"problem": None}), flush=True)
"""


@pytest.mark.parametrize("longer", ["device", "cpu"])
def test_the_processes_of_the_side_that_ends_first_help_the_other(
    longer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Catches idle cores: the CPU's cells took half as long as the device's."""
    worker = tmp_path / "waiter.py"
    worker.write_text(WAITER)
    monkeypatch.setattr("cells.WORKER", worker)
    monkeypatch.setattr("cells.CELL_LIMIT_S", 20.0)
    said = list[str]()
    setting = setting_in(tmp_path, device_processes=1, cpu_processes=1, say=said.append)
    cells = [Cell(name=name, overrides=(f"target={name}",)) for name in ("wait", "mark", "good")]
    device, cpu = (
        Queue(setting, side, "cpu", cells if side == longer else cells[2:])
        for side in ("device", "cpu")
    )
    run_both(setting, device, cpu)
    for queue, side in ((device, "device"), (cpu, "cpu")):
        wanted = {"wait", "mark", "good"} if side == longer else {"good"}
        assert {name: run.problem for name, run in queue.ended.items()} == dict.fromkeys(wanted)
        assert f"{side}: {len(wanted)} of {len(wanted)} cells ended" in said


def test_typed_cells_begin_first(tmp_path: Path):
    """They take longest; the others keep their order."""
    cells = [Cell(name=name, overrides=(), is_typed=name.isupper()) for name in "aBcD"]
    assert [cell.name for cell in Queue(setting_in(tmp_path), "cpu", "cpu", cells).take()] == [
        *"BDac"
    ]


def test_a_process_over_its_limit_is_cut_with_what_it_said(tmp_path: Path):
    ended = processes.run(
        [sys.executable, "-c", "print('loading', flush=True); import time; time.sleep(60)"],
        log=tmp_path / "log.txt",
        limit_s=1.0,
        env={},
        cwd=tmp_path,
    )
    assert ended.problem == "cut after 1 s: loading"


def test_an_interrupt_leaves_no_process_and_starts_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(processes, "_stopped", threading.Event())
    monkeypatch.setattr(processes, "_live", set())
    child = processes.start([sys.executable, "-c", "import time; time.sleep(60)"])
    processes.end_all()
    assert child.wait(10) < 0
    with pytest.raises(KeyboardInterrupt):
        processes.start([sys.executable, "-c", ""])


@pytest.mark.parametrize(
    ("status", "said", "wanted"),
    [
        (0, "========= ERROR SUMMARY: 0 errors", "passed"),
        (9, "========= Invalid __global__ read\n========= ERROR SUMMARY: 1 error", "failed"),
        (0, "it ran without the tool", "failed"),
        (1, "========= ERROR SUMMARY: 0 errors", "failed"),
        (None, "loading", "failed"),
    ],
    ids=["clean", "an-error", "no-summary", "the-run-failed", "cut"],
)
def test_a_piece_passes_with_a_count_of_zero_only(
    tmp_path: Path, status: int | None, said: str, wanted: str
):
    (tmp_path / "log.txt").write_text(f"{said}\n")
    ended = processes.Ended(status=status, seconds=1.0, limit_s=5.0, log=tmp_path / "log.txt")
    assert memcheck.judge("piece", ended).status == wanted


def test_without_the_sanitizer_the_part_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memcheck, "find_tool", lambda: None)
    part = memcheck.run(setting_in(tmp_path))
    assert part.status == "not run"
    assert "neither on PATH" in str(part.reason)


def test_a_sanitizer_that_is_refused_the_device_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\necho '========= Error: Device not supported'\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setattr(memcheck, "find_tool", lambda: str(tool))
    part = memcheck.run(setting_in(tmp_path))
    assert part.status == "not run"
    assert str(part.reason).endswith("Error: Device not supported")


def test_pieces_begin_in_order_and_each_kernel_test_is_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In a tool's place a script that prints its command and finds no error."""
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\necho $@\necho '========= ERROR SUMMARY: 0 errors'\n")
    tool.chmod(0o755)
    tests = [f"tests/kernels/test_{letter}.py::test_it" for letter in "abcdefgh"]
    monkeypatch.setattr(memcheck, "_kernel_tests", lambda setting: tests)
    monkeypatch.setattr(memcheck, "PIECES_AT_ONCE", 1)
    said = list[str]()
    setting = setting_in(tmp_path, say=said.append)
    results = memcheck._run_pieces(setting, [str(tool)])
    names = [*memcheck.RUNS, "kernels-1", "kernels-2", "kernels-3"]
    assert [result.name for result in results] == [line.split(":")[0] for line in said] == names
    assert {result.status for result in results} == {"passed"}
    logs = [(setting.work / f"{name}.txt").read_text() for name in names[-3:]]
    assert sorted(word for log in logs for word in log.split() if word in tests) == tests
    only = setting_in(tmp_path, only=("kernels-2", "four"))
    assert [result.name for result in memcheck._run_pieces(only, [str(tool)])] == [
        *("four-bits-eager", "kernels-2")
    ]
    assert (only.work / "kernels-2.txt").read_text() == logs[1]


def test_kernel_pieces_without_tests_run_nothing_and_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Catches a collection that is cut: pytest without names would run every test of the tree."""
    monkeypatch.setattr(memcheck, "_kernel_tests", lambda setting: [])
    setting = setting_in(tmp_path, only=("kernels-1", "kernels-3"))
    results = memcheck._run_pieces(setting, ["false"])
    assert [(result.name, result.problems) for result in results] == [
        (name, ["no test was collected"]) for name in ("kernels-1", "kernels-3")
    ]
    assert {result.status for result in results} == {"failed"}


def default_run(
    folder: Path, verdict: str, exact: float, baseline: float, built: int = 0
) -> Result:
    folder.mkdir()
    summary = {
        "lossless": {"verdict": verdict},
        "accuracy": {"exact_match": exact},
        "baseline": {"accuracy": {"exact_match": baseline}, "output_tokens_per_second": 50.0},
        "output_tokens_per_second": 100.0,
        "speedup": {"mean": 2.0},
        "built_in_rounds": {"kernels": built, "graphs": 0},
        "step_profile_ms": {"step_ms": 0.5, "device_ms": None},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    ended = processes.Ended(status=0, seconds=1.0, limit_s=5.0, log=folder / "log.txt")
    return speed.judge_default("default-1", folder, ended)


def test_a_garbage_baseline_fails_the_default_command(tmp_path: Path):
    """What issue 10 saw: exact match 1.000 and 0.000, exit status 0."""
    good = default_run(tmp_path / "good", "identical", 1.0, 1.0)
    assert good.status == "passed"
    assert good.figures["step_ms"] == 0.5
    bad = default_run(tmp_path / "bad", "diverged", 1.0, 0.0)
    assert bad.problems == ["verdict diverged", "baseline_exact_match 0.0, not 1.0"]
    assert speed.spread([good, good]).figures["speedup_spread"] == "0.0 %"
    assert speed.spread([good, bad]).status == "not run"


def test_a_kernel_compiled_in_a_measured_round_fails_the_default_command(tmp_path: Path):
    run = default_run(tmp_path / "run", "identical", 1.0, 1.0, built=2)
    assert run.problems == ["built in measured rounds: 2 kernels"]


def test_a_bench_without_a_batch_fails(tmp_path: Path):
    row = {"batch": 1, "tpot_ms": 3.2, "prefill_s": 0.1}
    part = {"method": "none", "status": "ok", "first_step_s": 5.0, "rows": [row]}
    (tmp_path / "bench.json").write_text(json.dumps({"batches": [1, 8], "parts": [part]}))
    ended = processes.Ended(status=0, seconds=1.0, limit_s=5.0, log=tmp_path / "log.txt")
    (result,) = speed.judge_bench("bench", tmp_path, ended)
    assert result.problems == ["no figures for batches [8]"]
    assert result.figures["tpot_ms_b1"] == 3.2


@pytest.mark.parametrize(
    ("rows", "partial", "reason", "wanted"),
    [
        (["passed", "passed"], False, None, "passed"),
        (["passed", "passed"], True, None, "partial"),
        (["passed", "failed"], True, None, "failed"),
        (["passed", "not run"], False, None, "not run"),
        ([], False, "no tool", "not run"),
        ([], False, None, "not run"),
    ],
)
def test_status_of_a_part(rows: list[str], partial: bool, reason: str | None, wanted: str):
    results = [Result(name=str(i), status=status) for i, status in enumerate(rows)]
    assert PartResult(results=results, is_partial=partial, reason=reason).status == wanted


def test_another_checkout_is_laid_out_as_its_wheel(tmp_path: Path):
    """`hydraspec.conf` and the kernels have to be that tree's, not the installed one's."""
    for name in ("hydraspec", "conf", "kernels/hydraspec_kernels"):
        (tmp_path / "tree" / name).mkdir(parents=True)
        (tmp_path / "tree" / name / "__init__.py").write_text("")
    site = site_of(tmp_path / "tree", tmp_path / "site")
    setting = setting_in(tmp_path, site=site)
    found = processes.run(
        [
            *(sys.executable, "-c"),
            "import hydraspec.conf as a, hydraspec_kernels as b; print(a.__file__, b.__file__)",
        ],
        log=tmp_path / "log.txt",
        limit_s=20.0,
        env=setting.environment("cuda"),
        cwd=tmp_path,
    )
    places = processes.last_line(found.log).split()
    assert all(Path(place).is_relative_to(site) for place in places), places


def test_processes_are_spread_over_gpus(tmp_path: Path):
    setting = setting_in(tmp_path, gpus=("0", "3"))
    seen = [setting.on(i).environment("cuda")["CUDA_VISIBLE_DEVICES"] for i in range(3)]
    assert seen == ["0", "3", "0"]
    assert setting.on(1).environment("cpu")["CUDA_VISIBLE_DEVICES"] == ""

"""Part `tests`: the tests marked gpu, each with a time limit, counted against the collected; then
on a host of several GPUs those of engines and collectives that span them."""

from __future__ import annotations

import re
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import processes
from setting import PartResult, Result, Setting, devices

TEST_LIMIT_S = 60  # of one test; its own mark goes before it
COLLECT_LIMIT_S = 120.0
SAVE_S = 20.0  # pytest writes its report within this when it is interrupted
# A test over its limit ends its worker (a device that hangs cannot be interrupted): the run goes on
# with a new one.
MAX_RESTARTS = 200
SPANNING = ("tests/engine", "tests/parallel")  # faults of ranks take minutes: test-multi-gpu
CRASHED = re.compile(r"worker '\w+' crashed while running")
Key = tuple[str, str]  # class name as in the report, test name


@dataclass(kw_only=True)
class Report:
    """A junit report, by test."""

    passed: list[Key] = field(default_factory=list)
    skipped: dict[Key, str] = field(default_factory=dict)
    failed: dict[Key, str] = field(default_factory=dict)  # and cut: the message says so
    seconds: Counter[str] = field(default_factory=Counter)  # by file

    @property
    def keys(self) -> set[Key]:
        return {*self.passed, *self.skipped, *self.failed}


def read_report(file: Path) -> Report:
    """What a junit file says; a test with two entries (call and teardown) fails if either does."""
    report = Report()
    for case in ET.parse(file).getroot().iter("testcase"):
        key = (case.get("classname", ""), case.get("name", ""))
        report.seconds[key[0]] += float(case.get("time") or 0)
        broken = [entry for entry in case if entry.tag in ("failure", "error")]
        skipped = case.find("skipped")
        if broken:
            report.failed[key] = _why(broken[0])
        elif skipped is not None:
            report.skipped[key] = skipped.get("message", "")
        else:
            report.passed.append(key)
    report.passed = [key for key in report.passed if key not in report.failed]
    return report


def _why(entry: ET.Element) -> str:
    text = f"{entry.get('message', '')}\n{entry.text or ''}"
    if CRASHED.search(text):
        return "cut: its worker ended (the time limit, or a crash)"
    return text.strip().splitlines()[0][:300] if text.strip() else "failed"


def key_of(node_id: str) -> Key:
    """A node id as junit writes it: the file and the classes with dots, and the test's name."""
    path, *names = _split(node_id)
    return ".".join([path.removesuffix(".py").replace("/", "."), *names[:-1]]), names[-1]


def _split(node_id: str) -> list[str]:
    head, bracket, parameters = node_id.partition("[")
    parts = head.split("::")
    return [*parts[:-1], parts[-1] + bracket + parameters]


def collected(log: Path) -> list[str]:
    """Node ids that `pytest --collect-only -q` printed."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.strip() for line in lines if re.match(r"\S+\.py::", line)]


def summarise(report: Report, expected: Iterable[Key], main_folder: str = "tests.") -> list[Result]:
    """A result for each test file."""
    wanted = set(expected)
    files = sorted({_file(key) for key in report.keys | wanted})
    rows = {name: Result(name=name.removeprefix(main_folder)) for name in files}
    for name, row in rows.items():
        keys = {key for key in report.keys if _file(key) == name}
        missing = sorted(key for key in wanted - report.keys if _file(key) == name)
        row.figures = {
            "collected": sum(_file(key) == name for key in wanted),
            "passed": sum(key in keys for key in report.passed),
            "failed": sum(key in keys for key in report.failed),
            "skipped": sum(key in keys for key in report.skipped),
            "seconds": round(report.seconds[name], 1),
        }
        row.fail_if(f"{key[1]}: {why}" for key, why in report.failed.items() if key in keys)
        row.fail_if(f"{key[1]}: collected, and no result" for key in missing)
        reasons = Counter(why for key, why in report.skipped.items() if key in keys)
        row.notes = [f"skipped {count}: {why}" for why, count in reasons.items()]
    return list(rows.values())


def _file(key: Key) -> str:
    """The file's part of a class name: classes are capitalised, files are not."""
    parts = key[0].split(".")
    return ".".join(part for part in parts if not part[:1].isupper())


def run(setting: Setting) -> PartResult:
    """Collect, run, count."""
    started = time.monotonic()
    named = ["-k", " or ".join(setting.only)] if setting.only else []
    results = run_pytest(setting, ["-m", "gpu", *named], ["tests"], workers=setting.test_workers)
    if len(setting.gpus) > 1 and not named:
        work = setting.work / "spanning"
        work.mkdir()
        spanning = replace(setting, work=work)
        results += run_pytest(spanning, ["-m", "multi_gpu"], SPANNING, workers=0)
    seconds = time.monotonic() - started
    return PartResult(results=results, seconds=seconds, is_partial=bool(setting.only))


def run_pytest(
    setting: Setting,
    options: Sequence[str],
    paths: Sequence[str],
    *,
    workers: int,
    limit_s: int = TEST_LIMIT_S,
) -> list[Result]:
    """The results of the tests that options of pytest choose in `paths`. Workers share out the
    GPUs; without any, one process has all of them. They read files with such tests alone."""
    pytest = [setting.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    shared_out = {"TEST_DEVICES": ",".join(devices())} if workers else {}
    environment = setting.environment("cuda") | shared_out
    where: dict[str, Any] = {"env": environment, "cwd": setting.tree}
    listing = processes.run(
        [*pytest, "--collect-only", *options, *paths],
        log=setting.work / "collected.txt",
        limit_s=setting.limit_s(COLLECT_LIMIT_S),
        **where,
    )
    found = collected(listing.log)
    expected = [key_of(each) for each in found]
    files = sorted({each.split("::")[0] for each in found})
    if listing.problem or not expected:
        failed = Result(name="collection", log_tail=processes.tail(listing.log))
        failed.fail(listing.problem or "no test was collected")
        return [failed]
    setting.say(f"{len(expected)} tests collected")
    file = setting.work / "report.xml"
    running = ["-n", str(workers), "--dist", "worksteal"]
    running += [f"--max-worker-restart={MAX_RESTARTS}", f"--junitxml={file}"]
    running += [f"--timeout={limit_s}", "--timeout-method=thread"]
    ended = processes.run(
        [*pytest, *running, *options, *files],
        log=setting.work / "pytest.txt",
        limit_s=setting.limit_s(float("inf")),
        interrupt_s=SAVE_S,
        **where,
    )
    report = read_report(file) if file.is_file() else Report()
    results = summarise(report, expected)
    name = "all" if workers else "all that span GPUs"
    total = Result(name=name, log_tail=[] if ended.status == 0 else processes.tail(ended.log))
    for figure in ("collected", "passed", "failed", "skipped"):
        total.figures[figure] = sum(row.figures[figure] for row in results)
    total.figures["seconds"] = round(ended.seconds, 1)
    total.fail_if([ended.problem] if ended.problem else [])
    return [*results, total]

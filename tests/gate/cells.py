"""Part `cells`: every pair as a user runs it, those of quantised targets in every graph mode, and
every other option by a covering set; each beside the CPU."""

from __future__ import annotations

import json
import select
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import comparison
import processes
from matrix import (
    Cell,
    copying_cells,
    covered_cells,
    format_cells,
    pairs,
    pictured_cells,
    plain_cells,
    rounded_kv_cells,
    ruled_cells,
)
from setting import NOT_RUN, PartResult, Result, Setting

CELL_LIMIT_S = 120.0  # a process's first imports, and compiles kernels
MAX_EXCUSED = 3  # draws within rounding, in all cells together
CUT_SHORT = "not run: the part's time was up"
WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True, kw_only=True)
class Side:
    """A cell's run on one device."""

    folder: Path
    problem: str | None
    seconds: float
    log: Path


def run(setting: Setting) -> PartResult:
    """All cells, the device's and the CPU's at the same time."""
    started = time.monotonic()
    found = pairs(setting.tree)
    cells = all_cells(found)
    names = setting.chosen(cell.name for cell in cells)
    chosen = [cell for cell in cells if cell.name in names]
    mirrored = list({cell.twin: cell.mirrored for cell in chosen}.values())
    ours = Queue(setting, "device", setting.device, chosen)
    wanted = Queue(setting, "cpu", "cpu", mirrored)
    run_both(setting, ours, wanted)
    results = _judge_all(chosen, ours.ended, wanted.ended, setting.device)
    seconds = time.monotonic() - started
    return PartResult(results=results, seconds=seconds, is_partial=bool(setting.only))


def all_cells(found: Sequence[tuple[str, str]]) -> list[Cell]:
    """Those of quantised targets and of prompts by the dozen first: they take longest."""
    return [
        *plain_cells(found),
        *format_cells(found),
        *rounded_kv_cells(),
        *pictured_cells(found),
        *copying_cells(),
        *ruled_cells(),
        *covered_cells(found),
    ]


def constrained(setting: Setting) -> list[str]:
    """Names of the chosen cells whose outputs follow a grammar."""
    found = all_cells(pairs(setting.tree))
    with_grammar = [
        cell.name
        for cell in found
        if any(each.startswith("sampling.structured") for each in cell.overrides)
    ]
    return setting.chosen(with_grammar)


# ---------------------------------------------------------------- running


class Queue:
    """Cells of one side that wait for a process, those first that are typed, and runs that ended.

    Attributes:
        side: "device" or "cpu", as its folders are called.
        device: that the cells run on.
        ended: the runs, by the cell's name.
    """

    def __init__(self, setting: Setting, side: str, device: str, cells: Sequence[Cell]) -> None:
        self.side, self.device, self.ended = side, device, dict[str, Side]()
        self._waiting = deque(sorted(cells, key=lambda cell: not cell.is_typed))
        self._count, self._say, self._lock = len(cells), setting.say, Lock()

    def take(self) -> Iterator[Cell]:
        """The waiting cells one by one; each goes to a single caller."""
        while True:
            with self._lock:
                if not self._waiting:
                    return
                cell = self._waiting.popleft()
            yield cell

    def note(self, cell: Cell, run: Side) -> None:
        """Keeps a run that ended, and reports."""
        with self._lock:
            self.ended[cell.name] = run
            if run.problem:
                self._say(f"{self.side} {cell.name}: {run.problem}")
            if (count := len(self.ended)) == self._count or count % 9 == 0:
                self._say(f"{self.side}: {count} of {self._count} cells ended")


def run_both(setting: Setting, ours: Queue, wanted: Queue) -> None:
    """Runs all cells, in processes of the device and of the CPU; whichever side ends first, its
    processes go on with the other's cells."""
    order = [(ours, wanted)] * setting.device_processes + [(wanted, ours)] * setting.cpu_processes

    def serve(number: int) -> None:
        for queue in order[number]:
            worker = _Worker(setting.on(number), queue.device, queue.side)
            for cell, run in worker.run(queue.take()):
                queue.note(cell, run)

    with ThreadPoolExecutor(len(order)) as pool:
        list(pool.map(serve, range(len(order))))  # raises what one of them raised


def _overrides(setting: Setting, cell: Cell, device: str, folder: Path) -> list[str]:
    limit = [] if setting.requests is None else [f"workload.limit={setting.requests}"]
    typed = (*cell.overrides, *cell.on_device)
    kept = [o for o in typed if not (limit and o.startswith("workload.limit="))]
    own = ["tracker=none", "metrics.trace=true", f"hydra.run.dir={folder}"]
    return [*kept, *own, *limit, *(["engine.device=cpu"] if device == "cpu" else [])]


def _typed(setting: Setting, cell: Cell, device: str, side: str) -> Side:
    folder = setting.work / cell.name / side
    log = folder.with_name(f"{side}.txt")
    limit_s = setting.limit_s(CELL_LIMIT_S)
    if not limit_s:
        return Side(folder=folder, problem=CUT_SHORT, seconds=0.0, log=log)
    ended = processes.run(
        [setting.python, "-m", "hydraspec", *_overrides(setting, cell, device, folder)],
        log=log,
        limit_s=limit_s,
        env=setting.environment(device),
        cwd=setting.work,
    )
    return Side(folder=folder, problem=ended.problem, seconds=ended.seconds, log=log)


class _Worker:
    """Cells one after another in one process, and in a new one after a cell that ended it; those
    that are typed in their own."""

    def __init__(self, setting: Setting, device: str, side: str) -> None:
        self.setting, self.device, self.side = setting, device, side
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, cells: Iterable[Cell]) -> Iterator[tuple[Cell, Side]]:
        """Yields each cell with its run, once that ended."""
        try:
            for cell in cells:
                yield cell, self._one(cell)
        finally:
            self._end()

    def _one(self, cell: Cell) -> Side:
        if cell.is_typed:
            return _typed(self.setting, cell, self.device, self.side)
        folder = self.setting.work / cell.name / self.side
        log = folder.with_name(f"{self.side}.txt")
        log.parent.mkdir(parents=True, exist_ok=True)
        limit_s = self.setting.limit_s(CELL_LIMIT_S)
        if not limit_s:
            return Side(folder=folder, problem=CUT_SHORT, seconds=0.0, log=log)
        started = time.monotonic()
        overrides = _overrides(self.setting, cell, self.device, folder)
        problem = self._ask({"overrides": overrides, "log": str(log)}, limit_s)
        seconds = time.monotonic() - started
        return Side(folder=folder, problem=problem, seconds=seconds, log=log)

    def _ask(self, cell: dict[str, Any], limit_s: float) -> str | None:
        process = self.process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        log = Path(cell["log"])
        try:
            process.stdin.write(json.dumps(cell).encode() + b"\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], limit_s)
        except BrokenPipeError:
            ready = [process.stdout]
        if not ready:
            self._end()
            return f"cut after {limit_s:.0f} s: {processes.last_line(log)}"
        answer = process.stdout.readline()
        if not answer:
            self._end()
            return f"its process ended with {process.returncode}: {processes.last_line(log)}"
        problem: str | None = json.loads(answer)["problem"]
        return problem

    def _start(self) -> subprocess.Popen[bytes]:
        self.process = processes.start(
            [self.setting.python, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # each cell has its own log
            env=self.setting.environment(self.device),
            cwd=self.setting.work,
            bufsize=0,
        )
        return self.process

    def _end(self) -> None:
        if self.process is not None:
            processes.end(self.process)
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    pipe.close()
        self.process = None


# ---------------------------------------------------------------- judging


def _judge_all(
    cells: Sequence[Cell], ours: dict[str, Side], wanted: dict[str, Side], device: str
) -> list[Result]:
    results = [judge(cell, ours[cell.name], wanted[cell.twin], device) for cell in cells]
    excused = [result for result in results if any("excused" in note for note in result.notes)]
    if len(excused) > MAX_EXCUSED:
        for result in excused:
            result.fail(f"{len(excused)} cells have excused draws, and {MAX_EXCUSED} may")
    return results


def judge(cell: Cell, ours: Side, wanted: Side, device: str) -> Result:
    """One cell's result from the folders of its two runs."""
    result = Result(name=cell.name, figures={"seconds": round(ours.seconds, 1)})
    if ours.problem == CUT_SHORT:
        result.status = NOT_RUN
        result.notes.append(CUT_SHORT)
        return result
    for side, ended in (("", ours), ("on the CPU: ", wanted)):
        if ended.problem:
            result.fail(f"{side}{ended.problem}")
    here = _read(ours, result)
    if here is not None:
        result.figures |= _figures(here.summary)
        result.fail_if(comparison.troubles(here, device))
        if built := comparison.built_in_rounds(here.summary):
            result.notes.append(f"built in measured rounds: {built}")
    there = _read(wanted, result) if here is not None else None
    if here is not None and there is not None:
        result.fail_if(f"on the CPU: {trouble}" for trouble in comparison.troubles(there, "cpu"))
        if cell.dtype == "float32":
            problems, excused = comparison.judge_float32(here, there, greedy=cell.is_greedy)
            result.notes += [f"excused draw: {draw}" for draw in excused]
        else:
            problems = comparison.judge_bfloat16(here, there)
        result.fail_if(problems)
    if result.problems:
        result.log_tail = processes.tail(ours.log)
    return result


def _read(side: Side, result: Result) -> comparison.Outputs | None:
    try:
        return comparison.read(side.folder)
    except (OSError, ValueError, KeyError) as error:
        if not side.problem:  # else it is said already
            result.fail(f"{side.folder}: {type(error).__name__}: {error}")
        return None


def _figures(summary: dict[str, Any]) -> dict[str, Any]:
    speedup, graphs = summary["speedup"] or {}, summary["cudagraph"]
    figures = {
        "verdict": summary["lossless"]["verdict"],
        "exact_match": comparison.exact_match(summary),
        "baseline_exact_match": comparison.exact_match(summary["baseline"]),
        "acceptance_length": summary["acceptance_length"]["mean"],
        "tokens_per_second": summary["output_tokens_per_second"],
        "speedup": speedup.get("mean"),
        "graphs": f"{graphs['target']}/{graphs['draft']}",
    }
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}

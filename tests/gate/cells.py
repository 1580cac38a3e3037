"""Part `cells`: every pair as a user runs it, those of quantised targets in every graph mode, and
every other option by a covering set; each beside the CPU."""

from __future__ import annotations

import json
import select
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
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
    with ThreadPoolExecutor(2) as both:
        wanted = both.submit(_run_side, setting, mirrored, "cpu", setting.cpu_processes)
        ours = both.submit(
            _run_side, setting, chosen, setting.device, setting.device_processes, "device"
        )
        results = _judge_all(chosen, ours.result(), wanted.result(), setting.device)
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


def _run_side(
    setting: Setting, cells: Sequence[Cell], device: str, num_processes: int, side: str = "cpu"
) -> dict[str, Side]:
    """Typed cells first, each in a process; then the others, a share of them in each worker."""
    typed = [cell for cell in cells if cell.is_typed]
    others = [cell for cell in cells if not cell.is_typed]
    shares = [others[first::num_processes] for first in range(min(num_processes, len(others)))]
    tasks: list[Callable[[], dict[str, Side]]] = [
        *(partial(_typed, setting.on(i), cell, device, side) for i, cell in enumerate(typed)),
        *(
            partial(_Worker(setting.on(i), device, side).run, share)
            for i, share in enumerate(shares)
        ),
    ]
    done: dict[str, Side] = {}
    with ThreadPoolExecutor(num_processes) as pool:
        for finished in pool.map(lambda task: task(), tasks):
            done |= finished
            for name, ended in finished.items():
                if ended.problem:
                    setting.say(f"{side} {name}: {ended.problem}")
            if len(done) == len(cells) or len(done) % 9 == 0:
                setting.say(f"{side}: {len(done)} of {len(cells)} cells ended")
    return done


def _overrides(setting: Setting, cell: Cell, device: str, folder: Path) -> list[str]:
    limit = [] if setting.requests is None else [f"workload.limit={setting.requests}"]
    typed = (*cell.overrides, *cell.on_device)
    kept = [o for o in typed if not (limit and o.startswith("workload.limit="))]
    own = ["tracker=none", "metrics.trace=true", f"hydra.run.dir={folder}"]
    return [*kept, *own, *limit, *(["engine.device=cpu"] if device == "cpu" else [])]


def _typed(setting: Setting, cell: Cell, device: str, side: str) -> dict[str, Side]:
    folder = setting.work / cell.name / side
    log = folder.with_name(f"{side}.txt")
    limit_s = setting.limit_s(CELL_LIMIT_S)
    if not limit_s:
        return {cell.name: Side(folder=folder, problem=CUT_SHORT, seconds=0.0, log=log)}
    ended = processes.run(
        [setting.python, "-m", "hydraspec", *_overrides(setting, cell, device, folder)],
        log=log,
        limit_s=limit_s,
        env=setting.environment(device),
        cwd=setting.work,
    )
    found = Side(folder=folder, problem=ended.problem, seconds=ended.seconds, log=log)
    return {cell.name: found}


class _Worker:
    """Cells one after another in one process, and in a new one after a cell that ended it."""

    def __init__(self, setting: Setting, device: str, side: str) -> None:
        self.setting, self.device, self.side = setting, device, side
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, cells: Iterable[Cell]) -> dict[str, Side]:
        done = {}
        try:
            for cell in cells:
                done[cell.name] = self._one(cell)
        finally:
            self._end()
        return done

    def _one(self, cell: Cell) -> Side:
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

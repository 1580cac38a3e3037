"""Part `speed`: the default command five times, one process at a time; then E4B and 31B, one
process on each GPU."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import processes
from comparison import built_in_rounds, exact_match, read_summary
from setting import NOT_RUN, PartResult, Result, Setting

if TYPE_CHECKING:
    from hydraspec.metrics.summary import Baseline, Summary

REPEATS = 5
RUN_LIMIT_S = 120.0
BENCH_LIMIT_S = 240.0
TARGETS = {"bench_gemma4_e4b": "gemma4_e4b", "bench_gemma4_31b": "gemma4_31b"}  # by result name
CUT_SHORT = "the part's time was up"


def run(setting: Setting) -> PartResult:
    """The part; nothing runs beside it but what `_bench` starts on another GPU."""
    started = time.monotonic()
    results: list[Result] = []
    if setting.chosen(["default"]):
        runs = [_default(setting, number) for number in range(1, REPEATS + 1)]
        results += [*runs, spread(runs)]
    with ThreadPoolExecutor(max(1, len(setting.gpus))) as pool:
        found = [
            pool.submit(_bench, setting.on(i), name)
            for i, name in enumerate(setting.chosen(TARGETS))
        ]
        results += [result for bench in found for result in bench.result()]
    seconds = time.monotonic() - started
    return PartResult(results=results, seconds=seconds, is_partial=bool(setting.only))


def _default(setting: Setting, number: int) -> Result:
    name = f"default-{number}"
    folder = setting.work / name
    limit_s = setting.limit_s(RUN_LIMIT_S)
    if not limit_s:
        return Result(name=name, status=NOT_RUN, notes=[CUT_SHORT])
    ended = processes.run(
        [setting.python, "-m", "hydraspec", "tracker=none", f"hydra.run.dir={folder}"],
        log=folder.with_suffix(".txt"),
        limit_s=limit_s,
        env=setting.environment("cuda"),
        cwd=setting.work,
    )
    result = judge_default(name, folder, ended)
    setting.say(f"{name}: {result.status}, {result.figures}")
    return result


def judge_default(name: str, folder: Path, ended: processes.Ended) -> Result:
    """Identical, and every answer right with the method and without."""
    result = Result(name=name, figures={"seconds": round(ended.seconds, 1)})
    result.fail_if([ended.problem] if ended.problem else [])
    if (folder / "summary.json").is_file():
        summary = read_summary(folder)
        baseline = summary["baseline"]
        result.figures |= {
            "verdict": summary["lossless"]["verdict"],
            "exact_match": exact_match(summary),
            "baseline_exact_match": exact_match(baseline),
            "tokens_per_second": round(_tokens_per_second(summary)),
            "baseline_tokens_per_second": round(_tokens_per_second(baseline)),
            "speedup": round((summary["speedup"] or {}).get("mean") or 0.0, 3),
        }
        result.figures |= {k: round(v, 3) for k, v in _step_profile(summary).items()}
        if built := built_in_rounds(summary):
            result.fail(f"built in measured rounds: {built}")
        if result.figures["verdict"] != "identical":
            result.fail(f"verdict {result.figures['verdict']}")
        for side in ("exact_match", "baseline_exact_match"):
            if result.figures[side] != 1.0:
                result.fail(f"{side} {result.figures[side]}, not 1.0")
    elif not ended.problem:
        result.fail("no summary.json")
    if result.problems:
        result.log_tail = processes.tail(ended.log)
    return result


def _tokens_per_second(side: Summary | Baseline | None) -> float:
    return 0.0 if side is None else side["output_tokens_per_second"] or 0.0


def _step_profile(summary: Summary) -> dict[str, float]:
    """Where a decode step's time goes; older trees do not say."""
    return {k: v for k, v in (summary.get("step_profile_ms") or {}).items() if v is not None}


def spread(runs: Sequence[Result]) -> Result:
    """Median and range of the repeats' tokens per second and speedup."""
    result = Result(name="default-spread")
    for key in ("tokens_per_second", "baseline_tokens_per_second", "speedup"):
        values = [run.figures[key] for run in runs if key in run.figures]
        if values and min(values) > 0:
            middle = statistics.median(values)
            result.figures[key] = middle
            result.figures[f"{key}_range"] = f"{min(values)} to {max(values)}"
            width = (max(values) - min(values)) / middle
            result.figures[f"{key}_spread"] = f"{100 * width:.1f} %"
    if any(run.problems or run.status == NOT_RUN for run in runs):
        result.status = NOT_RUN
        result.notes.append("of the runs that ended well only")
    return result


def _bench(setting: Setting, name: str) -> list[Result]:
    folder = setting.work / name
    limit_s = setting.limit_s(BENCH_LIMIT_S)
    if not limit_s:
        return [Result(name=name, status=NOT_RUN, notes=[CUT_SHORT])]
    typed = ["experiment=bench_gemma4", f"target={TARGETS[name]}", "bench.engines=[native]"]
    ended = processes.run(
        [setting.python, "-m", "hydraspec", *typed, f"hydra.run.dir={folder}"],
        log=folder.with_suffix(".txt"),
        limit_s=limit_s,
        interrupt_s=10.0,
        env=setting.environment("cuda"),
        cwd=setting.work,
    )
    setting.say(f"{name}: {ended.seconds:.0f} s")
    return judge_bench(name, folder, ended)


def judge_bench(name: str, folder: Path, ended: processes.Ended) -> list[Result]:
    """A result for each method; batches are figures."""
    if not (folder / "bench.json").is_file():
        failed = Result(name=name, log_tail=processes.tail(ended.log))
        failed.fail(ended.problem or "no bench.json")
        return [failed]
    found: dict[str, Any] = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    results = []
    for part in found["parts"]:
        result = Result(name=f"{name}-{part['method']}")
        for row in part["rows"]:
            result.figures[f"tpot_ms_b{row['batch']}"] = round(row["tpot_ms"], 3)
            result.figures[f"prefill_s_b{row['batch']}"] = round(row["prefill_s"], 4)
        if part.get("first_step_s"):
            result.figures["first_step_s"] = round(part["first_step_s"], 1)
        missing = set(found["batches"]) - {row["batch"] for row in part["rows"]}
        if part["status"] != "ok":
            result.fail(f"{part['status']}: {part.get('reason')}")
        elif missing:
            result.fail(f"no figures for batches {sorted(missing)}")
        results.append(result)
    if ended.problem:
        failed = Result(name=name, log_tail=processes.tail(ended.log))
        failed.fail(ended.problem)
        results.append(failed)
    return results

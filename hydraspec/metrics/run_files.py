"""The names of the files in a run folder, and how results are read back.

docs/outputs/ explains the files; lab/folder.py writes them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from hydraspec.metrics.summary import Summary

SUMMARY = "summary.json"
REQUESTS = "requests.jsonl"
STEPS = "steps.jsonl"
TRACE = "trace.jsonl"
POSITIONS = "positions.jsonl"
REPLAY = "replay.json"
COSTS = "costs.json"
STEP_COSTS = "step_costs.json"
ENVIRONMENT = "env.json"
REPORT = "report.html"
CONFIG = "config.yaml"
OVERRIDES = "overrides.yaml"
BENCH = "bench.json"
BENCH_REPORT = "bench.html"
DOCTOR = "doctor.json"
DOCTOR_REPORT = "doctor.html"
PREDICTION = "predict.json"
PREDICTION_REPORT = "predict.html"
COMPARISON = "compare.json"
COMPARISON_REPORT = "compare.html"
COMPARISON_CSV = "compare.csv"
COMPARISON_MARKDOWN = "compare.md"
STUDY = "study.html"
STUDY_SPEC = "study.json"
TRACKER = "wandb"
SKIPPED = "skipped.json"  # why a job of a sweep was left out
UNSAVED = ".unsaved.json"  # facts of a run from its start, until its results are saved
RANKS = "ranks"  # logs of ranks other than the first, if they wrote any
RESULTS = (SUMMARY, BENCH)  # of a run, and of a benchmark
# Files that a new run in the same folder replaces; the last two mark the folder as used.
OF_A_RUN = (
    *(COSTS, STEP_COSTS, PREDICTION, PREDICTION_REPORT),
    *(STEPS, TRACE, POSITIONS, REPLAY, REQUESTS, SUMMARY, REPORT, BENCH_REPORT, DOCTOR, TRACKER),
    *(DOCTOR_REPORT, UNSAVED),
    *(BENCH, ENVIRONMENT),
)


def job_number(folder: Path) -> tuple[int, str]:
    """Sort key of the folders of a sweep's jobs: by number, others after them by name."""
    return (int(folder.name) if folder.name.isdigit() else 10**9, folder.name)


def written_since(file: Path, time_s: float) -> bool:
    """Returns whether the file exists and was written at `time_s` (time.time()) or later."""
    return file.is_file() and file.stat().st_mtime >= time_s


def result_file(folder: Path) -> Path | None:
    """The file with the result of a run or a benchmark; None where there is none."""
    return next((file for name in RESULTS if (file := folder / name).is_file()), None)


def read_result(folder: Path) -> dict[str, Any]:
    """The result of a run or a benchmark; empty where there is none, or where it was cut off."""
    file = result_file(folder)
    return (read_object(file) or {}) if file else {}


def read_summary(folder: Path) -> Summary | None:
    """The summary of a run folder; None where there is none, or where it was cut off."""
    return cast(Summary | None, read_object(folder / SUMMARY))


def skipped_jobs(sweep: Path) -> dict[Path, str]:
    """The reason for each job of a sweep that was left out and has no result."""
    jobs = sorted((file.parent for file in sweep.glob(f"*/{SKIPPED}")), key=job_number)
    return {
        job: str((read_object(job / SKIPPED) or {}).get("reason"))
        for job in jobs
        if result_file(job) is None  # it may have run since
    }


def read_object(file: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is none, or where it was cut off."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None

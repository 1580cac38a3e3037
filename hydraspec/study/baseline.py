"""A stored baseline: jobs with the counts and times of their requests, as JSON that is checked.

Prompts are kept as digests. A job that is read back is one as `runs` makes it, so that it is
compared as any other.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hydraspec.errors import ConfigurationError
from hydraspec.metrics.draft_lengths import PER_STEP
from hydraspec.metrics.files import Json, json_line, plain, pretty_json, write_whole
from hydraspec.metrics.summary import Summary
from hydraspec.study.jobs import Job, pool
from hydraspec.study.runs import Run, check_baseline, key_of, read_environment, read_runs, refuse

K = "method.num_speculative_tokens"  # of the settings
KIND, VERSION = "hydraspec gate baseline", 1
WRITE = "write it again: python -m hydraspec.gate --write FILE FOLDER…"
# Of summary.json: what a job is, what a comparison reads, and figures for a person to read.
SUMMARY_KEYS = (
    *("engine", "target", "target_checkpoint", "method", "drafter", "num_speculative_tokens"),
    *("verification", "parallelism", "seed", "temperature", "concurrency"),
    *("num_requests", "num_requests_in_workload", "num_errors"),
    *("acceptance_rate_per_position", "speedup", "accuracy", "lossless"),
)
ENVIRONMENT_KEYS = ("device", "cpu", "gpus", "num_threads", "versions", "git")
COUNTS = ("reached_per_position", "accepted_per_position")
TIMES = ("decode_tokens", "decode_ms")
# Key → kinds of its value; a tuple of counts is a list of K.
ROW: dict[str, tuple[type, ...]] = {
    "id": (str,),
    "category": (str, type(None)),
    "prompt": (str,),
    "finish_reason": (str,),
    "num_drafts": (int,),
    **dict.fromkeys(COUNTS, (list,)),
    **dict.fromkeys(TIMES, (int, float)),
    "correct": (bool, type(None)),
    "baseline": (dict, type(None)),
}
BASELINE_ROW: dict[str, tuple[type, ...]] = {
    "finish_reason": (str,),
    **dict.fromkeys(TIMES, (int, float)),
}


def digest(prompt: Sequence[object]) -> str:
    """16 hexadecimal digits that stand for a prompt: its token ids, then any spans."""
    text = ",".join(map(str, prompt or ()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def usable(folders: Sequence[Path]) -> list[Job]:
    """The jobs in these folders, with rows as a baseline keeps them.

    Raises:
        ConfigurationError: as `runs.read_runs`; a run that did not finish, has no baseline, or was
            written by an older hydraspec.
    """
    found = read_runs(folders)
    for run in found:
        _check_run(run)
        run.rows = [_kept(row) for row in run.rows]
    return pool(found, by_commit=False)


def _check_run(run: Run) -> None:
    status = run.summary["status"]
    if status != "ok":
        remedy = "run it again, to its end"
        raise refuse(run.folder, f"its status is {status}", allowed="finished runs", remedy=remedy)
    check_baseline(run)
    if any(COUNTS[0] not in row for row in run.rows):
        problem = f"requests.jsonl has no {COUNTS[0]}: it was written by an older hydraspec"
        remedy = "run it again"
        raise refuse(run.folder, problem, allowed="runs of this version", remedy=remedy)


def _kept(row: Json) -> Json:
    baseline = row["baseline"]
    kept = {key: row[key] for key in ROW if key != "prompt"}
    prompt = digest(key_of(row)[1])
    if baseline is not None:
        kept["baseline"] = {key: baseline[key] for key in BASELINE_ROW}
    return {**kept, "prompt": prompt, "prompt_token_ids": _as_prompt(prompt)}


def _as_prompt(prompt: str) -> list[int]:
    """What a comparison takes for a prompt: only equality counts."""
    return [int(prompt, 16)]


# ---------------------------------------------------------------- the file


def write(file: Path, jobs: Sequence[Job]) -> None:
    """Write a baseline; a line per request, so that changes of it can be read.

    Raises:
        CannotWriteError: with the path.
    """
    lines: list[str] = []
    written = []
    for job in jobs:
        made = []
        for run in job.runs:
            first = len(lines)
            lines += [json_line({key: row[key] for key in ROW}).rstrip("\n") for row in run.rows]
            rows = [f"@@request {i}@@" for i in range(first, len(lines))]  # put in below
            summary = {key: run.summary.get(key) for key in SUMMARY_KEYS}
            made.append({"summary": summary, "requests": rows})
        environment = read_environment(job.folder)
        settings = {k: v for k, v in job.runs[0].settings.items() if not k.startswith("tracker.")}
        kept = {key: environment.get(key) for key in ENVIRONMENT_KEYS}
        written.append({"settings": settings, "environment": kept, "runs": made})
    text = pretty_json({"kind": KIND, "schema_version": VERSION, "jobs": written})
    write_whole(file, re.sub(r'"@@request (\d+)@@"', lambda found: lines[int(found[1])], text))


def read(file: Path) -> list[tuple[Job, Json]]:
    """The jobs of a baseline, each with the environment it ran in.

    Raises:
        ConfigurationError: naming the place in the file that is missing or wrong.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        raise refuse(file, problem, allowed="a baseline that --write made", remedy=WRITE) from None
    except ValueError as error:
        raise _wrong(file, "the file", f"is no JSON: {error}") from None
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise _wrong(file, "kind", f"is not {KIND!r}")
    if found.get("schema_version") != VERSION:
        raise _wrong(file, "schema_version", f"is {found.get('schema_version')!r}, not {VERSION}")
    jobs = _list_of(file, found, "jobs", "jobs")
    return [_job(file, job, f"jobs[{i}]") for i, job in enumerate(jobs)]


def _job(file: Path, job: Mapping[str, Any], at: str) -> tuple[Job, Json]:
    for key in ("settings", "environment"):
        _check(file, job, {key: (dict,)}, at)
    runs = [
        _run(file, run, job["settings"], f"{at}.runs[{i}]")
        for i, run in enumerate(_list_of(file, job, "runs", f"{at}.runs"))
    ]
    return Job(name=file.name, label="", runs=runs), job["environment"]


def _run(file: Path, run: Mapping[str, Any], settings: Mapping[str, object], at: str) -> Run:
    _check(file, run, {"summary": (dict,)}, at)
    summary = run["summary"]
    if missing := [key for key in SUMMARY_KEYS if key not in summary]:
        raise _wrong(file, f"{at}.summary", f"has no {missing[0]}")
    kinds: dict[str, tuple[type, ...]] = {
        **dict.fromkeys(("engine", "target", "target_checkpoint", "method"), (str,)),
        **dict.fromkeys(("num_speculative_tokens", "num_requests"), (int,)),
        **dict.fromkeys(("num_requests_in_workload", "num_errors"), (int,)),
        "concurrency": (int, type(None)),
        "lossless": (dict,),
    }
    _check(file, summary, kinds, f"{at}.summary")
    lossless, place = summary["lossless"], f"{at}.summary.lossless"
    _check(file, lossless, {"verdict": (str,)}, place)
    if (test := lossless.get("distribution")) is not None:
        _check(file, test, {"says": (str,), "p": (int, float)}, f"{place}.distribution")
    num_positions = summary["num_speculative_tokens"]
    rows = _list_of(file, run, "requests", f"{at}.requests")
    for i, row in enumerate(rows):
        _check_row(file, row, num_positions, f"{at}.requests[{i}]")
        row["prompt_token_ids"] = _as_prompt(row["prompt"])
    baseline: Json = None if summary["method"] == "none" else {}
    is_chosen = settings.get(K) == PER_STEP and summary["method"] != "none"
    used: Json = {} if is_chosen else None  # that K was chosen, not how
    full = cast(Summary, {**summary, "baseline": baseline, "num_speculative_tokens_used": used})
    return Run(folder=file, summary=full, rows=rows, settings=settings)


def _check_row(file: Path, row: Mapping[str, Any], num_positions: int, at: str) -> None:
    _check(file, row, ROW, at)
    if len(row["prompt"]) != 16 or not set(row["prompt"]) <= set("0123456789abcdef"):
        raise _wrong(file, f"{at}.prompt", "is no digest of 16 hexadecimal digits")
    for key in COUNTS:
        counts = row[key]
        if len(counts) != num_positions or not all(_is_count(count) for count in counts):
            raise _wrong(file, f"{at}.{key}", f"is not {num_positions} counts from 0")
    if any(a > r for r, a in zip(*(row[key] for key in COUNTS), strict=True)):
        raise _wrong(file, f"{at}.{COUNTS[1]}", f"is above {COUNTS[0]}")
    sides = [(row, at)]
    if row["baseline"] is not None:
        _check(file, row["baseline"], BASELINE_ROW, f"{at}.baseline")
        sides.append((row["baseline"], f"{at}.baseline"))
    for side, place in sides:
        for key in TIMES:
            if not 0 <= side[key] < float("inf"):
                raise _wrong(file, f"{place}.{key}", "is no finite number from 0")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check(file: Path, value: object, kinds: Mapping[str, tuple[type, ...]], at: str) -> None:
    if not isinstance(value, dict):
        raise _wrong(file, at, "is no object")
    for key, allowed in kinds.items():
        if key not in value:
            raise _wrong(file, at, f"has no {key}")
        given = value[key]
        is_bool = isinstance(given, bool) and bool not in allowed
        if is_bool or not isinstance(given, allowed):
            raise _wrong(file, f"{at}.{key}", f"is {json.dumps(plain(given))[:40]}")


def _list_of(file: Path, value: Mapping[str, Any], key: str, at: str) -> list[Any]:
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, list) or not found:
        raise _wrong(file, at, "is no list, or an empty one")
    return found


def _wrong(file: Path, where: str, problem: str) -> ConfigurationError:
    allowed = "a baseline that this version's --write made"
    return refuse(f"{file}: {where}", problem, allowed=allowed, remedy=WRITE)

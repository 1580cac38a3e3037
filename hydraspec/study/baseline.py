"""A stored baseline: jobs with the counts and times of their requests, in a checked JSON file.

Prompts are kept as digests. A job that is read back has the same records as a job of run folders,
so that it is compared in the same way.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NotRequired, TypedDict, cast, get_type_hints

from hydraspec.errors import ConfigurationError
from hydraspec.metrics.checked import mismatch
from hydraspec.metrics.draft_lengths import PER_STEP
from hydraspec.metrics.files import Json, json_line, pretty_json, write_whole
from hydraspec.metrics.formats import KEY as FORMATS
from hydraspec.metrics.summary import Summary
from hydraspec.study.groups import READ, check_summary
from hydraspec.study.jobs import Job, pool
from hydraspec.study.runs import (
    BaselineRow,
    Run,
    check_baseline,
    key_of,
    read_environment,
    read_runs,
    refuse,
)

K = "method.num_speculative_tokens"  # key of the settings
KIND, VERSION = "hydraspec gate baseline", 1
WRITE = "write it again: python -m hydraspec.gate --write FILE FOLDER…"
# Keys of summary.json that are kept: some name the job, some are compared, some only inform people.
SUMMARY_KEYS = (
    *("engine", "target", "target_checkpoint", "method", "drafter", "num_speculative_tokens"),
    *("verification", "parallelism", "seed", "temperature", "concurrency"),
    *("num_requests", "num_requests_in_workload", "num_errors"),
    *("acceptance_rate_per_position", "speedup", "accuracy", "lossless"),
)
ENVIRONMENT_KEYS = ("device", "cpu", "gpus", "num_threads", "versions", "git")
PER_POSITION = ("reached_per_position", "accepted_per_position")  # lists of K


class Request(TypedDict):
    """A request of a stored run; `prompt` is a digest."""

    id: str
    category: str | None
    prompt: str
    finish_reason: str
    num_drafts: int
    reached_per_position: list[int]
    accepted_per_position: list[int]
    decode_tokens: int
    decode_ms: float
    correct: bool | None
    baseline: BaselineRow | None


class Sampled(TypedDict):
    """Result of the test of sampled outputs: what the test says, and its p-value."""

    says: str
    p: float


class Verdict(TypedDict):
    """The lossless verdict on a run's outputs."""

    verdict: str
    distribution: NotRequired[Sampled | None]


class RunSummary(TypedDict):
    """The part of a summary that a comparison reads."""

    engine: str
    target: str
    target_checkpoint: str
    method: str
    num_speculative_tokens: int
    concurrency: int | None
    num_requests: int
    num_requests_in_workload: int
    num_errors: int
    accuracy: object
    lossless: Verdict


class StoredRun(TypedDict):
    """A run of a job: the summary and the requests."""

    summary: RunSummary
    requests: list[Request]


class StoredJob(TypedDict):
    """A job: its settings, its runs and the environment of the first run."""

    settings: dict[str, object]
    environment: dict[str, object]
    runs: list[StoredRun]


def digest(prompt: Sequence[object]) -> str:
    """16 hexadecimal digits that stand for a prompt: its token ids, then any spans."""
    text = ",".join(map(str, prompt or ()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def usable(folders: Sequence[Path]) -> list[Job]:
    """The jobs in these folders, with rows as a baseline keeps them.

    Raises:
        ConfigurationError: `runs.read_runs` refused a folder, or a run did not finish, has no
            baseline, or was written by an older hydraspec.
    """
    found = read_runs(folders)
    for run in found:
        _check_run(run)
        check_summary(run, [key for key in READ if key != "lossless"])  # little of it is read
        run.rows = [_kept(row) for row in run.rows]
    return pool(found, by_commit=False)


def _check_run(run: Run) -> None:
    status = run.summary["status"]
    if status != "ok":
        remedy = "run it again, to its end"
        raise refuse(run.folder, f"its status is {status}", allowed="finished runs", remedy=remedy)
    check_baseline(run)
    if any(PER_POSITION[0] not in row for row in run.rows):
        problem = f"requests.jsonl has no {PER_POSITION[0]}: it was written by an older hydraspec"
        remedy = "run it again"
        raise refuse(run.folder, problem, allowed="runs of this version", remedy=remedy)


def _kept(row: Json) -> Json:
    baseline = row["baseline"]
    kept = {key: row[key] for key in _keys(Request) if key != "prompt"}
    prompt = digest(key_of(row)[1])
    if baseline is not None:
        kept["baseline"] = {key: baseline[key] for key in _keys(BaselineRow) if key in baseline}
    return {**kept, "prompt": prompt, "prompt_token_ids": _as_prompt(prompt)}


def _keys(record: type) -> list[str]:
    return list(get_type_hints(record))


def _as_prompt(prompt: str) -> list[int]:
    """Token ids that stand for the prompt of a digest: a comparison asks for equality only."""
    return [int(prompt, 16)]


# ---------------------------------------------------------------- the file


def write(file: Path, jobs: Sequence[Job]) -> None:
    """Write a baseline with a line per request, so that people can read the changes of the file.

    Raises:
        CannotWriteError: the file cannot be written; the error has its path.
    """
    lines: list[str] = []
    written = []
    for job in jobs:
        made = []
        for run in job.runs:
            first = len(lines)
            kept = [{key: row[key] for key in _keys(Request)} for row in run.rows]
            lines += [json_line(row).rstrip("\n") for row in kept]
            rows = [f"@@request {i}@@" for i in range(first, len(lines))]  # put in below
            kept_if_known = [FORMATS] if FORMATS in run.summary else []
            summary = {key: run.summary.get(key) for key in (*SUMMARY_KEYS, *kept_if_known)}
            made.append({"summary": summary, "requests": rows})
        environment = read_environment(job.folder)
        settings = {k: v for k, v in job.runs[0].settings.items() if not k.startswith("tracker.")}
        machine = {key: environment.get(key) for key in ENVIRONMENT_KEYS}
        written.append({"settings": settings, "environment": machine, "runs": made})
    text = pretty_json({"kind": KIND, "schema_version": VERSION, "jobs": written})
    write_whole(file, re.sub(r'"@@request (\d+)@@"', lambda found: lines[int(found[1])], text))


def read(file: Path) -> list[tuple[Job, Json]]:
    """The jobs of a baseline file, each with the environment in which the job ran.

    Raises:
        ConfigurationError: the file is missing or wrong; the message names the place in it.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        raise refuse(file, problem, allowed="a baseline that --write made", remedy=WRITE) from None
    except ValueError as error:
        raise _wrong(file, f"is no JSON: {error}") from None
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise _wrong(file, f"kind is not {KIND!r}")
    if found.get("schema_version") != VERSION:
        raise _wrong(file, f"schema_version is {found.get('schema_version')!r}, not {VERSION}")
    if (wrong := mismatch(found.get("jobs"), list[StoredJob], "jobs")) is not None:
        raise _wrong(file, wrong)
    jobs: list[StoredJob] = found["jobs"]
    if not jobs or not all(job["runs"] for job in jobs):
        raise _wrong(file, "has no jobs, or one without runs")
    return [(_job(file, job, f"jobs[{i}]"), job["environment"]) for i, job in enumerate(jobs)]


def _job(file: Path, job: StoredJob, at: str) -> Job:
    runs = [
        _run(file, run, job["settings"], f"{at}.runs[{i}]") for i, run in enumerate(job["runs"])
    ]
    return Job(name=file.name, label="", runs=runs)


def _run(file: Path, run: StoredRun, settings: Mapping[str, object], at: str) -> Run:
    summary = run["summary"]
    rows: list[Json] = []
    for i, row in enumerate(run["requests"]):
        _check_request(file, row, summary["num_speculative_tokens"], f"{at}.requests[{i}]")
        rows.append({**row, "prompt_token_ids": _as_prompt(row["prompt"])})
    if not rows:
        raise _wrong(file, f"{at}.requests is an empty list")
    is_plain = summary["method"] == "none"
    is_chosen = settings.get(K) == PER_STEP and not is_plain
    used: Json = {} if is_chosen else None  # the engine chose K; the file does not say how
    baseline: Json = None if is_plain else {}
    full = cast(Summary, {**summary, "baseline": baseline, "num_speculative_tokens_used": used})
    return Run(folder=file, summary=full, rows=rows, settings=settings)


def _check_request(file: Path, row: Request, num_positions: int, at: str) -> None:
    """Refuse a request whose values have the right types but are impossible."""
    if len(row["prompt"]) != 16 or not set(row["prompt"]) <= set("0123456789abcdef"):
        raise _wrong(file, f"{at}.prompt is no digest of 16 hexadecimal digits")
    reached, accepted = row["reached_per_position"], row["accepted_per_position"]
    for key, counts in zip(PER_POSITION, (reached, accepted), strict=True):
        if len(counts) != num_positions or min(counts, default=0) < 0:
            raise _wrong(file, f"{at}.{key} is not {num_positions} counts from 0")
    if any(a > r for r, a in zip(reached, accepted, strict=True)):
        raise _wrong(file, f"{at}.{PER_POSITION[1]} is above {PER_POSITION[0]}")
    for side in (row, row["baseline"]):
        if side and min(side["decode_tokens"], side["decode_ms"]) < 0:
            raise _wrong(file, f"{at}: decode_tokens or decode_ms is below 0")


def _wrong(file: Path, problem: str) -> ConfigurationError:
    allowed = "a baseline that this version's --write made"
    return refuse(file, problem, allowed=allowed, remedy=WRITE)

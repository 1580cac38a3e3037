"""Runs as they are compared: read from their folders, pooled into jobs, refused where unlike."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import yaml  # type: ignore[import-untyped]

from hydraspec.errors import ConfigurationError
from hydraspec.metrics.checked import mismatch
from hydraspec.metrics.draft_lengths import drafts_of
from hydraspec.metrics.files import Json
from hydraspec.metrics.run_files import (
    BENCH,
    CONFIG,
    ENVIRONMENT,
    REQUESTS,
    SUMMARY,
    job_number,
    read_summary,
)
from hydraspec.metrics.splits import split_words
from hydraspec.metrics.summary import Summary

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
# Keys that say where or how often the same thing ran: runs that differ in these alone are pooled.
POOLED = ("seed", "tracker", "metrics", "warnings")
# Settings that one word of a split says: "tp2".
SPLIT = tuple(f"parallelism.{key}" for key in ("name", "tensor", "pipeline", "data"))
MAX_TOLD = 2  # settings in a label; further ones only where they tell jobs apart
Key = tuple[str, tuple[object, ...]]  # a request's id and its prompt


class BaselineRow(TypedDict):
    """What is read of a request's run without drafts."""

    finish_reason: str
    decode_tokens: int
    decode_ms: float


class Row(TypedDict):
    """What is read of a line of requests.jsonl."""

    id: str
    category: str | None
    prompt_token_ids: list[int]
    finish_reason: str
    num_drafts: int
    accepted_per_position: list[int]
    decode_tokens: int
    decode_ms: float
    correct: bool | None
    baseline: BaselineRow | None


@dataclass(slots=True, kw_only=True)
class Run:
    """A run's folder, read. `rows` are the lines of its requests.jsonl, in order."""

    folder: Path
    summary: Summary
    rows: Sequence[Json]
    settings: Mapping[str, object]  # config.yaml with dotted keys
    commit: object = None

    @property
    def name(self) -> str:
        """The folder's last part that says something."""
        return self.folder.resolve().name

    def setting(self, key: str) -> object:
        """A setting of config.yaml; "parallelism" is its split in words."""
        if key != "parallelism":
            return self.settings.get(key)
        return split_words(self.summary.get(key)) or self.settings.get(f"{key}.name")

    def identity(self) -> dict[str, object]:
        """What makes runs repeats of each other."""
        keys = {k: v for k, v in self.settings.items() if k.partition(".")[0] not in POOLED}
        return {**keys, "commit": self.commit}


@dataclass(slots=True, kw_only=True)
class Job:
    """One or several runs of the same settings, pooled; `label` has what tells it from others."""

    name: str
    label: str
    runs: list[Run] = field(default_factory=list)

    @property
    def summary(self) -> Summary:
        """That of its first run."""
        return self.runs[0].summary

    @property
    def num_devices(self) -> int:
        """The ranks of a run, each with its device; 1 in summaries that do not say."""
        parallelism = self.summary.get("parallelism")
        return parallelism["num_devices"] if parallelism else 1


def refuse(what: object, problem: str, *, allowed: str, remedy: str) -> ConfigurationError:
    """The one message about folders that cannot be compared (exit status 2)."""
    return ConfigurationError(f"{what}: {problem}\n  allowed: {allowed}\n  to do: {remedy}")


def check_baseline(run: Run) -> None:
    """Refuse a run whose speed has nothing beside it."""
    if run.summary["baseline"] is None and run.summary["method"] != "none":
        raise refuse(
            run.folder,
            "has no baseline, so that its speed cannot be told from the machine's",
            allowed="runs with baseline=true, and of method=none",
            remedy="run it again with baseline=true",
        )


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in these folders; a sweep's folder stands for its jobs.

    Raises:
        ConfigurationError: a path that is no run or sweep, or a run that cannot be compared.
    """
    allowed, remedy = "folders of runs, or of sweeps", "give the folder with summary.json in it"
    found: dict[Path, Run] = {}
    for folder in folders:
        if not folder.is_dir():
            problem = "is no folder" if folder.exists() else "does not exist"
            raise refuse(folder, problem, allowed=allowed, remedy=remedy)
        inside = [folder] if (folder / SUMMARY).is_file() else sorted(_jobs(folder), key=job_number)
        if not inside and any((each / BENCH).is_file() for each in (folder, *folder.iterdir())):
            raise refuse(
                folder,
                "holds a benchmark, whose parts stand side by side in it already",
                allowed=allowed,
                remedy=f"python -m hydraspec.report {folder}",
            )
        if not inside:
            raise refuse(folder, f"holds no {SUMMARY}", allowed=allowed, remedy=remedy)
        for each in inside:
            found[each.resolve()] = read_run(each)
    own = [run for run in found.values() if "reused_from" not in run.summary]
    return own or list(found.values())


def _jobs(folder: Path) -> Iterator[Path]:
    return (each for each in folder.iterdir() if (each / SUMMARY).is_file())


def read_run(folder: Path) -> Run:
    """One run's folder.

    Raises:
        ConfigurationError: naming the file that is missing, damaged or older than this.
    """
    allowed = "folders of finished runs"
    if not (folder / SUMMARY).is_file():
        remedy = "give the folder of one run; a sweep's are numbered"
        raise refuse(folder, f"holds no {SUMMARY}", allowed=allowed, remedy=remedy)
    summary = read_summary(folder)
    if summary is None or "lossless" not in summary:
        problem = f"{SUMMARY} cannot be read, or is no run's"
        raise refuse(folder, problem, allowed=allowed, remedy="leave it out, or run it again")
    try:
        lines = (folder / REQUESTS).read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        tree = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8")) or {}
        settings = dotted(tree if isinstance(tree, dict) else {})
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem = f"{REQUESTS} or {CONFIG} cannot be read: {str(error).splitlines()[0]}"
        raise refuse(folder, problem, allowed=allowed, remedy="run it again") from None
    for number, row in enumerate(rows, start=1):
        if (wrong := mismatch(row, Row, "")) is not None:
            problem = f"{REQUESTS}, line {number}: {wrong}: damaged, or of an older hydraspec"
            raise refuse(folder, problem, allowed=allowed, remedy="run it again")
    commit = read_environment(folder).get("git")
    return Run(folder=folder, summary=summary, rows=rows, settings=settings, commit=commit)


def read_environment(folder: Path) -> dict[str, Any]:
    """A run's env.json; empty where it cannot be read."""
    try:
        found = json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """The leaves of nested mappings by dotted key."""
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= dotted(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


# ---------------------------------------------------------------- jobs


def pool(runs: Sequence[Run]) -> list[Job]:
    """Runs that differ in seed or tracker only, or in nothing, as one job; each run by itself where
    that would leave one job to compare."""
    groups = grouped(runs)
    if len(groups) < 2:
        groups = [[run] for run in runs]
    firsts = [group[0] for group in groups]
    names = short_names([run.folder for run in firsts])
    labels = labels_of([_method(run) for run in firsts], firsts)
    return [
        Job(name=name, label=label, runs=group)
        for name, label, group in zip(names, labels, groups, strict=True)
    ]


def by_key(items: Iterable[T], keys: Iterable[K]) -> dict[K, list[T]]:
    """Items of equal keys together, in the order in which keys are first seen."""
    groups: dict[K, list[T]] = {}
    for item, key in zip(items, keys, strict=True):
        groups.setdefault(key, []).append(item)
    return groups


def grouped(runs: Sequence[Run], *, by_commit: bool = True) -> list[list[Run]]:
    """Runs of the same settings together, in order; `by_commit`: and of the same commit."""
    groups: list[tuple[dict[str, object], list[Run]]] = []
    for run in runs:
        identity = run.identity() if by_commit else {**run.identity(), "commit": None}
        same = next((group for known, group in groups if known == identity), None)
        if same is None:
            groups.append((identity, [run]))
        else:
            same.append(run)
    return [group for _, group in groups]


def short_names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that differ."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            break
    return names


def known_to_all(found: Sequence[Mapping[str, object]]) -> list[str]:
    """The keys that every one of several settings has: others are of some versions alone."""
    return [key for key in found[0] if all(key in each for each in found)] if found else []


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """The keys for `Run.setting` in which runs differ, apart from those that repeats may differ in;
    those of a split are one."""
    settings = (key for run in runs for key in run.settings)
    keys = dict.fromkeys("parallelism" if key in SPLIT else key for key in settings)
    return [
        key
        for key in keys
        if key.partition(".")[0] not in POOLED and len({str(run.setting(key)) for run in runs}) > 1
    ]


def labels_of(names: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Names of runs, with settings in which runs of the same name differ: "…, tp2, check=True"."""
    found = list(zip(names, runs, strict=True))
    keys = {
        name: _telling([run for its, run in found if its == name]) for name in dict.fromkeys(names)
    }
    return [", ".join([name, *_told(run, keys[name])]) for name, run in found]


def _telling(runs: Sequence[Run]) -> list[str]:
    """The first MAX_TOLD settings in which runs differ, and others that tell runs apart for which
    these are equal. A key that only one version knows is none."""
    keys: list[str] = []
    for key in differing_settings(runs):
        if key != "parallelism" and not all(key in run.settings for run in runs):
            continue
        more = [*keys, key]
        if len(keys) < MAX_TOLD or _num_told(runs, more) > _num_told(runs, keys):
            keys = more
    return keys


def _num_told(runs: Sequence[Run], keys: Sequence[str]) -> int:
    return len({tuple(_told(run, keys)) for run in runs})


def _told(run: Run, keys: Sequence[str]) -> list[str]:
    """ "max_num_seqs=7", "engine=vllm", "tp2"."""
    names = [key.removesuffix(".name").rpartition(".")[2] for key in keys]
    return [
        str(run.setting(key)) if key == "parallelism" else f"{name}={run.setting(key)}"
        for key, name in zip(keys, names, strict=True)
    ]


def _method(run: Run) -> str:
    """ "gemma4_mtp, K=3"."""
    drafts = drafts_of(run.summary)
    return ", ".join([run.summary["method"], *([f"K={drafts}"] if drafts else [])])


# ---------------------------------------------------------------- what may be compared


def check_alike(jobs: Sequence[Job]) -> None:
    """Refuse jobs of other targets, sampling or prompts, and runs without a baseline.

    Raises:
        ConfigurationError: naming both runs and the difference.
    """
    runs = [(job, run) for job in jobs for run in job.runs]
    if len(runs) < 2:
        raise refuse(
            runs[0][1].folder if runs else "compare",
            "is one run: there is nothing to compare it with",
            allowed="two or more runs, or a sweep of two or more jobs",
            remedy="add the folder of another run over the same prompts",
        )
    for _, run in runs:
        check_baseline(run)
        if not has_finished(run):
            raise refuse(
                run.folder,
                "no request finished",
                allowed="runs with finished requests",
                remedy="see its summary.json and requests.jsonl",
            )
    first = runs[0][1]
    for _, run in runs[1:]:
        for what, ours, theirs in _conditions(first, run):
            if ours != theirs:
                raise _unlike(first, run, f"other {what}: {ours} and {theirs}")
    keys = [{key for run in job.runs for key in _keys(run)} for job in jobs]
    for job, found in zip(jobs[1:], keys[1:], strict=True):
        if (differing := found ^ keys[0]) and _all_ended([*jobs[0].runs, *job.runs]):
            one = min(differing)
            side = first if one in keys[0] else job.runs[0]
            problem = f"other prompts: request {one[0]!r} as it is in {side.name} is in it alone"
            raise _unlike(first, job.runs[0], problem)
        if not found & keys[0]:
            raise _unlike(first, job.runs[0], "other prompts: no request of both finished")


def _unlike(first: Run, other: Run, difference: str) -> ConfigurationError:
    return refuse(
        f"{first.folder} and {other.folder}",
        f"cannot be compared: {difference}",
        allowed="runs of the same target and sampling over the same prompts",
        remedy="compare runs that differ in method, engine or devices",
    )


def _conditions(a: Run, b: Run) -> Iterator[tuple[str, object, object]]:
    for key in ("target", "target_checkpoint"):
        yield "target", a.summary.get(key), b.summary.get(key)
    keys = dict.fromkeys([*a.settings, *b.settings])
    for key in keys:
        if key.startswith("sampling.") and key != "sampling.name":
            ours, theirs = (f"{key}={run.settings.get(key)}" for run in (a, b))
            yield "sampling", ours, theirs


def key_of(row: Json) -> Key:
    """A request of requests.jsonl: the same in all runs over the same prompts."""
    spans = (tuple(span.values()) for span in row.get("spans", ()))
    return str(row["id"]), (*row["prompt_token_ids"], *spans)


def _keys(run: Run) -> set[Key]:
    return {key_of(row) for row in run.rows if row["finish_reason"] != "error"}


def has_finished(run: Run) -> bool:
    """Returns whether any request ended without an error."""
    return any(row["finish_reason"] != "error" for row in run.rows)


def _all_ended(runs: Sequence[Run]) -> bool:
    """Returns whether each run ended all its requests without an error."""
    return all(
        run.summary["num_requests"] == run.summary["num_requests_in_workload"]
        and run.summary["num_errors"] == 0
        for run in runs
    )

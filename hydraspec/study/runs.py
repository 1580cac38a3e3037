"""Reading of run folders: the summary, the requests and the settings of each run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import yaml  # type: ignore[import-untyped]

from hydraspec.errors import ConfigurationError
from hydraspec.metrics.checked import mismatch
from hydraspec.metrics.files import Json, read_json_lines
from hydraspec.metrics.formats import Formats, formats_of
from hydraspec.metrics.run_files import (
    BENCH,
    CONFIG,
    ENVIRONMENT,
    REQUESTS,
    STEP_COSTS,
    SUMMARY,
    job_number,
    read_object,
    read_summary,
)
from hydraspec.metrics.splits import split_words
from hydraspec.metrics.step_blocks import Block, StepCostsFile
from hydraspec.metrics.summary import Summary

# Settings in which repeats may differ: runs that differ in these alone are pooled.
POOLED = ("seed", "tracker", "metrics", "warnings")
SIDES = ("method", "baseline")  # keys of step_costs.json
Key = tuple[str, tuple[object, ...]]  # a request's id and its prompt


class BaselineRow(TypedDict):
    """The fields that are read of a request's run without drafts."""

    finish_reason: str
    decode_tokens: int
    decode_ms: float
    decode_steps: NotRequired[int]  # rows of earlier versions lack it


class Row(TypedDict):
    """The fields that are read of a line of requests.jsonl."""

    id: str
    category: str | None
    prompt_token_ids: list[int]
    finish_reason: str
    num_drafts: int
    accepted_per_position: list[int]
    decode_tokens: int
    decode_ms: float
    decode_steps: NotRequired[int]  # rows of earlier versions lack it
    correct: bool | None
    baseline: BaselineRow | None


@dataclass(slots=True, kw_only=True)
class Run:
    """The contents of a run's folder.

    Attributes:
        rows: the lines of requests.jsonl, in order.
        settings: config.yaml with dotted keys.
        commit: the state of the Git checkout, from env.json; None if not known.
        blocks: decode steps of each side, from step_costs.json; empty in earlier versions.
    """

    folder: Path
    summary: Summary
    rows: Sequence[Json]
    settings: Mapping[str, object]
    commit: object = None
    blocks: Mapping[str, Sequence[Block]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The last part of the folder's absolute path."""
        return self.folder.resolve().name

    @property
    def is_plain(self) -> bool:
        """Returns whether the run decodes without drafts, and so is its own baseline."""
        return self.summary["method"] == "none"

    @property
    def has_baseline(self) -> bool:
        """Returns whether the speed without drafts was measured, so that the machine cancels."""
        return self.is_plain or self.summary["baseline"] is not None

    @property
    def has_finished(self) -> bool:
        """Returns whether any request ended without an error."""
        return any(row["finish_reason"] != "error" for row in self.rows)

    def setting(self, key: str) -> object:
        """A setting of config.yaml, None if missing; "parallelism" gives the split in words."""
        if key != "parallelism":
            return self.settings.get(key)
        return split_words(self.summary.get(key)) or self.settings.get(f"{key}.name")

    @property
    def formats(self) -> Formats | None:
        """The number formats of target and drafter; None for summaries that do not say them."""
        return formats_of(self.summary)

    def identity(self) -> dict[str, object]:
        """The settings that repeats of a run share, the number formats of its models where they are
        known, and the commit."""
        keys = {k: v for k, v in self.settings.items() if k.partition(".")[0] not in POOLED}
        formats = {} if self.formats is None else {"formats": str(self.formats)}
        return {**keys, **formats, "commit": self.commit}


def refuse(what: object, problem: str, *, allowed: str, remedy: str) -> ConfigurationError:
    """The error for folders that cannot be read or compared (exit status 2)."""
    return ConfigurationError(f"{what}: {problem}\n  allowed: {allowed}\n  to do: {remedy}")


def check_baseline(run: Run) -> None:
    """Refuse a run without a baseline to compare its speed with."""
    if not run.has_baseline:
        raise refuse(
            run.folder,
            "has no baseline, so that its speed cannot be told from the machine's",
            allowed="runs with baseline=true, and of method=none",
            remedy="run it again with baseline=true",
        )


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in these folders; a sweep's folder stands for its jobs. Jobs that took over another
    job's result are left out, unless there are no others.

    Raises:
        ConfigurationError: a path is no run or sweep, or a run cannot be read.
    """
    allowed, remedy = "folders of runs, or of sweeps", "give the folder with summary.json in it"
    found: dict[Path, Run] = {}
    for folder in folders:
        if not folder.is_dir():
            problem = "is no folder" if folder.exists() else "does not exist"
            raise refuse(folder, problem, allowed=allowed, remedy=remedy)
        jobs = (each for each in folder.iterdir() if (each / SUMMARY).is_file())
        inside = [folder] if (folder / SUMMARY).is_file() else sorted(jobs, key=job_number)
        if not inside and any((each / BENCH).is_file() for each in (folder, *folder.iterdir())):
            raise refuse(
                folder,
                "holds a benchmark, whose parts stand side by side in it already",
                allowed=allowed,
                remedy=f"python -m hydraspec.report {shlex.quote(str(folder))}",
            )
        if not inside:
            raise refuse(folder, f"holds no {SUMMARY}", allowed=allowed, remedy=remedy)
        for each in inside:
            found[each.resolve()] = read_run(each)
    own = [run for run in found.values() if "reused_from" not in run.summary]
    return own or list(found.values())


def read_run(folder: Path) -> Run:
    """Read the folder of a run.

    Raises:
        ConfigurationError: a file is missing, damaged or of an older version; the message names it.
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
        rows = read_json_lines(folder / REQUESTS)
        tree = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8")) or {}
        settings = dotted(tree if isinstance(tree, dict) else {})
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem = f"{REQUESTS} or {CONFIG} cannot be read: {str(error).splitlines()[0]}"
        raise refuse(folder, problem, allowed=allowed, remedy="run it again") from None
    for number, row in enumerate(rows, start=1):
        if (wrong := mismatch(row, Row, "")) is not None:
            problem = f"{REQUESTS}, line {number}: {wrong}: damaged, or of an older hydraspec"
            raise refuse(folder, problem, allowed=allowed, remedy="run it again")
    return Run(
        folder=folder,
        summary=summary,
        rows=rows,
        settings=settings,
        commit=read_environment(folder).get("git"),
        blocks=_read_blocks(folder),
    )


def _read_blocks(folder: Path) -> dict[str, list[Block]]:
    """The blocks of step_costs.json by side; empty where there is no such file."""
    if not (folder / STEP_COSTS).is_file():
        return {}
    found = read_object(folder / STEP_COSTS)
    wrong = "it is no JSON" if found is None else mismatch(found, StepCostsFile, "")
    if found is not None and not wrong:
        steps = [of for side in SIDES for block in found.get(side, ()) for of in block["steps"]]
        if not all(len(of) == 4 and all(0 < each < 1e15 for each in of) for of in steps):
            wrong = "steps are not four numbers above 0"
        elif found["schema_version"] != 1:
            wrong = "its schema_version is not 1"
    if found is None or wrong:
        problem = f"{STEP_COSTS} cannot be read: {wrong}"
        remedy = "remove that file, whose figures are then left out"
        raise refuse(folder, problem, allowed="folders of finished runs", remedy=remedy)
    return {
        side: [Block.of_record(block) for block in found[side]] for side in SIDES if side in found
    }


def ran_without_graphs(summary: Summary) -> bool:
    """Returns whether target and drafter ran without CUDA graphs; false if the summary lacks it."""
    ran: object = summary.get("cudagraph")
    return isinstance(ran, dict) and ran.get("target") == ran.get("draft") == "none"


def read_environment(folder: Path) -> dict[str, Any]:
    """The contents of a run's env.json; empty where the file cannot be read."""
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


def short_names(folders: Sequence[Path]) -> list[str]:
    """The last parts of the folders' absolute paths, as few as make the names differ."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            break
    return names


def key_of(row: Json) -> Key:
    """The id and the prompt of a request: the same in all runs over the same prompts."""
    spans = (tuple(span.values()) for span in row.get("spans", ()))
    return str(row["id"]), (*row["prompt_token_ids"], *spans)

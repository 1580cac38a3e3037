"""Compares a device's run with the CPU's run of the same command, from their files alone."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydraspec.metrics.summary import Baseline, Summary

Row = dict[str, Any]

# Of a line in requests.jsonl all but times has to be equal, and what is cached when a request is
# admitted: that depends on how far the host runs ahead of results.
NOT_COMPARED = {"num_cached_tokens"}
TRACED = ("num_computed_tokens", "draft_token_ids", "num_accepted", "output_token_ids")
MAX_EXCUSED_IN_A_CELL = 1
# 64 answers: rounding turns a few, a broken engine most.
EXACT_MATCH_MARGIN = 0.15
# A drafter that reads the wrong states falls to 1; rounding moves the mean by some hundredths.
ACCEPTANCE_LENGTH_MARGIN = 0.35


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What a run wrote."""

    summary: Summary
    requests: list[Row]
    trace: dict[str, list[Row]]  # by request id, without step numbers: those depend on company


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where a request on the device first differs from the CPU's."""

    request: str
    what: str
    position: int | None = None  # of the output token, or of the verify step
    on_device: object = None
    on_cpu: object = None

    def __str__(self) -> str:
        where = "" if self.position is None else f" at {self.position}"
        if self.on_device is None and self.on_cpu is None:
            return f"{self.request}: {self.what}"
        values = f"{self.on_device} on the device, {self.on_cpu} on the CPU"
        return f"{self.request}: {self.what}{where}: {values}"


def read(folder: Path) -> Outputs:
    """A run's folder. Raises OSError where a file is missing, ValueError where one is cut."""
    trace: dict[str, list[Row]] = {}
    if (folder / "trace.jsonl").is_file():
        for line in _lines(folder / "trace.jsonl"):
            trace.setdefault(line["request"], []).append({key: line[key] for key in TRACED})
    requests = _lines(folder / "requests.jsonl")
    return Outputs(summary=read_summary(folder), requests=requests, trace=trace)


def read_summary(folder: Path) -> Summary:
    """summary.json of a run's folder; raises as `read` does."""
    summary: Summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summary


def _lines(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def troubles(outputs: Outputs, device: str) -> list[str]:
    """What is wrong with a run by itself."""
    summary, found = outputs.summary, []
    lossless = summary["lossless"]
    if summary["status"] != "ok":
        found.append(f"status {summary['status']}")
    if summary["num_errors"]:
        found.append(f"{summary['num_errors']} requests ended with an error")
    if not str(summary["device"]).startswith(device):
        found.append(f"ran on {summary['device']}, not on {device}")
    if lossless["verdict"] == "diverged":
        where = lossless["first_beyond_margin"] or {}
        at = f"{where.get('request')}, output token {where.get('position')}"
        found.append(f"diverged from method=none: {lossless['num_requests_diverged']} of ")
        found[-1] += f"{lossless['num_requests_checked']} requests, first {at}"
    elif lossless["verdict"] == "identical":
        ours, others = exact_match(summary), exact_match(summary["baseline"])
        if ours != others:
            found.append(f"exact match {ours} beside the baseline's {others}, though identical")
    return found


def built_in_rounds(summary: Summary) -> str | None:
    """What a run compiled or captured while it was measured; older trees do not say."""
    found: Counter[str] = Counter()
    for side in (summary, summary["baseline"] or {}):
        found.update(side.get("built_in_rounds") or {})
    return ", ".join(f"{count} {what}" for what, count in found.items() if count) or None


def exact_match(side: Summary | Baseline | None) -> float | None:
    """Of a summary or its baseline; None without answers."""
    accuracy = (side or {}).get("accuracy")
    return None if accuracy is None else accuracy["exact_match"]


def differences(device: Outputs, cpu: Outputs) -> list[Difference]:
    """The first difference of each request, in workload order; a missing request is one too."""
    found = []
    here = {row["id"]: row for row in device.requests}
    for row in cpu.requests:
        if row["id"] not in here:
            found.append(Difference(request=row["id"], what="missing on the device"))
            continue
        steps, wanted = device.trace.get(row["id"], []), cpu.trace.get(row["id"], [])
        difference = _in_rows(here.pop(row["id"]), row) or _in_steps(row["id"], steps, wanted)
        if difference is not None:
            found.append(difference)
    return found + [Difference(request=name, what="missing on the CPU") for name in here]


def _in_rows(ours: Row, other: Row) -> Difference | None:
    """In the lines of requests.jsonl: tokens first, then all else but times."""
    tokens, wanted = ours["output_token_ids"], other["output_token_ids"]
    if tokens != wanted:
        at, a, b = _first_unequal(tokens, wanted)
        what = "output token"
        return Difference(request=ours["id"], what=what, position=at, on_device=a, on_cpu=b)
    request = ours["id"]
    ours, other = _without_times(ours), _without_times(other)
    for key in sorted((set(ours) | set(other)) - NOT_COMPARED):
        a, b = ours.get(key), other.get(key)
        if a != b:
            return Difference(request=request, what=key, on_device=a, on_cpu=b)
    return None


def _without_times(row: Row) -> Row:
    """A row, and the rows inside it, without milliseconds."""
    return {
        key: _without_times(value) if isinstance(value, dict) else value
        for key, value in row.items()
        if not key.endswith("_ms")
    }


def _in_steps(request: str, steps: list[Row], wanted: list[Row]) -> Difference | None:
    """In the drafts that were verified, step by step."""
    if steps == wanted:
        return None
    at, a, b = _first_unequal(steps, wanted)
    keys = [key for key in TRACED if (a or {}).get(key) != (b or {}).get(key)]
    a, b = ({key: (step or {}).get(key) for key in keys} for step in (a, b))
    return Difference(request=request, what="verify step", position=at, on_device=a, on_cpu=b)


def _first_unequal(ours: list[Any], other: list[Any]) -> tuple[int, Any, Any]:
    shorter = min(len(ours), len(other))
    at = next((i for i in range(shorter) if ours[i] != other[i]), shorter)
    return at, *(side[at] if at < len(side) else None for side in (ours, other))


def judge_float32(device: Outputs, cpu: Outputs, *, greedy: bool) -> tuple[list[str], list[str]]:
    """Problems, and draws that are excused.

    Greedy requests are equal in every token, draft and count. A sampled draw may fall on the other
    side of a threshold that the two sums round apart: MAX_EXCUSED_IN_A_CELL requests may.
    """
    unequal = differences(device, cpu)
    excused = [] if greedy or len(unequal) > MAX_EXCUSED_IN_A_CELL else unequal
    excused = [d for d in excused if not d.what.startswith("missing")]
    problems = [str(d) for d in unequal if d not in excused]
    if len(problems) > 3:
        problems[3:] = [f"and {len(problems) - 3} requests more"]
    ours, other = (side.summary["lossless"]["verdict"] for side in (device, cpu))
    if ours != other:
        problems.append(f"verdict {ours}, {other} on the CPU")
    for side in ("method", "baseline"):
        a, b = (s if side == "method" else s["baseline"] for s in (device.summary, cpu.summary))
        allowed = 0.0 if greedy else EXACT_MATCH_MARGIN
        ours, other = exact_match(a), exact_match(b)
        if (ours is None) != (other is None) or abs((ours or 0) - (other or 0)) > allowed:
            problems.append(f"exact match of the {side}: {ours}, {other} on the CPU")
    return problems, [str(d) for d in excused]


def judge_bfloat16(device: Outputs, cpu: Outputs | None) -> list[str]:
    """Problems of a bfloat16 run, beside the CPU's in float32; rounding excuses a little."""
    problems = []
    verdict = device.summary["lossless"]["verdict"]
    if verdict not in ("identical", "numerical", "diverged"):  # `troubles` names the last
        problems.append(f"verdict {verdict}")
    if cpu is None:
        return problems
    sides = [("method", device.summary), ("baseline", device.summary["baseline"])]
    for side, ours in sides:
        wanted = exact_match(cpu.summary if side == "method" else cpu.summary["baseline"])
        found = exact_match(ours)
        if None not in (found, wanted) and found < wanted - EXACT_MATCH_MARGIN:
            problems.append(f"exact match of the {side}: {found}, {wanted} in float32 on the CPU")
    length, wanted = (s.summary["acceptance_length"]["mean"] for s in (device, cpu))
    if abs((length or 0) - (wanted or 0)) > ACCEPTANCE_LENGTH_MARGIN:
        problems.append(f"acceptance length {length}, {wanted} in float32 on the CPU")
    return problems

"""Speedups of a report's jobs as they would be at another target's step costs, such as those of a
large one: their counts of steps and accepted drafts, times measured milliseconds.

A step is assumed to have as many requests as run at once, at the mean context of the job's requests
where costs are known by context, and the drafter as many right drafts as
it has for its own target. No prompt is read beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from hydraspec.analysis.predict.auto import auto_steps, in_batches
from hydraspec.engine import costs as step_costs
from hydraspec.engine.costs import CostTable
from hydraspec.metrics.assessment import as_interval
from hydraspec.metrics.files import Json
from hydraspec.metrics.paired import PairedRatio, paired_ratio
from hydraspec.metrics.run_files import COSTS, job_number, read_summary
from hydraspec.study.blocks import Block, Line, Section, Study, Table, Verdict
from hydraspec.study.groups import Runs
from hydraspec.study.jobs import Job
from hydraspec.study.pairs import ALL
from hydraspec.study.ranking import BEST, Group
from hydraspec.study.runs import refuse
from hydraspec.study.texts import estimate

MEASURED_AS = {"suffix": "ngram"}  # their drafts cost the target's rows, and little else
VARY = {"suffix"}  # steps have rows for the drafts that there are, at most K
REMEDY = (
    "measure them: python -m hydraspec -m target=… method=… method.num_speculative_tokens=auto "
    "method.max_speculative_tokens=7 workload.concurrency=null hydra.sweep.dir=<folder>"
)


@dataclass(slots=True, frozen=True, kw_only=True)
class TargetCosts:
    """Step costs of one target with several drafters.

    Attributes:
        target, device: names, as a summary has them.
        tables: by method.
    """

    target: str
    device: str
    tables: Mapping[str, CostTable]

    def of(self, method: str) -> CostTable | None:
        """The table of a method's steps; None: they were not measured."""
        return self.tables.get(method) or self.tables.get(MEASURED_AS.get(method, ""))

    def plain_ms(self, own: CostTable, batch: float, context: float) -> float:
        """Milliseconds of a step without drafts, beside a drafter's `own` steps: a drafter with its
        own cache does some work with K=0 too. Its time is left out where it was measured, as on a
        CPU, whose speed changes from run to run; else the least of all tables counts."""
        without_drafting = own.at(batch, 0, context).verify_ms
        if without_drafting is not None:
            return without_drafting
        return min(table.at(batch, 0, context).step_ms for table in self.tables.values())


def read(folder: Path) -> TargetCosts:
    """The costs that runs with K chosen per step have left in a folder, or in a sweep's jobs.

    Raises:
        ConfigurationError: no such run, tables without K=0, or runs of several targets.
    """
    inside = folder.iterdir() if folder.is_dir() else ()
    found = [each for each in (folder, *sorted(inside, key=job_number)) if (each / COSTS).is_file()]
    summaries = [summary for each in found if (summary := read_summary(each)) is not None]
    allowed = f"the folder of a run with {COSTS} in it, or of a sweep of such runs of one target"
    if not found or len(summaries) < len(found):
        problem = f"holds no run with {COSTS}" if not found else "holds a run that has not ended"
        raise refuse(folder, problem, allowed=allowed, remedy=REMEDY)
    targets = sorted({summary["target"] for summary in summaries})
    if len(targets) > 1:
        raise refuse(
            folder, f"has costs of {' and '.join(targets)}", allowed=allowed, remedy="give one's"
        )
    tables = [step_costs.read(each / COSTS) for each in found]
    if any(table.drafts[0] for table in tables):
        raise refuse(folder, f"{COSTS} has no steps with K=0", allowed=allowed, remedy=REMEDY)
    return TargetCosts(
        target=targets[0],
        device=summaries[0]["device"],
        tables={summary["method"]: each for summary, each in zip(summaries, tables, strict=True)},
    )


def extended(made: Study, runs: Runs, costs: TargetCosts) -> Study:
    """The report with a verdict and a section for each load, predicted at these costs."""
    sections, verdicts = list[Section](), list[Verdict]()
    for group in runs.groups:
        found = {
            job.title: by_scope
            for job in (one.job for one in group.jobs)
            if (by_scope := predicted(job, costs)) is not None
        }
        auto = dict[str, Mapping[str, PairedRatio]]()
        for job in sorted((one.job for one in group.jobs), key=_most_drafts):
            if (by_scope := by_request(job, costs)) is not None:
                auto[f"{job.drafter}, by request"] = by_scope  # of the job with the most drafts
        if found:
            about = f"At the step costs of {costs.target}"
            if group.title:
                about += f", {group.title}"
            sections.append(_section(about, group, found, auto, costs))
            verdicts.append(_verdict(about, found))
    without = sorted(
        {job.runs[0].summary["method"] for job in runs.jobs if not job.is_plain}
        - {method for job in runs.jobs if costs.of(method := job.runs[0].summary["method"])}
    )
    notes = [f"No step costs of {costs.target} with {', '.join(without)}."] if without else []
    return replace(
        made,
        sections=[*made.sections, *sections],
        verdicts=[*made.verdicts, *verdicts],
        notes=[*made.notes, *notes],
    )


def _most_drafts(job: Job) -> int:
    most = job.summary["num_speculative_tokens"]
    return most if isinstance(most, int) else 0


def predicted(job: Job, costs: TargetCosts) -> dict[str, PairedRatio] | None:
    """Speedups by scope, ALL and the categories; None for a job without drafts, with K chosen per
    step, or whose drafter's costs are not known. Intervals are over requests."""
    if (load := _Load.of(job, costs)) is None:
        return None
    steps = range(load.most_drafts + 1)
    step_ms = [load.table.at(load.batch, k, load.context).step_ms for k in steps]
    varies = job.runs[0].summary["method"] in VARY
    return load.ratios(
        [
            _of_varying(row, step_ms) if varies else row["decode_steps"] * step_ms[-1]
            for row in load.rows
        ]
    )


def by_request(job: Job, costs: TargetCosts) -> dict[str, PairedRatio] | None:
    """Speedups as `predicted`, with at most the job's drafts, chosen by request as the engine does
    at these costs from how often each request accepted its own; None also where drafts vary."""
    load = _Load.of(job, costs)
    if load is None or job.runs[0].summary["method"] in VARY:
        return None
    accepted = np.array([row["accepted_per_position"] for row in load.rows], float)
    survivals = accepted / np.array([max(1, row["num_drafts"]) for row in load.rows])[:, None]
    steps = auto_steps(load.table, survivals, range(load.most_drafts + 1))
    took = list[float]()
    for step in in_batches(steps, len(load.rows), load.batch, round(load.context)):
        for count in step.counts[: len(load.rows) - len(took)]:
            row, survival = load.rows[len(took)], survivals[len(took)]
            took.append(row["decode_tokens"] / (1 + survival[:count].sum()) * step.milliseconds)
    return load.ratios(took)


@dataclass(slots=True, frozen=True)
class _Load:
    """A job's requests beside the costs of its drafter's steps."""

    table: CostTable
    most_drafts: int
    batch: int
    rows: Sequence[Json]
    context: float
    plain_ms: float

    @classmethod
    def of(cls, job: Job, costs: TargetCosts) -> _Load | None:
        """None: see `predicted`."""
        summary = job.runs[0].summary
        table, most = costs.of(summary["method"]), summary["num_speculative_tokens"]
        if job.is_plain or table is None or not isinstance(most, int):
            return None
        batch = summary["concurrency"] or summary["num_requests"]
        rows = [
            row
            for run in job.runs
            for row in run.rows
            if row["finish_reason"] != "error" and row.get("decode_steps")
        ]
        if not rows:
            return None
        context = _mean_context(rows)
        return cls(table, most, batch, rows, context, costs.plain_ms(table, batch, context))

    def ratios(self, took: Sequence[float]) -> dict[str, PairedRatio]:
        """Speedups by scope, of requests that take so many milliseconds."""
        times: dict[str, list[tuple[float, float]]] = {}
        for row, milliseconds in zip(self.rows, took, strict=True):
            pair = self.plain_ms * row["decode_tokens"], milliseconds
            for scope in {ALL, row["category"] or ALL}:
                times.setdefault(scope, []).append(pair)
        return {
            scope: paired_ratio(np.array(pairs).T, (1, -1), at_once=None)
            for scope, pairs in times.items()
        }


def _mean_context(rows: Sequence[Json]) -> float:
    """Mean tokens of these requests in the KV cache, over their decode steps."""
    tokens = sum(
        row["decode_steps"] * (len(row["prompt_token_ids"]) + len(row["output_token_ids"]) / 2)
        for row in rows
    )
    return float(tokens / sum(row["decode_steps"] for row in rows))


def _of_varying(row: Json, step_ms: Sequence[float]) -> float:
    """Milliseconds of a request's steps that have rows for its own drafts alone."""
    reached = [row["decode_steps"], *row["drafted_per_position"], 0]
    counts = [longer - shorter for longer, shorter in pairwise(reached)]
    return float(sum(n * ms for n, ms in zip(counts, step_ms, strict=False)))


ByJob = Mapping[str, Mapping[str, PairedRatio]]


def _best(found: ByJob, scope: str) -> str | None:
    """The job with the highest predicted speedup in a scope; None: none is above 1."""
    known = {name: ratios[scope].ratio or 0.0 for name, ratios in found.items() if scope in ratios}
    best = max(known, key=known.__getitem__)
    return best if known[best] > 1 else None


def _scopes(found: ByJob) -> list[str]:
    return list(dict.fromkeys(scope for ratios in found.values() for scope in ratios))


def _section(about: str, group: Group, found: ByJob, auto: ByJob, costs: TargetCosts) -> Section:
    scopes = _scopes(found)
    best = {scope: _best(found, scope) for scope in scopes}
    lines = [
        Line(
            cells=[
                name,
                *(
                    f"{BEST} " * (best[scope] == name)
                    + estimate(as_interval(ratios.get(scope)), "x")
                    for scope in scopes
                ),
            ],
            kind="good" if best[ALL] == name else "",
        )
        for name, ratios in found.items()
    ]
    lines += [
        Line(
            cells=[
                name,
                *(estimate(as_interval(ratios.get(scope)), "x") for scope in scopes),
            ]
        )
        for name, ratios in auto.items()
    ]
    block = Block(
        title="Predicted speedup by category",
        note=f"{BEST}: the highest of the category, where it is above 1. These runs' steps and "
        f"accepted drafts, at the milliseconds of {costs.target}'s steps on {costs.device}; a "
        "drafter that is trained for it may be right more or less often. Suffix decoding has rows "
        "for the drafts of a request alone, which is a lower bound of its time where several run. "
        "By request: up to K drafts as method.num_speculative_tokens=auto chooses them, with what "
        "each request accepts known.",
        table=Table(header=["job", *(scope or "all" for scope in scopes)], lines=lines),
    )
    folders = [run.folder for one in group.jobs for run in one.job.runs]
    return Section(title=about, blocks=[block], folders=folders)


def _verdict(about: str, found: ByJob) -> Verdict:
    def words(scope: str) -> str:
        best = _best(found, scope)
        if best is None:
            return "no drafts"
        return f"{best}, {estimate(as_interval(found[best][scope]), 'x')}"

    best = _best(found, ALL)
    return Verdict(
        kind="bad" if best is None else "good",
        about=about,
        sentence=f"Predicted to be the fastest: {words(ALL)}.",
        reasons=[f"{scope}: {words(scope)}." for scope in _scopes(found) if scope != ALL],
    )

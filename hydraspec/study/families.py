"""Blocks of jobs under several loads and setups: the fastest job of each setup, and tokens per
second of one user against those of all users together.

Setups are splits, devices, engines and engine settings. Each setup has its own baseline, so that
setups are compared by tokens per second, as measured. Within a group, whose jobs share a baseline,
a machine that changes between jobs moves all points of a job. So where every job of a group has a
baseline, a job's speeds are divided by its own baseline and multiplied by the group's mean one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from hydraspec.study.blocks import Block, Kind, Line, Panel, Table, Verdict
from hydraspec.study.charts import COLORS, Points, Spot, scatter
from hydraspec.study.groups import Family
from hydraspec.study.jobs import Job, by_key
from hydraspec.study.pairs import ALL
from hydraspec.study.ranking import Group, JobFigures, Speeds
from hydraspec.study.texts import number

HEADER = (
    *("settings", "devices", "most tokens/s with", "tokens/s", "per device"),
    *("without drafts", "speedup over it", "lossless"),
)


@dataclass(slots=True, frozen=True, kw_only=True)
class Fastest:
    """The job with the most tokens per second of a group; `speed` is its tokens per second."""

    group: Group
    of: JobFigures
    speed: float

    @property
    def per_device(self) -> float:
        """Tokens per second / number of devices."""
        return self.speed / self.of.job.num_devices


def setups(family: Family) -> Block | None:
    """Table with a line for each load and setup: the fastest job whose outputs are the target's;
    None where no load ran on several setups."""
    lines = [
        _line(one, "good" if one is found[0] else "")
        for found in fastest_by_load(family)
        for one in found
    ]
    if not lines:
        return None
    return Block(
        title="Tokens per second by setup",
        note="Of each the job with the most tokens/s of all users, of those whose outputs are the "
        "target's. As measured: without a common baseline a machine that changes between jobs does "
        "not cancel. Speedups are over each job's own baseline: they do not say which is faster.",
        table=Table(header=HEADER, lines=lines),
    )


def fastest_by_load(family: Family) -> list[list[Fastest]]:
    """The fastest job of each setup, fastest first: a list for each load with several setups."""
    found = [one for group in family.groups if group.setup and (one := _fastest(group))]
    loads = by_key(found, [one.group.load for one in found])
    several = [members for members in loads.values() if len(members) > 1]
    return [sorted(members, key=lambda one: -one.speed) for members in several]


def setup_verdicts(family: Family) -> Iterator[Verdict]:
    """Yields a verdict for each load with several setups: a sentence on the fastest setup."""
    for first, *others in fastest_by_load(family):
        parts = [f"{_full_name(first)}: {_rates(first)}"]
        parts += [f"{one.group.setup}: {_rates(one)}" for one in others]
        sentence = f"Most tokens/s, as measured: {'; '.join(parts)}."
        yield Verdict(kind="", about=_about(first), sentence=sentence)


def fastest_figures(family: Family) -> dict[str, object]:
    """The fastest job of each load and its tokens per second, for a tracker."""
    found: dict[str, object] = {}
    for first, *_ in fastest_by_load(family):
        title = _about(first) or "all"
        found[f"fastest/{title}/job"] = _full_name(first)
        found[f"fastest/{title}/output_tokens_per_second"] = first.speed
    return found


def _about(one: Fastest) -> str:
    return ", ".join(part for part in (one.group.family, one.group.load) if part)


def _full_name(one: Fastest) -> str:
    return f"{one.group.setup} with {one.of.job.title}"


def _rates(one: Fastest) -> str:
    """Tokens per second as text: "850", or with several devices "850 (425 per device)"."""
    per_device = f" ({number(one.per_device, 0)} per device)" if one.of.job.num_devices > 1 else ""
    return f"{number(one.speed, 0)}{per_device}"


def _fastest(group: Group) -> Fastest | None:
    found = [
        Fastest(group=group, of=of, speed=of.speeds.tokens_per_second)
        for of in group.jobs
        if of.speeds.tokens_per_second and of.job.lossless["verdict"] != "diverged"
    ]
    return max(found, key=lambda one: one.speed, default=None)


def _line(one: Fastest, kind: Kind) -> Line:
    baseline, speedup, job = one.of.own_baseline, one.of.speedups[ALL], one.of.job
    cells = [
        ", ".join(part for part in (one.group.load, one.group.setup) if part),
        str(job.num_devices),
        job.title,
        *(number(value, 0) for value in (one.speed, one.per_device, baseline.tokens_per_second)),
        f"{speedup['mean']:.2f}x" if speedup else "-",
        job.lossless["verdict"].replace("_", " "),
    ]
    return Line(cells=cells, link=job.folder, kind=kind)


# ---------------------------------------------------------------- one user against all

PER_USER, TOTAL = "tokens_per_second_per_user", "output_tokens_per_second"
MAX_LABEL = 10  # characters beside a point
BASELINE = "none"
TOTAL_OF = "tokens_per_second"  # the total in `Speeds`
CORRECTED = (
    "Each job's speeds are those over its own baseline, times the mean baseline of all jobs on the "
    "same devices, engine and settings: a machine that changes between these cancels."
)
AS_MEASURED = "Each as the machine ran it at that time: not every job has a baseline."


@dataclass(slots=True, frozen=True, kw_only=True)
class Point:
    """A job or a group's baseline, with tokens per second of one user and of all users."""

    name: str
    label: str
    method: str
    settings: str  # points with equal settings are joined
    per_user: float
    total: float


def pareto(family: Family) -> Block | None:
    """Scatter chart of tokens per second of one user and of all users, with a point for each job;
    None without points. A line joins jobs that differ only in load, or with one load only in K."""
    points = _points(family)
    if not points:
        return None
    methods = sorted({point.method for point in points} - {BASELINE})
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(methods)}
    colors[BASELINE] = "var(--baseline)"
    points.sort(key=lambda point: (point.method == BASELINE, point.method))
    lines = by_key(points, [point.settings for point in points])
    front = front_of(points)
    corrected = all(_own_baselines(group) for group in family.groups)
    chart = scatter(
        [
            Points(
                name=members[0].method,
                color=colors[members[0].method],
                values=[
                    Spot(x=p.per_user, y=p.total, title=_title(p), label=p.label) for p in members
                ],
            )
            for members in lines.values()
        ],
        [(point.per_user, point.total) for point in front],
        x_name="tokens/s of one user",
        y_name="tokens/s of all users",
        description="Decode throughput of one user against that of all users",
    )
    names = "; ".join(point.name for point in front)
    ahead = (
        f"Ahead in both: {names}." if len(front) == 1 else f"Dashed, not beaten in both: {names}."
    )
    basis = CORRECTED if corrected else AS_MEASURED
    note = f"Up and to the right is better; colours are drafters, numbers K. {ahead} {basis}"
    panel = Panel(kind="scatter", title="Tokens/s: one user, all users", metrics=(PER_USER, TOTAL))
    return Block(
        title="Throughput of one user and of all",
        note=note,
        chart=chart,
        panels=(panel,),
        narrow=True,
    )


def front_of(points: Sequence[Point]) -> list[Point]:
    """The Pareto front: points that no other point beats at both speeds, by rising `per_user`."""
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.per_user, -p.total)):
        if not found or point.total > found[-1].total:
            found.append(point)
    return found[::-1]


def _points(family: Family) -> list[Point]:
    points = []
    over_load = len({group.load for group in family.groups}) > 1
    for group in family.groups:
        own = _own_baselines(group)
        common = _mean(list(own.values()))
        labels = _labels([one.job for one in group.jobs])
        by_k = sorted(
            zip(group.jobs, labels, strict=True),
            key=lambda pair: pair[0].job.summary["num_speculative_tokens"] or math.inf,
        )
        for one, label in by_k:
            job = one.job
            speeds = _scaled(one.speeds, own[job.name], common) if own else one.speeds
            name = _at(group, job.title)
            settings = _at(group, job.label if over_load else job.drafter)
            short = f"{group.setup} {label}".strip()
            points += _point(name, short, job.summary["method"], settings, speeds)
        if own and not any(one.job.is_plain for one in group.jobs):
            plain = _at(group, "without drafts")
            points += _point(plain, BASELINE, BASELINE, _at(group, BASELINE), common)
    return points


def _at(group: Group, name: str) -> str:
    """A name, followed by the group's setup if there are several setups."""
    return f"{name}, {group.setup}" if group.setup else name


def _labels(jobs: Sequence[Job]) -> list[str]:
    """Labels of points: K where drafter and K tell all jobs apart, else the jobs' names."""
    keys = [tuple(job.label.split(", ")) for job in jobs]
    if len(set(keys)) < len(keys) or any(len(key) > 2 for key in keys):
        return [job.name for job in jobs]
    return [key[-1].removeprefix("K=") for key in keys]


def _own_baselines(group: Group) -> dict[str, Speeds]:
    """The baseline speeds of each job, by name; empty where a job has none."""
    found = {one.job.name: one.own_baseline for one in group.jobs}
    are_known = all(
        speeds.tokens_per_second and speeds.tokens_per_second_per_user for speeds in found.values()
    )
    return found if are_known else {}


def _mean(found: Sequence[Speeds]) -> Speeds:
    totals = [each.tokens_per_second or 0.0 for each in found]
    per_user = [each.tokens_per_second_per_user or 0.0 for each in found]
    return Speeds(
        tokens_per_second=fmean(totals) if totals else None,
        tokens_per_second_per_user=fmean(per_user) if per_user else None,
    )


def _scaled(speeds: Speeds, own: Speeds, common: Speeds) -> Speeds:
    def scaled(name: str) -> float | None:
        mine, base, mean = (getattr(each, name) for each in (speeds, own, common))
        return None if mine is None else mine / base * mean

    return Speeds(tokens_per_second=scaled(TOTAL_OF), tokens_per_second_per_user=scaled(PER_USER))


def _point(name: str, short: str, method: str, settings: str, speeds: Speeds) -> list[Point]:
    per_user, total = speeds.tokens_per_second_per_user, speeds.tokens_per_second
    if per_user is None or total is None:
        return []
    label = short if len(short) <= MAX_LABEL else ""
    made = Point(
        name=name, label=label, method=method, settings=settings, per_user=per_user, total=total
    )
    return [made]


def _title(point: Point) -> str:
    return f"{point.name}: {number(point.per_user, 0)} and {number(point.total, 0)} tokens/s"

"""Setups side by side: the splits, devices, engines and engine settings of a report's runs.

Each has its own baseline, so that setups are compared by tokens per second, as measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hydraspec.study.blocks import Block, Line, Table, Verdict
from hydraspec.study.comparison.pairs import ALL
from hydraspec.study.figures import JobFigures, figures_of, own_baseline
from hydraspec.study.groups import Family, Group
from hydraspec.study.texts import number

HEADER = (
    *("settings", "devices", "most tokens/s with", "tokens/s", "per device"),
    *("without drafts", "speedup over it", "lossless"),
)


@dataclass(slots=True, frozen=True, kw_only=True)
class Fastest:
    """The job with the most tokens per second of a group."""

    group: Group
    of: JobFigures
    speed: float

    @property
    def per_device(self) -> float:
        """Tokens per second / devices."""
        return self.speed / self.of.job.num_devices


def setups(family: Family) -> Block | None:
    """A line for each load and setup: the fastest job whose outputs are the target's."""
    lines = [
        _line(one, is_best=one is found[0]) for found in fastest_by_load(family) for one in found
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
    """For each load on several setups the fastest job of each setup, fastest first."""
    loads: dict[str, list[Fastest]] = {}
    for group in family.groups:
        if group.setup and (found := _fastest(group)) is not None:
            loads.setdefault(group.load, []).append(found)
    several = [found for found in loads.values() if len(found) > 1]
    return [sorted(found, key=lambda one: -one.speed) for found in several]


def setup_verdicts(family: Family) -> Iterator[Verdict]:
    """Which setup is fastest, in a sentence for each load."""
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
    return f"{one.group.setup} with {one.of.name}"


def _rates(one: Fastest) -> str:
    """ "850", with several devices "850 (425 per device)"."""
    per_device = f" ({number(one.per_device, 0)} per device)" if one.of.job.num_devices > 1 else ""
    return f"{number(one.speed, 0)}{per_device}"


def _fastest(group: Group) -> Fastest | None:
    found = [
        Fastest(group=group, of=of, speed=of.speeds.tokens_per_second)
        for of in (figures_of(job, group) for job in group.jobs)
        if of.speeds.tokens_per_second and of.lossless["verdict"] != "diverged"
    ]
    return max(found, key=lambda one: one.speed, default=None)


def _line(one: Fastest, *, is_best: bool) -> Line:
    baseline, speedup = own_baseline(one.of.job), one.of.speedups[ALL]
    cells = [
        ", ".join(part for part in (one.group.load, one.group.setup) if part),
        str(one.of.job.num_devices),
        one.of.name,
        *(number(value, 0) for value in (one.speed, one.per_device, baseline.tokens_per_second)),
        f"{speedup['mean']:.2f}x" if speedup else "-",
        one.of.lossless["verdict"].replace("_", " "),
    ]
    return Line(cells=cells, link=one.of.folder, is_best=is_best)

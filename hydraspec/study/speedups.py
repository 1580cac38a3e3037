"""Chart of the speedups of a group's jobs, and the colours of jobs and drafters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hydraspec.study.blocks import Block, Kind, Panel
from hydraspec.study.charts import COLORS, Bar, Chart, Points, Spot, horizontal_bars, scatter
from hydraspec.study.jobs import Job
from hydraspec.study.pairs import ALL
from hydraspec.study.ranking import BEST, Group, JobFigures
from hydraspec.study.texts import ci_words

MAX_BARS = 24
COLOR_OF: dict[Kind, str] = {
    "good": "var(--good)",
    "bad": "var(--bad)",
    "plain": "var(--baseline)",
    "": "var(--method)",
}


def kind_of(one: JobFigures, group: Group) -> Kind:
    """Kind of a job: "plain" without drafts, "bad" if significantly slower than no drafts, "good"
    if the best job and, where speedup ranks, significantly faster; "" otherwise."""
    if one.job.is_plain:
        return "plain"
    speed = one.speedups[ALL]
    low, high = (speed and speed["ci95"]) or (0.0, 1.0)
    if high < 1:
        return "bad"
    return "good" if one.mark == BEST and (low > 1 or group.by != "speedup") else ""


def speedups(group: Group) -> Block | None:
    """Chart of each job's speedup over decoding without drafts, with intervals: a line per drafter
    over K, or bars where K does not vary; None without speedups."""
    over_k = _by_drafts(group)
    chart = over_k or _bars(group)
    if chart is None:
        return None
    return Block(
        title="Speedup over decoding without drafts",
        note="Each against its own baseline, with 95 % intervals; dashed: 1, as fast as without.",
        chart=chart,
        panels=(Panel(kind="bar", title="Speedup", metrics=("speedup/mean",)),),
        narrow=over_k is not None,
    )


def _by_drafts(group: Group) -> Chart | None:
    """Chart of lines over K; a K chosen per step is drawn at its mean. None with fewer than two
    fixed values of K."""
    lines: dict[tuple[str, bool], list[Spot]] = {}
    for one in group.jobs:
        speed, summary = one.speedups[ALL], one.job.summary
        if one.job.is_plain or speed is None:
            continue
        used = summary.get("num_speculative_tokens_used")
        k = (used and used["mean"]) or summary["num_speculative_tokens"]
        words = f"{speed['mean']:.2f}x{ci_words(speed['ci95'])}"
        spot = Spot(
            x=k,
            y=speed["mean"],
            title=f"{one.job.title}: {words}",
            label="auto" if used else "",
            ci95=speed["ci95"],
        )
        lines.setdefault((one.job.drafter, bool(used)), []).append(spot)
    fixed = sorted({spot.x for (_, chosen), spots in lines.items() if not chosen for spot in spots})
    if len(fixed) < 2:
        return None
    colors = drafter_colors(name for name, _ in lines)
    found = [
        Points(
            name=name,
            color=colors[name],
            values=sorted(spots, key=lambda spot: spot.x),
            shift=6.0 * (list(colors).index(name) - (len(colors) - 1) / 2),
        )
        for (name, _), spots in sorted(lines.items())
    ]
    return scatter(
        found,
        x_name="K, draft tokens a step",
        y_name="speedup",
        description="Speedup by number of draft tokens, a line for each drafter",
        x_ticks=fixed,
        level=1.0,
    )


def _bars(group: Group) -> Chart | None:
    labels = bar_labels([one.job for one in group.jobs])
    bars = [
        Bar(
            label=label,
            value=found["mean"],
            text=f"{found['mean']:.2f}x",
            color=COLOR_OF[kind_of(one, group)],
            ci95=found["ci95"],
        )
        for one, label in list(zip(group.jobs, labels, strict=True))[:MAX_BARS]
        if (found := one.speedups[ALL])
    ]
    return horizontal_bars(bars, description="Speedup of each job", mark=1.0)


def drafter_colors(drafters: Iterable[str]) -> dict[str, str]:
    """The CSS colour of each drafter, the same in every chart of a group."""
    names = sorted(set(drafters))
    return {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}


def bar_labels(found: Sequence[Job]) -> list[str]:
    """Text beside the bars of jobs: their labels where these differ, else their titles."""
    is_enough = len({job.label for job in found}) == len(found)
    return [(job.label if is_enough else job.title)[:28] for job in found]

"""Blocks of a group of jobs: table, speedups, predictions, acceptance, where time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hydraspec.metrics.accuracy import accuracy_name
from hydraspec.metrics.assessment import as_interval
from hydraspec.metrics.draft_figures import draft_share
from hydraspec.metrics.lossless import verdict_words
from hydraspec.study import ranked_blocks
from hydraspec.study.blocks import Block, Line, Panel, Table
from hydraspec.study.charts import Bar, Stack, horizontal_bars, stacked_bars
from hydraspec.study.figures import JobFigures
from hydraspec.study.groups import Group
from hydraspec.study.pairs import ALL
from hydraspec.study.texts import estimate, number
from hydraspec.study.words import drift_words, verdicts

HEADER = ("job", "speedup", "against the best", "acceptance length")
SPEEDS = ("tokens/s of one user", "tokens/s of all", "lossless")
MAX_BARS = 24


def jobs(group: Group) -> Block:
    """All jobs with their main figures, each linked to its page."""
    found = group.figures
    lines = [
        Line(
            cells=[
                f"{one.mark} {one.name}".strip(),
                *(estimate(one.speedups[ALL], "x"), _against(one, group)),
                estimate(one.lengths[ALL]),
                number(one.speeds.tokens_per_second_per_user, 0),
                number(one.speeds.tokens_per_second, 0),
                one.lossless["verdict"].replace("_", " "),
                _exact_match(one),
            ],
            link=one.folder,
            is_best=bool(one.mark),
        )
        for one in found
    ]
    note = "Means with 95 % intervals. "
    if group.ranking:
        note += ranked_blocks.NOTE
    drift = drift_words(group.ranking) if group.ranking else None
    return Block(
        title="Jobs",
        note=note,
        sentences=[drift] if drift else (),
        table=Table(header=[*HEADER, *SPEEDS, _correct(found)], lines=lines),
    )


def speedups(group: Group) -> Block | None:
    """The speedup of each job over decoding without drafts, as bars with intervals."""
    found = [(one, one.speedups[ALL]) for one in group.figures]
    labels = ranked_blocks.bar_labels(group.jobs)
    bars = [
        Bar(
            label=label,
            value=speed["mean"],
            text=f"{number(speed['mean'])}x",
            color="var(--good)" if one.mark else "var(--method)",
            ci95=speed["ci95"],
        )
        for (one, speed), label in list(zip(found, labels, strict=True))[:MAX_BARS]
        if speed
    ]
    if not bars:
        return None
    return Block(
        title="Speedup over decoding without drafts",
        note="Each against its own baseline, with 95 % intervals; dashed: 1. Green: the best, and "
        "what cannot be told from it.",
        chart=horizontal_bars(bars, description="Speedup of each job", mark=1.0),
        panels=(Panel(kind="bar", title="Speedup", metrics=("speedup/mean",)),),
    )


def told(group: Group) -> Block | None:
    """What is told of each job against the best, in sentences."""
    if group.ranking is None:
        return None
    brief = len(group.jobs) > 2
    return Block(
        title="Against the best job",
        note="Paired request by request; corrected for the number of comparisons.",
        sentences=list(verdicts(group.ranking, brief=brief)),
    )


def acceptance_by_position(group: Group) -> Block | None:
    """A curve per job, and a table."""
    found = [one for one in group.figures if one.by_position]
    width = max((len(one.by_position) for one in found), default=0)
    if not width:
        return None
    labels = [str(i + 1) for i in range(width)]
    lines = [
        Line(cells=[one.name, *map(_percent, _padded(one.by_position, width))]) for one in found
    ]
    metrics = [f"acceptance_rate_per_position/{i}" for i in range(width)]
    return Block(
        title="Accepted drafts by position",
        note="Accepted at a position / verifications; positions of draft tokens from 1. A line for "
        "each job, in the colour of its drafter.",
        chart=ranked_blocks.position_curves([(one.job, one.by_position) for one in found]),
        table=Table(header=["job", *labels], lines=lines),
        panels=(Panel(kind="bar", title="Acceptance rate by position", metrics=metrics),),
    )


def acceptance_by_category(group: Group) -> Block | None:
    """Speedup and acceptance length of each category, job by job."""
    found = group.figures
    scopes = list(dict.fromkeys(scope for one in found for scope in one.lengths if scope != ALL))
    if not scopes:
        return None
    lines = [
        Line(cells=[one.name, *(_both(one, scope) for scope in (ALL, *scopes))]) for one in found
    ]
    metrics = [f"acceptance_length_by_category/{scope}" for scope in scopes]
    return Block(
        title="By category",
        note="Speedup, and acceptance length with its 95 % interval.",
        table=Table(header=["job", "all", *scopes], lines=lines),
        panels=(Panel(kind="bar", title="Acceptance length by category", metrics=metrics),),
    )


def lossless(group: Group) -> Block:
    """Returns whether outputs are the target's own: a sentence where it is the same of all jobs."""
    found = group.figures
    drafting = [verdict_words(one.lossless) for one in found if not one.is_plain]
    note = "Outputs of greedy requests against those of the same run without drafts."
    if len(drafting) > 1 and len(set(drafting)) == 1:
        said = f"All {len(drafting)} jobs with drafts: {drafting[0]}."
        return Block(title="Lossless", note=note, sentences=[said])
    lines = [
        Line(
            cells=[
                one.name,
                verdict_words(one.lossless),
                str(one.lossless["num_requests_checked"]),
                str(one.lossless["num_requests_diverged"]),
            ]
        )
        for one in found
    ]
    header = ("job", "verdict", "requests checked", "with another output")
    return Block(title="Lossless", note=note, table=Table(header=header, lines=lines))


def time_breakdown(group: Group) -> Block | None:
    """Mean milliseconds per step by phase."""
    found = [one for one in group.figures if one.breakdown_ms][:MAX_BARS]
    phases = list(dict.fromkeys(name for one in found for name in one.breakdown_ms))
    if not phases:
        return None
    colors = {name: f"var(--p{min(i, 5)})" for i, name in enumerate(phases)}
    stacks = [
        Stack(
            label=label,
            parts=[(name, one.breakdown_ms.get(name, 0.0), colors[name]) for name in phases],
            text=f"{number(sum(one.breakdown_ms.values()))} ms",
        )
        for one, label in zip(
            found, ranked_blocks.bar_labels([one.job for one in found]), strict=True
        )
    ]
    lines = [
        Line(
            cells=[
                one.name,
                *(number(one.breakdown_ms.get(name), 3) for name in phases),
                "-" if one.is_plain else _percent(draft_share(one.breakdown_ms)),
            ]
        )
        for one in found
    ]
    metrics = [f"time_breakdown_ms/{name}" for name in phases]
    return Block(
        title="Where a step's time goes",
        note=f"{_measured_over(found)} Drafting: the share of propose.",
        chart=stacked_bars(stacks, description="Mean milliseconds per step by phase"),
        table=Table(header=["job", *(f"{name}, ms" for name in phases), "drafting"], lines=lines),
        panels=(Panel(kind="bar", title="Milliseconds per step", metrics=metrics),),
    )


def _measured_over(found: Sequence[JobFigures]) -> str:
    sources = dict.fromkeys(one.summary["time_breakdown_from"] for one in found)
    return f"Means over {'; or '.join(str(source) for source in sources if source)}."


def _against(one: JobFigures, group: Group) -> str:
    ranked = one.ranked
    if ranked is None or group.ranking is None:
        return "-"
    versus = ranked.against("speedup")
    if ranked is group.ranking.reference:
        return "the best"
    return estimate(as_interval(versus.ratio)) if versus else "-"


def _both(one: JobFigures, scope: str) -> str:
    """Speedup and acceptance length of a category."""
    speed, length = one.speedups.get(scope), one.lengths.get(scope)
    parts = [f"{speed['mean']:.2f}x"] if speed else []
    parts += [estimate(length)] if length and length["mean"] is not None else []
    return ", ".join(parts) or "-"


def _correct(found: Sequence[JobFigures]) -> str:
    return accuracy_name(one.summary["accuracy"] for one in found)


def _exact_match(one: JobFigures) -> str:
    accuracy: Mapping[str, object] | None = one.summary["accuracy"]
    return f"{accuracy['exact_match']:.1%}" if accuracy else "-"


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1%}"


def _padded(values: Sequence[float | None], width: int) -> list[float | None]:
    return [*values, *[None] * (width - len(values))]


def predictions(group: Group) -> Block | None:
    """A line per job that ran with metrics.prediction."""
    lines, errors = [], []
    for job in group.jobs:
        summary = job.summary
        found, speedup = summary.get("prediction"), summary["speedup"]
        if not found:
            continue
        error = found["error"]
        errors += [] if error is None else [abs(error)]
        cells = [
            job.name,
            f"{found['speedup']:.2f}x",
            f"{speedup['mean']:.2f}x" if speedup else "-",
            "-" if error is None else f"{error:+.1%}",
            f"{found['break_even_acceptance_length']:.2f}",
            f"{found['acceptance_length']:.2f}",
        ]
        mean = summary["acceptance_length"]["mean"]
        lines.append(
            Line(cells=[*cells, "-" if mean is None else f"{mean:.2f}"], link=job.runs[0].folder)
        )
    if not lines:
        return None
    header = ("job", "predicted", "measured", "error", "break-even acceptance length")
    said = f"Mean absolute error: {sum(errors) / len(errors):.1%}." if errors else ""
    return Block(
        title="Predicted speedup",
        note="Of python -m hydraspec.predict before the run. Below the break-even acceptance "
        "length drafts are slower than none.",
        sentences=[said] if said else (),
        table=Table(header=(*header, "predicted acceptance length", "measured"), lines=lines),
    )

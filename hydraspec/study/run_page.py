"""report.html: one self-contained page about one run.

The page shows the figures of the summary and computes none; templates/run.html has the texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml  # type: ignore[import-untyped]

from hydraspec.metrics.accuracy import accuracy_name
from hydraspec.metrics.draft_figures import draft_share
from hydraspec.metrics.files import plain
from hydraspec.metrics.formats import formats_of, shared_words
from hydraspec.metrics.lossless import HEADLINES
from hydraspec.metrics.summary import (
    PROFILE,
    AcceptanceLength,
    Baseline,
    Interval,
    Length,
    Summary,
)
from hydraspec.study import accepted, html
from hydraspec.study.blocks import Kind, Verdict
from hydraspec.study.charts import (
    Bar,
    Chart,
    Series,
    Stack,
    counted_bars,
    few_words,
    grouped_bars,
    horizontal_bars,
    stacked_bars,
)
from hydraspec.study.samples import Sample
from hydraspec.study.texts import TOO_FEW, milliseconds, number, percent
from hydraspec.study.worst import WorstRequest

# What an assessment says → kind, and what to do.
ASSESSMENTS: dict[str, tuple[Kind, str]] = {
    "worth_it": (
        "good",
        "Use these drafts. The same command with -m method.num_speculative_tokens=1,3,5 says "
        "whether another K is faster still.",
    ),
    "cannot_tell": (
        "",
        "Run more prompts (workload.limit, workload.path), so that the interval narrows.",
    ),
    "slower": (
        "bad",
        "Decode without drafts at this load (method=none), or try fewer drafts and fewer requests "
        "at once: the same command with -m method.num_speculative_tokens=1,2 "
        "workload.concurrency=1,4.",
    ),
}
METHOD, SECOND, BASELINE = "var(--method)", "var(--second)", "var(--baseline)"


@dataclass(slots=True, frozen=True, kw_only=True)
class Column:
    """The method or the baseline, as a column of the tables and a bar of the charts."""

    name: str
    figures: Summary | Baseline
    color: str


def render(
    summary: Summary,
    *,
    resolved: Mapping[str, object],
    samples: Sequence[Sample],
    worst: Sequence[WorstRequest],
    made: str,
) -> str:
    """The HTML of the page. `resolved` is the configuration, `made` has time and versions."""
    sides = [Column(name=summary["method"], figures=summary, color=METHOD)]
    if summary["baseline"]:
        sides.append(Column(name="none (baseline)", figures=summary["baseline"], color=BASELINE))
    phases = {
        name: f"var(--p{min(i, 5)})"
        for i, (name, ms) in enumerate(summary["time_breakdown_ms"].items())
        if ms is not None
    }
    return html.render(
        "run.html",
        summary=summary,
        made=made,
        formats=shared_words([formats_of(summary)]),
        verdict=HEADLINES[summary["lossless"]["verdict"]],
        by_position=_by_position(summary) if summary["num_drafts"] else None,
        by_drafts=_by_drafts(summary),
        by_survival=_by_survival(summary),
        by_category=_by_category(summary),
        by_place=_by_place(summary),
        accepted=accepted.part_blocks(summary["teacher_forced"] or {}),
        found=_answer(summary),
        few_requests=TOO_FEW if _lacks_intervals(summary) else "",
        worst=worst,
        sides=sides,
        throughput=_throughput(sides),
        phases=phases,
        draft_share=draft_share(summary["time_breakdown_ms"]) if summary["num_drafts"] else None,
        accuracy_name=accuracy_name([summary["accuracy"]]),
        breakdown=_breakdown(sides, phases) if phases else None,
        profile=PROFILE,
        samples=samples,
        cudagraph={k: v for k, v in summary["cudagraph"].items() if v},
        memory_mib={k: number(v / 2**20, 1) for k, v in summary["memory_bytes"].items()},
        config=yaml.safe_dump(plain(resolved), sort_keys=False, allow_unicode=True),
    )


def _answer(summary: Summary) -> Verdict:
    """Verdict on whether the run's drafts are worth it or why this is not known; what to do."""
    assessment = summary["assessment"]
    if summary["status"] != "ok":
        ended = f"{summary['num_requests']} of {summary['num_requests_in_workload']} requests ended"
        return Verdict(
            kind="bad",
            about="Status",
            sentence=f"The run is {summary['status']}: {ended}.",
            to_do=["Run it again; what ended is below."],
        )
    if summary["lossless"]["verdict"] == "diverged":
        return Verdict(
            kind="bad",
            about="",
            sentence="The outputs are not the target's: no speedup counts.",
            to_do=["See Lossless below for the first difference."],
        )
    if summary["method"] == "none":
        return Verdict(
            kind="plain",
            about="",
            sentence="Decoding without drafts: what drafters are compared with.",
            to_do=["Compare drafters: -m method=none,… method.num_speculative_tokens=1,3,5"],
        )
    if assessment is None:
        sentence = "Whether drafts are worth it is not known: the run has no baseline."
        return Verdict(kind="", about="", sentence=sentence, to_do=["Run with baseline=true."])
    kind, to_do = ASSESSMENTS[assessment["says"]]
    sentence = f"{assessment['sentence'][:1].upper()}{assessment['sentence'][1:]}."
    return Verdict(kind=kind, about="", sentence=sentence, to_do=[to_do])


def _lacks_intervals(summary: Summary) -> bool:
    """Returns whether a figure of the page has no interval where others have one."""
    found: list[Interval | AcceptanceLength | Length | None] = [
        summary["speedup"],
        summary["acceptance_length"],
    ]
    found += [
        of[key]
        for of in summary["by_category"].values()
        for key in ("speedup", "acceptance_length")
    ]
    found += [of["acceptance_length"] for of in summary["acceptance_by_output_place"]]
    return any(each and each["mean"] is not None and each["ci95"] is None for each in found)


def _by_position(summary: Summary) -> Chart:
    rates = summary["acceptance_rate_per_position"]
    series = [
        Series(name="of all drafts", color=METHOD, values=rates),
        Series(
            name="once the one before was accepted",
            color=SECOND,
            values=summary["conditional_acceptance_rate_per_position"],
        ),
    ]
    labels = [
        (f"draft {i + 1}" if len(rates) <= 8 else str(i + 1)) + few_words(num_reached)
        for i, num_reached in enumerate(summary["num_reached_per_position"])
    ]
    return grouped_bars(labels, series, description="Acceptance rate by draft position")


def _by_drafts(summary: Summary) -> Chart | None:
    """Chart of the share of decode steps with each number of drafts, 0 to K; None where K is
    fixed."""
    used = summary.get("num_speculative_tokens_used")
    if not used:
        return None
    total = sum(used["histogram"])
    bars = [
        Bar(
            label=f"{length} draft{'' if length == 1 else 's'}",
            value=count / total,
            text=f"{percent(count / total)} (n={count})",
            color="var(--method)",
        )
        for length, count in enumerate(used["histogram"])
    ]
    return horizontal_bars(bars, description="Decode steps by drafts per request")


def _by_survival(summary: Summary) -> Chart | None:
    """Chart of estimated and accepted shares of drafts, by the drafter's estimate; None where it
    estimates nothing."""
    found = summary.get("draft_survival")
    if not found:
        return None
    bins = found["bins"]
    series = [
        Series(name="estimated", color=SECOND, values=[each["estimated"] for each in bins]),
        Series(name="accepted", color=METHOD, values=[each["accepted"] for each in bins]),
    ]
    labels = [f"{each['to']:.1f} (n={each['num_draft_tokens']})" for each in bins]
    return grouped_bars(labels, series, description="Accepted drafts by estimated survival")


def _by_category(summary: Summary) -> Chart | None:
    lengths = {name: of["acceptance_length"] for name, of in summary["by_category"].items()}
    counts = summary["num_drafts_by_category"]
    found = [(name[:24], of["mean"], of["ci95"], counts[name]) for name, of in lengths.items()]
    found.sort(key=lambda each: -(each[1] or 0.0))
    return counted_bars(found, METHOD, description="Acceptance length by category", mark=1.0)


def _by_place(summary: Summary) -> Chart | None:
    places = [
        (f"{of['first']} to {of['last']}", of["acceptance_length"], of["num_drafts"])
        for of in summary["acceptance_by_output_place"]
    ]
    found = [(label, length["mean"], length["ci95"], count) for label, length, count in places]
    return counted_bars(
        found, SECOND, description="Acceptance length by place in the output", mark=1.0
    )


def _throughput(sides: Sequence[Column]) -> Chart | None:
    bars = [
        Bar(
            label=side.name,
            value=rate,
            text=f"{number(rate, 0)} tok/s",
            color=side.color,
            ci95=side.figures["output_tokens_per_second_ci95"],
        )
        for side in sides
        if (rate := side.figures["output_tokens_per_second"]) is not None
    ]
    return horizontal_bars(bars, description="Decode throughput")


def _breakdown(sides: Sequence[Column], phases: Mapping[str, str]) -> Chart:
    """Chart of mean milliseconds per step by phase; `phases` has the colours of measured phases."""
    stacks = []
    for side in sides:
        times = side.figures["time_breakdown_ms"]
        parts = [(name, times.get(name) or 0.0, color) for name, color in phases.items()]
        total = sum(ms for _, ms, _ in parts)
        stacks.append(Stack(label=side.name, parts=parts, text=f"{milliseconds(total)} ms"))
    return stacked_bars(stacks, description="Mean milliseconds per step by phase")

"""doctor.html, one self-contained page: verdict, what to do, evidence and figures. All of its
content comes from doctor.json; nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hydraspec.analysis.doctor.console import HEADER, SHOWN, variant_cells
from hydraspec.metrics.files import Json
from hydraspec.study import accepted, html
from hydraspec.study.blocks import Block, Kind, Line, Section, Study, Table, Verdict
from hydraspec.study.charts import Bar, Series, grouped_bars, horizontal_bars
from hydraspec.study.texts import number, percent

# Verdict → style of its box, and what to do if no repair of a convention was found.
VERDICTS: dict[str | None, tuple[Kind, str]] = {
    "convention": ("bad", "Set the convention as the evidence says."),
    "weights": (
        "bad",
        "Get the drafter's files again, or convert the checkpoint again; the evidence names the "
        "tensors to look at.",
    ),
    "weak": (
        "",
        "Train the drafter further on texts like these, or take another one: python -m "
        "hydraspec.matrix lists the methods of a target.",
    ),
    "healthy": (
        "good",
        "Nothing to mend. python -m hydraspec with the same keys says whether its drafts pay.",
    ),
    None: ("", "Give more prompts that the target answers (workload.limit, workload.path)."),
}
CEILINGS = {
    "oracle_features": "with the target's own states",
    "top_5": "if any of its best 5 counted",
    "draft_vocabulary": "if its vocabulary were right",
}
COLOR, EXPECTED, BOUND = "var(--method)", "var(--good)", "var(--baseline)"


def page_of(result: Json) -> str:
    """The HTML page for the content of doctor.json."""
    return html.study_page(study_of(result), Path())


def study_of(result: Json) -> Study:
    """The content of doctor.json as sections and blocks that the study page can render."""
    kind, to_do = VERDICTS[result["verdict"]]
    figures = result["figures"]  # null for a head that cannot be changed, see other_heads
    if figures is None:
        to_do = "Run it beside method=none: python -m hydraspec with the same keys."
    remedies = [f"{row['remedy'][:1].upper()}{row['remedy'][1:]}." for row in result["causes"]]
    made = [
        _lengths(result),
        None if figures is None else _by_step(result),
        _causes(result),
        _evidence(result),
        *accepted.part_blocks(figures or {}),
        *_tried(result),
        _drafter(result),
    ]
    return Study(
        question=f"Is the {result['method']} drafter of {result['target']} sound?",
        facts=f"drafter {result['drafter'] or 'without a folder'}, "
        f"K={result['num_speculative_tokens']}, "
        f"{result['num_texts']} answers, {result['num_starts']:,} places to draft from",
        verdicts=[
            Verdict(
                kind=kind,
                about=f"Verdict: {result['verdict'] or 'cannot tell'}",
                sentence=result["sentence"],
                to_do=remedies or [to_do],
            )
        ],
        notes=result["warnings"],
        sections=[Section(title="", blocks=[block for block in made if block])],
    )


def _lengths(result: Json) -> Block | None:
    """A bar chart of acceptance lengths: as configured, repaired, expected, and upper bounds."""
    now, repaired = result["acceptance"], result["best_acceptance"]
    found = [("as configured", now, COLOR)]
    if result["causes"]:
        found.append(("with the causes repaired", repaired, EXPECTED))
    found.append(("expected", result["expected_acceptance_length"], EXPECTED))
    if result["figures"] is not None:
        top = result["figures"]["ceilings"]
        found += [(words, top[key], BOUND) for key, words in CEILINGS.items()]
    bars = [
        Bar(label=label, value=value, text=number(value), color=color)
        for label, value, color in found
        if value is not None
    ]
    if not bars:
        return None
    share = result["draft_share_of_step"]
    drafting = "" if share is None else f" Drafting takes {percent(share)} of a decode step."
    return Block(
        title="Acceptance length",
        note="Tokens per verification; dashed: no draft accepted. Grey: what this drafter could "
        f"reach.{drafting}",
        chart=horizontal_bars(bars, description="Acceptance lengths", mark=1.0),
        narrow=True,
    )


def _by_step(result: Json) -> Block:
    steps = result["figures"]["by_step"]
    series = [
        Series(name="the best draft", color=COLOR, values=[step["top_1"] for step in steps]),
        Series(
            name="among its best 5", color="var(--second)", values=[step["top_5"] for step in steps]
        ),
    ]
    labels = [f"draft {step['step'] + 1}" for step in steps]
    lines = [
        Line(
            cells=[
                label,
                *(percent(step["top_1"]), percent(step["top_5"])),
                *(number(step["median_rank"], 0), number(step["mean_probability"], 3)),
            ]
        )
        for label, step in zip(labels, steps, strict=True)
    ]
    header = ("", "the best draft", "among its best 5", "median rank", "mean probability")
    return Block(
        title="How often the target's token is drafted",
        note="By draft step, teacher-forced: every earlier token is the target's.",
        chart=grouped_bars(labels, series, description="The target's token by draft step"),
        table=Table(header=header, lines=lines),
        narrow=True,
    )


def _causes(result: Json) -> Block | None:
    lines = [
        Line(
            cells=[
                *(row["says"], row["tried"]),
                *(number(row["acceptance_before"]), number(row["acceptance"])),
                _signed(row),
            ]
        )
        for row in result["causes"]
    ]
    if not lines:
        return None
    header = ("as configured", "repaired", "acceptance", "repaired, it is", "drafts a start")
    return Block(
        title="Evidence: conventions",
        note="Each after the repairs above it; drafts accepted per start are the gain, with its "
        "interval.",
        table=Table(header=header, lines=lines, num_left=2),
    )


def _signed(row: Json) -> str:
    low, high = row["gain_interval"]
    return f"{row['gain']:+.2f} ({low:+.2f} to {high:+.2f})"


def _evidence(result: Json) -> Block | None:
    """A table of damaged weights and parts; None if there are none."""
    lines = [
        Line(
            cells=[
                *(row["module"], row["tensor"], row["says"]),
                number(row.get("acceptance_if_trained")),
            ]
        )
        for row in result["evidence"]
    ]
    if not lines:
        return None
    return Block(
        title="Evidence: weights",
        note=f"The acceptance length as loaded is {number(result['acceptance'])}.",
        table=Table(
            header=("module", "tensor", "what is odd", "acceptance with it trained"),
            lines=lines,
            num_left=3,
        ),
    )


def _tried(result: Json) -> Iterator[Block]:
    """Tables of the conventions and prompt wordings tried, best first, with the causes marked
    green.
    """
    named = [(row["cause"], row["tried"]) for row in result["causes"]]
    tables = [
        ("Conventions tried" + (f", after repair {done}" if done else ""), rows[:SHOWN])
        for done, rows in enumerate(result["rounds"])
    ]
    if result["prompts"]:
        tables.append(("Other wordings of the prompts", result["prompts"]))
    for title, rows in tables:
        lines = [
            Line(
                cells=variant_cells(row),
                kind="good" if (row["cause"], row["tried"]) in named else "",
            )
            for row in rows
        ]
        yield Block(
            title=title,
            note="In place of what is configured, by gain; green: a repair. doctor.json has more.",
            table=Table(header=HEADER, lines=lines, num_left=2),
        )


def _drafter(result: Json) -> Block | None:
    """The drafter's conventions as sentences, and tensors in its files that were not read."""
    unread = (result["tensors"] or {}).get("unread") or []
    said = list(result["drafter_in_words"])
    if unread:
        said.append(f"Tensors of its files that are not read: {', '.join(unread)}.")
    return Block(title="The drafter as it is read", sentences=said) if said else None

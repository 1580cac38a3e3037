"""The block of predicted speedups beside those that were measured."""

from __future__ import annotations

from hydraspec.study.blocks import Block, Line, Table
from hydraspec.study.groups import Group


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

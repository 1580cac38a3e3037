"""How many drafts steps had, where the engine chose that: words and a chart."""

from __future__ import annotations

from hydraspec.metrics.summary import Summary
from hydraspec.study.charts import Bar, Chart, horizontal_bars
from hydraspec.study.texts import number, percent


def drafts_words(summary: Summary) -> str:
    """The share of decode steps with 0, 1, … K drafts, and the mean; empty where K is fixed."""
    used = summary.get("num_speculative_tokens_used")
    if not used:
        return ""
    total = sum(used["histogram"])
    shares = "  ".join(percent(count / total) for count in used["histogram"])
    return f"{shares} (mean {number(used['mean'])})"


def drafts_chart(summary: Summary) -> Chart | None:
    """Bars of the share of decode steps with 0, 1, … K drafts; None where K is fixed."""
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

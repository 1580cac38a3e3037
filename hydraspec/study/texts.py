"""Figures and intervals as text, for the console and for pages."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hydraspec.metrics.statistics import MIN_REQUESTS, range_words
from hydraspec.metrics.summary import (
    AcceptanceLength,
    Goodput,
    Interval,
    Length,
    Parallelism,
    Percentiles,
    Summary,
)

MAX_NAMED = 6  # jobs that a sentence names
TOO_FEW = f"fewer than {MIN_REQUESTS} requests"


def number(value: float | None, digits: int = 2) -> str:
    """A figure with `digits` decimals and thousands separated; a dash for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(share: float | None) -> str:
    """A share from 0 to 1 as text, such as "97.5 %"; a dash for None."""
    return "-" if share is None else f"{100 * share:.1f} %"


def milliseconds(value: float | None) -> str:
    """A time with three significant digits or all before the point: "0.412", "15.8", "1,204"; a
    dash for None."""
    digits = 3 if not value else min(3, max(0, 2 - math.floor(math.log10(value))))
    return number(value, digits)


def some_of(names: Sequence[str]) -> list[str]:
    """The first MAX_NAMED names, and a note on how many more there are."""
    more = len(names) - MAX_NAMED
    return [*names[:MAX_NAMED], *([f"{more} more"] if more > 0 else [])]


def interval(estimate: Interval | AcceptanceLength | Length | None, unit: str = "") -> str:
    """A mean with its 95 % interval, such as "2.67 (2.58 to 2.75)", or a note that there is no
    interval; a dash where the mean is not known."""
    if estimate is None or estimate["mean"] is None:
        return "-"
    text = f"{estimate['mean']:.2f}{unit}"
    if not estimate["ci95"]:
        return f"{text} (n < {MIN_REQUESTS}, no interval)"
    return text + ci_words(estimate["ci95"])


def estimate(found: Interval | Length | None, unit: str = "") -> str:
    """A mean with any 95 % interval, such as "1.97x (1.75 to 2.20)"; a dash if not known."""
    if found is None or found["mean"] is None:
        return "-"
    return f"{found['mean']:.2f}{unit}{ci_words(found['ci95'])}"


def ci_words(ci95: Sequence[float] | None) -> str:
    """An interval as text after a figure, such as " (2.58 to 2.75)"; empty for None."""
    return f" ({range_words(ci95)})" if ci95 else ""


def interval_note(ci95: Sequence[float] | None, digits: int = 2) -> str:
    """A 95 % interval as text before other words; empty for None."""
    return f"95 % interval {range_words(ci95, digits)}; " if ci95 else ""


def engine_words(engine: str, parallelism: Parallelism) -> str:
    """Engine and split: "native", or "native with 4 ranks (tensor 2, pipeline 2)"."""
    ranks = parallelism
    axes = (("tensor", ranks["tensor"]), ("pipeline", ranks["pipeline"]), ("data", ranks["data"]))
    several = ", ".join(f"{name} {size}" for name, size in axes if size > 1)
    return f"{engine} with {ranks['num_devices']} ranks ({several})" if several else engine


def load_words(summary: Summary) -> str:
    """The load of a run: "4 at once", "all at once", or with arrivals "arriving at 2.5 a second
    (burstiness 0.5), at most 8 at once"."""
    limit, rate = summary["concurrency"], summary["request_rate"]
    if rate is None:
        return f"{limit or 'all'} at once"
    words = f"arriving at {rate:g} a second"
    if summary["burstiness"] != 1:
        words += f" (burstiness {summary['burstiness']:g})"
    return f"{words}, at most {limit} at once" if limit else words


def percentile_words(found: Percentiles) -> str:
    """Milliseconds p50, p90 and p99, such as "12.3 / 15.0 / 140", with dashes for None."""
    return " / ".join(map(milliseconds, (found["p50"], found["p90"], found["p99"])))


def limit_words(found: Goodput) -> str:
    """The limits of goodput, such as "first token within 200 ms, 20 ms per further token"."""
    first, others = found["ttft_ms"], found["inter_token_ms"]
    parts = [f"first token within {first:g} ms"] if first else []
    return ", ".join([*parts, f"{others:g} ms per further token"] if others else parts)


def plus_minus(estimate: Interval | AcceptanceLength | Length | None) -> str:
    """A mean and half the 95 % interval for a narrow column, such as "2.67 ±0.08"; or a dash."""
    if estimate is None or estimate["mean"] is None:
        return "-"
    if not estimate["ci95"]:
        return f"{number(estimate['mean'])} ±-"
    low, high = estimate["ci95"]
    return f"{estimate['mean']:.2f} ±{(high - low) / 2:.2f}"


def drafts_words(summary: Summary) -> str:
    """Shares of decode steps with 0 to K drafts, and the mean number; empty where K is fixed."""
    used = summary.get("num_speculative_tokens_used")
    if not used:
        return ""
    total = sum(used["histogram"])
    shares = "  ".join(percent(count / total) for count in used["histogram"])
    return f"{shares} (mean {number(used['mean'])})"

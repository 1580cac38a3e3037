"""Console output of a replay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hydraspec.errors import printable
from hydraspec.metrics.files import Json
from hydraspec.study import accepted
from hydraspec.study.console import print_table, table_console
from hydraspec.study.texts import interval, number, percent

WIDTH = 110
HEADER = ("rule", "acceptance length", "tokens per step", "steps", "draft tokens", "by position")


def show(result: Json, file: Path) -> None:
    """Print the content of replay.json."""
    console = table_console(WIDTH)

    def say(text: str, style: str | None = None) -> None:
        console.print(printable(text), style=style, markup=False, highlight=False)

    say(f"{result['target']} with {result['method']}, {result['drafts']}", "bold")
    lines = [_line(row) for row in result["replays"]]
    print_table(console, "Replayed", HEADER, lines, num_left=1)
    if result["kind"] == "exact":
        say("Exact: each request takes the steps that a run would take.", "bold green")
    else:
        say("An estimate:", "bold yellow")
        for reason in result["why_estimate"]:
            say(f"  {reason}")
    if result["check"] is not None:
        say(_checked(result["check"]))
    if left_out := result["num_requests_left_out"]:
        say(f"Left out: {left_out} requests that did not finish or were not recorded.")
    if result["figures"] is not None:
        accepted.print_parts(console, result["figures"])
        for sentence in _drafter(result["figures"]):
            say(sentence)
    if (share := result["draft_share_of_step"]) is not None:
        say(f"Drafting took {percent(share)} of the run's step time.")
    say(f"Details: {file}")


def _line(row: Json) -> tuple[str, ...]:
    tokens = row["num_draft_tokens"]
    rates = row["acceptance_rate_per_position"]
    return (
        row["name"],
        interval(row["acceptance_length"]),
        number(row["tokens_per_step"], 2),
        str(row["num_steps"]),
        "not known" if tokens is None else str(tokens),
        "  ".join(number(rate, 2) for rate in rates),
    )


def _drafter(figures: Json) -> Iterator[str]:
    """Yield sentences on the recorded drafter, teacher-forced, and the best that it could reach."""
    for key, words in (("top_1", "its best token"), ("top_5", "one of its best five")):
        shares = ", ".join(percent(row[key]) for row in figures["by_step"])
        yield f"The target's token is {words} in {shares} of places, by draft."
    best = figures["ceilings"]
    yield (
        f"With the target's states at every draft it would reach {number(best['oracle_features'])} "
        f"in place of {number(best['acceptance'])}, as a tree of its best five tokens "
        f"{number(best['top_5'])}."
    )


def _checked(check: Json) -> str:
    equal, different = check["num_requests_equal"], check["num_requests_different"]
    text = f"Check: replayed with its own K, the run's counts are found in {equal} of "
    text += f"{equal + different} requests."
    if different and check["num_preemptions"]:
        text += f" It preempted requests {check['num_preemptions']} times, which drops drafts."
    return text

"""Console output of an examination: progress while variants are tried, then verdict and tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from hydraspec.errors import printable
from hydraspec.metrics.files import Json
from hydraspec.study import accepted
from hydraspec.study.console import print_table, run_console, table_console

WIDTH = 120
SHOWN = 8  # variants in each printed table
EVERY = 20  # variants between lines of progress


def progress(*, quiet: bool) -> Callable[[int, int], None]:
    """A callback that prints how many variants of a round have been tried."""
    console = run_console(quiet=quiet)

    def on_variant(done: int, total: int) -> None:
        if done == total or done % EVERY == 0:
            console.print(f"{done} of {total} variants tried", highlight=False)

    return on_variant


def show(result: Json, file: Path, *, quiet: bool) -> None:
    """Print the content of doctor.json (`result`), which was written to `file`."""
    console = table_console(WIDTH, quiet=quiet)

    def say(text: str = "", style: str | None = None) -> None:
        console.print(printable(text), style=style, markup=False, highlight=False)

    styles = {"healthy": "bold green", "convention": "bold red", "weights": "bold red"}
    say(result["sentence"], styles.get(result["verdict"], "bold"))
    for row in result["causes"]:
        say(f"  to do: {row['remedy']}")
    say()
    drafter = f", drafter {result['drafter']}" if result["drafter"] else ""
    say(f"{result['target']} with {result['method']}{drafter}", "bold")
    for sentence in result["drafter_in_words"]:
        say(f"  {sentence}")
    say()
    for number, rows in enumerate(result["rounds"], start=1):
        title = "Variants by acceptance" + ("" if number == 1 else f", after repair {number - 1}")
        print_table(
            console, title, HEADER, [variant_cells(row) for row in rows[:SHOWN]], num_left=2
        )
    if result["prompts"]:
        lines = [variant_cells(row) for row in result["prompts"]]
        print_table(console, "Other wordings of the prompts", HEADER, lines, num_left=2)
    if result["figures"] is not None:
        accepted.print_parts(console, result["figures"])
        _figures(result, say)
    say(f"Details: {file}")


HEADER = ("convention", "tried", "acceptance", "drafts a start", "interval", "nats")


def variant_cells(row: Json) -> tuple[str, ...]:
    """Table cells of a row of doctor.json's `rounds` or `prompts`, in the columns of HEADER."""
    low, high = row["gain_interval"]
    interval = f"{low:+.2f} to {high:+.2f}" if math.isfinite(high - low) else "-"
    nats = row.get("nats")
    return (
        printable(row["cause"]),
        printable(row["tried"]),
        "-" if row["acceptance"] is None else f"{row['acceptance']:.2f}",
        f"{row['gain']:+.2f}",
        interval,
        "-" if nats is None else f"{nats:+.2f}",
    )


def _figures(result: Json, say: Callable[[str], None]) -> None:
    steps, top = result["figures"]["by_step"], result["figures"]["ceilings"]
    for key, words in (("top_1", "the best draft"), ("top_5", "among its best 5")):
        rates = "  ".join(f"{step[key]:.2f}" for step in steps)
        say(f"The target's token is {words}, by draft step, teacher-forced: {rates}")
    say(
        f"Acceptance length {top['acceptance']:.2f}; with the target's own states in every step "
        f"{top['oracle_features']:.2f}; if any of its best 5 counted {top['top_5']:.2f}; by its "
        f"vocabulary at most {top['draft_vocabulary']:.2f}"
    )
    share = result["draft_share_of_step"]
    if share is not None:
        say(f"Drafting takes {share:.0%} of a decode step")

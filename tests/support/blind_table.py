"""The table of a blind trial, and its totals."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def show(rows: Sequence[Row]) -> None:
    """Print every draw, then totals without and with a card."""
    print("| target | method | fault | lost | verdict | cause or module | right | s |")  # noqa: T201
    print("|---|---|---|---|---|---|---|---|")  # noqa: T201
    for row in sorted(rows, key=lambda each: each["draw"]):
        print(_line(row))  # noqa: T201
    for words, key in (("without a card", None), ("with a card", "with_card")):
        found = [row if key is None else row | row.get(key, {}) for row in rows]
        print(f"\n{words}: " + "; ".join(totals(found)))  # noqa: T201
    print("\n" + unexpected(rows))  # noqa: T201


def _line(row: Row) -> str:
    lost = f"{row['lost']:.0%}" if "lost" in row else "-"
    found = row.get("cause") or row.get("module") or ""
    right = {True: "yes", False: "NO", None: "-"}[row.get("is_right")]
    if row["family"] in ("convention", "weights") and right == "yes":
        right = "exact" if row.get("is_exact", True) else "class"
    seconds = f"{row['seconds']:.0f}" if "seconds" in row else "-"
    says = row["says"].replace("|", "/")
    verdict = row.get("verdict", row["kind"])
    cells = (row["target"], row["method"], f"{row['family']}: {says}", lost, verdict, found)
    return f"| {' | '.join(map(str, cells))} | {right} | {seconds} |"


def totals(rows: Sequence[Row]) -> list[str]:
    """The figures that a trial is judged by."""
    harmful = [row for row in rows if row["kind"] == "harmful"]
    harmless = [row for row in rows if row["kind"] == "harmless"]
    found = [_share("harmful heads with the right class", harmful, "is_right")]
    for family, words in (("convention", "conventions named"), ("weights", "damage located")):
        found.append(_share(words, [row for row in harmful if row["family"] == family], "is_exact"))
    found.append(_share("weak", [row for row in harmful if row["family"] == "weak"], "is_right"))
    missed = [r for r in harmful if r.get("lost", 0) >= 0.15 and r.get("verdict") == "healthy"]
    found.append(f"{len(missed)} that lost 15 % or more called healthy")
    accused = sum(row.get("verdict") != "healthy" for row in harmless)
    found.append(f"{accused} of {len(harmless)} harmless accused")
    poor = [row for row in rows if row.get("repaired") and not _is_worth(row)]
    found.append(f"{len(poor)} repairs that gain too little")
    seconds = [row["seconds"] for row in rows if row.get("seconds")]
    if seconds:
        mean = sum(seconds) / len(seconds)
        found.append(f"{mean:.1f} s a head, {max(seconds):.1f} s at most")
    return found


def unexpected(rows: Sequence[Row]) -> str:
    """Verdicts on the same evidence where not even the method's usual figure is expected, as on
    text that the target is less certain of.
    """
    found = [row for row in rows if row.get("nothing_expected")]
    harmful = [row for row in found if row["kind"] == "harmful"]
    right = sum(row["nothing_expected"] == row["family"] for row in harmful)
    missed = sum(row["nothing_expected"] == "healthy" for row in harmful)
    accused = sum(row["nothing_expected"] != "healthy" for row in found if row not in harmful)
    return (
        f"with nothing expected: right class {right} of {len(harmful)}, {missed} called healthy; "
        f"{accused} of {len(found) - len(harmful)} harmless accused"
    )


def _share(words: str, rows: Sequence[Row], key: str) -> str:
    right = sum(bool(row.get(key, row.get("is_right"))) for row in rows)
    return f"{words}: {right} of {len(rows)}" + (f" ({right / len(rows):.0%})" if rows else "")


def _is_worth(row: Row) -> bool:
    """Each repair gains a tenth, and all together half of what the healthy head has more."""
    before, reached = row["base"], [row["base"], *row["repaired"]]
    steps = all(b >= 1.1 * a for a, b in itertools.pairwise(reached))
    return steps and reached[-1] - before >= 0.5 * (row["healthy"] - before)

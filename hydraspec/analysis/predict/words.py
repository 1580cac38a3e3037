"""A prediction in words: its table and sentences, the same on the console and on the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from hydraspec.errors import printable
from hydraspec.metrics.files import Json
from hydraspec.metrics.formats import formats_of
from hydraspec.metrics.run_files import PREDICTION, PREDICTION_REPORT
from hydraspec.metrics.statistics import range_words
from hydraspec.study import html
from hydraspec.study.blocks import Block, Kind, Line, Section, Study, Table, Verdict
from hydraspec.study.charts import COLORS, Points, Spot, scatter
from hydraspec.study.console import print_block, print_table, run_console, table_console
from hydraspec.study.maps import Cell, map_block

MAX_WARNINGS = 6
WIDTH = 130


def progress(*, quiet: bool) -> Callable[[str], None]:
    """A function that prints a line of progress."""
    console = run_console(quiet=quiet)
    return lambda text: _say(console, text)


def show(result: Json, folder: Path, *, quiet: bool) -> None:
    """Print the content of predict.json."""
    console = table_console(WIDTH, quiet=quiet)
    lines = [*map(cells(result), result["predictions"]), *auto_cells(result)]
    print_table(console, title(result), header(result), lines, best=best_rows(result))
    for block in context_map(result):
        print_block(console, block)
    for text in (*sentences(result), f"Details: {folder / PREDICTION}, {PREDICTION_REPORT}"):
        _say(console, text)


def show_best(results: Sequence[Json], *, quiet: bool) -> None:
    """Print the best method and K at each concurrency, if there are several predictions."""
    console = run_console(quiet=quiet)
    for text in best_of_all(results) if len(results) > 1 else ():
        _say(console, text, style="bold")


def _say(console: Any, text: str, style: str | None = None) -> None:
    console.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)


def page_of(result: Json) -> str:
    """The HTML page of the content of predict.json."""
    rows, best = result["predictions"], best_rows(result)
    kinds: list[Kind] = [
        "bad" if row["speedup"] < 1 else "good" if i in best else "" for i, row in enumerate(rows)
    ]
    lines = [
        Line(cells=found, kind=kind)
        for found, kind in zip(map(cells(result), rows), kinds, strict=True)
    ]
    lines += [Line(cells=found) for found in auto_cells(result)]
    table = Block(
        title="By requests at once and drafts a step",
        note="Green: the best K for so many requests at once; red: slower than without drafts, as "
        "below the break-even acceptance length. The rate is the acceptance, equal at every "
        "position, that gives this length. auto: the drafts of each request chosen among these K, "
        "as the engine chooses them, with what it accepts known.",
        sentences=list(remarks(result)),
        table=Table(header=header(result), lines=lines, num_left=2),
    )
    chosen = next((one for one in result["best"] if one["num_speculative_tokens"]), None)
    answer = Verdict(
        kind="good" if chosen else "bad",
        about="Predicted",
        sentence="; ".join(best_of(result)) + ".",
        to_do=[
            "Measure it: python -m hydraspec with the same keys, method.num_speculative_tokens="
            f"{chosen['num_speculative_tokens']} and workload.concurrency={chosen['concurrency']}."
            if chosen
            else "Decode without drafts, or try another drafter."
        ],
    )
    made = Study(
        question=title(result),
        verdicts=[answer],
        sections=[Section(title="", blocks=[_chart(rows), table, *context_map(result)])],
    )
    return html.study_page(made, Path())


def _chart(rows: Sequence[Json]) -> Block:
    """A line over K for each number of requests at once."""
    lines: dict[int, list[Spot]] = {}
    for row in rows:
        k, speedup = row["num_speculative_tokens"], row["speedup"]
        spot = Spot(x=k, y=speedup, title=f"{row['concurrency']} at once, K={k}: {speedup:.2f}x")
        lines.setdefault(row["concurrency"], []).append(spot)
    drawn = scatter(
        [
            Points(name=f"{at_once} at once", color=color, values=spots)
            for (at_once, spots), color in zip(lines.items(), cycle(COLORS))
        ],
        x_name="K, draft tokens a step",
        y_name="speedup",
        description="Predicted speedup by K, a line for each number of requests at once",
        x_ticks=sorted({row["num_speculative_tokens"] for row in rows}),
        level=1.0,
    )
    note = "Over decoding without drafts; dashed: as fast as without."
    return Block(title="Predicted speedup", note=note, chart=drawn, narrow=True)


def context_map(result: Json) -> Iterator[Block]:
    """Yield the map of the best K by requests at once and context, if contexts were measured."""
    by_cell: dict[tuple[int, int], list[Json]] = {}
    for cell in result["map"]:
        by_cell.setdefault((cell["concurrency"], cell["context"]), []).append(cell)
    if not by_cell:
        return
    best = {place: max(found, key=lambda c: c["speedup"]) for place, found in by_cell.items()}
    auto = {(each["concurrency"], each["context"]): each["speedup"] for each in result["auto"]}
    losing = sorted(place for place, cell in best.items() if cell["speedup"] < 1)
    said = [f"{batch} at once with {context:,} tokens each" for batch, context in losing]
    yield map_block(
        "Where drafts pay: the best K by requests at once and context",
        "Speed over none while all requests decode, at the acceptance length of the workload; the "
        "tokens of a request in the KV cache, which is filled and not read. Green: faster than "
        "none, red: slower with every K. Then the speed with the drafts of each request chosen.",
        {
            place: Cell(_map_text(cell, auto[place]), cell["speedup"])
            for place, cell in best.items()
        },
        sentences=[
            f"No K is faster than none at {'; '.join(said)}."
            if said
            else "Drafts pay at every batch and context that was measured."
        ],
    )


def _map_text(cell: Json, auto: float) -> str:
    return f"K={cell['num_speculative_tokens']} {cell['speedup']:.2f}x, auto {auto:.2f}x"


def title(result: Json) -> str:
    """The title: method, target, number formats unless all is float, dtype and device."""
    found = formats_of(result)
    formats = "" if found is None or found.is_plain else f" ({found})"
    return (
        f"Predicted speedup of {result['method']} on {result['target']}{formats}, "
        f"{result['dtype']}, {result['device']}"
    )


def header(result: Json) -> list[str]:
    """Headings of the table."""
    plain = ["at once", "K", "predicted", "acceptance", "break-even", "or rate", "step, ms"]
    plain += ["drafting, ms", "plain step, ms"]
    return [*plain, "measured", "interval", "error"] if _is_checked(result) else plain


def cells(result: Json) -> Callable[[Json], list[str]]:
    """A function that gives the cells of a row of the table."""
    is_checked = _is_checked(result)

    def of(row: Json) -> list[str]:
        rate, run = row["break_even_acceptance_rate"], row["measured"]
        found = [
            str(row["concurrency"]),
            str(row["num_speculative_tokens"]),
            f"{row['speedup']:.2f}x",
            f"{row['acceptance_length']:.2f}",
            f"{row['break_even_acceptance_length']:.2f}",
            "never" if rate is None else f"{rate:.2f}",
            f"{row['step_ms']:.2f}",
            "-" if row["draft_ms"] is None else f"{row['draft_ms']:.2f}",
            f"{row['plain_step_ms']:.2f}",
        ]
        if not is_checked:
            return found
        if run is None:
            return [*found, "-", "-", "-"]
        ci95 = run["speedup"]["ci95"]
        interval = range_words(ci95) if ci95 else "-"
        return [*found, f"{run['speedup']['mean']:.2f}x", interval, f"{row['error']:+.1%}"]

    return of


def auto_cells(result: Json) -> Iterator[list[str]]:
    """Yield the cells of a row of the table for each number of requests at once, with the drafts of
    each request chosen."""
    for each in result["auto"]:
        if each["context"] is None:
            found = [str(each["concurrency"]), "auto", f"{each['speedup']:.2f}x"]
            yield found + ["-"] * (len(header(result)) - len(found))


def best_rows(result: Json) -> list[int]:
    """Indices of the predictions that are the best of their concurrency and beat no drafts."""
    best = {(each["concurrency"], each["num_speculative_tokens"]) for each in result["best"]}
    return [
        i
        for i, row in enumerate(result["predictions"])
        if (row["concurrency"], row["num_speculative_tokens"]) in best
    ]


def sentences(result: Json) -> Iterator[str]:
    """Sentences on the K that wins, then `remarks`."""
    yield from best_of(result)
    yield from remarks(result)


def best_of(result: Json) -> Iterator[str]:
    """The K that wins at each number of requests at once, if one does."""
    for best in result["best"]:
        if best["num_speculative_tokens"]:
            yield (
                f"{best['concurrency']} at once: K={best['num_speculative_tokens']} is the best, "
                f"{best['speedup']:.2f}x"
            )
        else:
            yield f"{best['concurrency']} at once: no K is faster than no drafts"


def remarks(result: Json) -> Iterator[str]:
    """Sentences on the K that lose, the error beside a measurement, and what is assumed."""
    for text in result["warnings"][:MAX_WARNINGS]:
        yield f"Warning: {text}"
    if (more := len(result["warnings"]) - MAX_WARNINGS) > 0:
        yield f"and {more} more such warnings in predict.json"
    if result["mean_absolute_error"] is not None:
        yield f"Mean absolute error of the predicted speedup: {result['mean_absolute_error']:.1%}"
    acceptance = result["acceptance"]
    rates = ", ".join(f"{rate:.2f}" for rate in acceptance["conditional_rate_per_position"])
    most = acceptance["num_speculative_tokens"]
    if acceptance["source"] == "assumed":
        yield f"Acceptance is assumed: of the drafts whose predecessors were accepted {rates}"
    else:
        yield (
            f"Acceptance is that of {result['num_requests']} requests with K={most}: of the drafts "
            f"whose predecessors were accepted {rates}. A smaller K is assumed to accept as much "
            "at its positions."
        )


def best_of_all(results: Sequence[Json]) -> Iterator[str]:
    """Yield the best choice on each target at each concurrency, of several methods' predictions."""
    found: dict[tuple[str, int], list[tuple[float, str]]] = {}
    for result in results:
        for best in result["best"]:
            k, speedup = best["num_speculative_tokens"], best["speedup"]
            choice = f"{result['method']} with K={k}, {speedup:.2f}x" if k else "no drafts"
            found.setdefault((result["target"], best["concurrency"]), []).append((speedup, choice))
    for (target, concurrency), choices in found.items():
        yield f"{target}, {concurrency} at once: {max(choices)[1]}"


def _is_checked(result: Json) -> bool:
    return any(row["measured"] is not None for row in result["predictions"])

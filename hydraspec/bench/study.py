"""Benchmarks as blocks of reports, pages and the console: an answer, charts and the table of each
bench.json, and tables of several side by side. The module measures nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from hydraspec.bench.benchmark import Column, Curve
from hydraspec.bench.choices import BENCHMARKS
from hydraspec.errors import ConfigurationError
from hydraspec.metrics.files import Json
from hydraspec.metrics.run_files import BENCH, CONFIG, SUMMARY, job_number
from hydraspec.metrics.statistics import ratio
from hydraspec.study import html
from hydraspec.study.blocks import Block, Line, Section, Study, Table, Verdict
from hydraspec.study.charts import COLORS, Points, Spot, scatter
from hydraspec.study.console import WIDE, print_block, table_console
from hydraspec.study.settings import typed_labels

Result = tuple[Path, Json]  # a folder and its bench.json
NUM_LEFT = 3  # columns of names, which are left-aligned
OURS, THEIRS = "native", "vllm"
GIB = 1 << 30
VERSIONS = ("hydraspec", "torch", "triton", "transformers", "vllm")
CLOCKS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
SEVERAL = "What do benchmarks say of {}?"  # title over benchmarks of several kinds


def read(folder: Path) -> list[Result]:
    """The benchmarks of a folder: its own, or those of a sweep's jobs; empty where there is none. A
    job that took over an equal job's result is left out.

    Raises:
        ConfigurationError: a bench.json is damaged.
    """
    if not folder.is_dir() or (folder / SUMMARY).is_file():
        return []
    if (folder / BENCH).is_file():
        return [(folder, _read(folder / BENCH))]
    if (folder / CONFIG).is_file():  # a benchmark that was cut off: inside are its parts
        return []
    jobs = sorted((job for job in folder.iterdir() if (job / BENCH).is_file()), key=job_number)
    found = [(job, _read(job / BENCH)) for job in jobs]
    return [(job, result) for job, result in found if "reused_from" not in result]


def _read(file: Path) -> Json:
    """The content of a bench.json, after a check that its question and section can be made."""
    try:
        result: Json = json.loads(file.read_text(encoding="utf-8"))
        _question([result])
        _section((file.parent, result), title_of(result))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        raise ConfigurationError(
            f"{file}: damaged, or of an older hydraspec\n  allowed: what bench=… writes\n"
            "  to do: leave the folder out, or measure again"
        ) from None
    return result


def extended(
    made: Study | None,
    results: Sequence[Result],
    *,
    asked: str | None = None,
    notes: Sequence[str] = (),
) -> Study:
    """The report `made` over runs with these benchmarks added; if None, a report over them
    alone, with the question `asked` and `notes`."""
    count = "1 benchmark" if len(results) == 1 else f"{len(results)} benchmarks"
    titles = _titles(results)
    verdicts = [_verdict(result, title) for (_, result), title in zip(results, titles, strict=True)]
    sections = [_section(result, title) for result, title in zip(results, titles, strict=True)]
    if tables := side_by_side(results):
        sections.insert(0, Section(title="Side by side", blocks=tables))
    if made is None:
        asked = asked or _question([result for _, result in results])
        return Study(question=asked, facts=count, verdicts=verdicts, notes=notes, sections=sections)
    return replace(
        made,
        facts=f"{made.facts}; {count}",
        verdicts=[*made.verdicts, *verdicts],
        sections=[*made.sections, *sections],
    )


def show(results: Sequence[Result]) -> None:
    """Print the tables of `side_by_side`."""
    for block in side_by_side(results):
        print_block(table_console(WIDE), block)


def side_by_side(results: Sequence[Result]) -> list[Block]:
    """Tables that join the benchmarks with equal columns, labelled by the settings that tell each
    benchmark from the others; empty where all columns differ."""
    alike: dict[tuple[str, ...], list[Line]] = {}
    for label, (folder, result) in zip(_labels(results), results, strict=True):
        columns = (BENCHMARKS[result["bench"]].heading, *header_of(result))
        lines = [Line(cells=[label, *c], link=folder) for c in cells_of(result)]
        alike[columns] = alike.get(columns, []) + lines
    return [
        Block(
            title=heading,
            table=Table(header=["benchmark", *header], lines=lines, num_left=NUM_LEFT),
        )
        for (heading, *header), lines in alike.items()
        if len({line.link for line in lines}) > 1
    ]


def _titles(results: Sequence[Result]) -> list[str]:
    labels = [f"{label}: " if len(results) > 1 else "" for label in _labels(results)]
    return [label + title_of(result) for label, (_, result) in zip(labels, results, strict=True)]


def _labels(results: Sequence[Result]) -> list[str]:
    return typed_labels([folder for folder, _ in results])


def _question(results: Sequence[Json]) -> str:
    targets = " and ".join(dict.fromkeys(result["target"] for result in results))
    kinds = {BENCHMARKS[result["bench"]].question for result in results}
    return (kinds.pop() if len(kinds) == 1 else SEVERAL).format(targets)


def _verdict(result: Json, title: str) -> Verdict:
    found = list(_comparisons(result)) or list(_summaries(result)) or ["Nothing was measured"]
    said = " ".join(f"{sentence[:1].upper()}{sentence[1:]}." for sentence in found)
    return Verdict(kind="", about=title, sentence=said)


def _measured(result: Json) -> dict[str, dict[str, Json]]:
    """Parts with rows, by method and engine."""
    found: dict[str, dict[str, Json]] = {part["method"]: {} for part in result["parts"]}
    for part in result["parts"]:
        if part["rows"]:
            found[part["method"]][part["engine"]] = part
    return found


def _pairs(result: Json) -> Iterator[tuple[str, Json, Json]]:
    """Yield the methods that both engines were measured with, and the parts of both."""
    for method, parts in _measured(result).items():
        if {OURS, THEIRS} <= {*parts}:
            yield method, parts[OURS], parts[THEIRS]


def _summaries(result: Json) -> Iterator[str]:
    """Yield a sentence on each part by itself."""
    for part in result["parts"]:
        if part["rows"]:
            yield f"{_name(part)}: {BENCHMARKS[result['bench']].summary_line(part)}"


def _comparisons(result: Json) -> Iterator[str]:
    """Yield a sentence for each method on both engines beside each other."""
    for method, ours, theirs in _pairs(result):
        told = BENCHMARKS[result["bench"]].comparison_line(ours, theirs)
        yield f"{_drafts(method)}, {OURS} and {THEIRS}: {told}"


def _name(part: Json) -> str:
    return f"{_drafts(part['method'])} on {part['engine']}"


def _drafts(method: str) -> str:
    return "without drafts" if method == "none" else f"with {method}"


def _section(of: Result, title: str) -> Section:
    folder, result = of
    benchmark = BENCHMARKS[result["bench"]]
    table = Block(
        title=benchmark.heading,
        note=f"Times; {OURS} / {THEIRS}: below 1, {OURS} is faster." if result["ratios"] else "",
        sentences=list(_summaries(result)) if any(_pairs(result)) else (),
        table=_table(result, folder),
    )
    charts = [block for curve in benchmark.curves for block in _chart(curve, result)]
    measured = Block(
        title="Measured on",
        sentences=[f"{name}: {text}" for name, text in notes_of(result)],
    )
    return Section(title=title, blocks=[*_further(result), table, *charts, measured])


def _further(result: Json) -> Iterator[Block]:
    """Yield the blocks that only this benchmark has."""
    for part in result["parts"]:
        if part["rows"]:
            yield from BENCHMARKS[result["bench"]].blocks(part)


def _chart(curve: Curve, result: Json) -> Iterator[Block]:
    """Yield the chart of a curve, a line for each part with its figures; nothing where none has."""
    found = []
    for part, color in zip(result["parts"], COLORS, strict=False):
        name = _name(part)
        known = [(x, y) for x, y in curve.points(part) if x is not None and y is not None]
        if part["rows"] and known:
            titles = [f"{name}: {y:,.4g} {curve.y_name} at {x:.3g}" for x, y in known]
            values = [Spot(x=x, y=y, title=t) for (x, y), t in zip(known, titles, strict=True)]
            found.append(Points(name=name, color=color, values=values))
    if found:
        drawn = scatter(found, x_name=curve.x_name, y_name=curve.y_name, description=curve.title)
        yield Block(title=curve.title, note=curve.note, chart=drawn, narrow=True)


# ---------------------------------------------------------------- one benchmark's table


def ratios(result: Json) -> Json:
    """Times of the native engine / vLLM's, by method and figure; below 1 native is faster."""
    benchmark = BENCHMARKS[result["bench"]]
    return {
        method: {
            **benchmark.ratios(ours, theirs),
            "first_step": ratio(ours["first_step_s"], theirs["first_step_s"]),
        }
        for method, ours, theirs in _pairs(result)
    }


def print_result(result: Json, console: Console) -> None:
    """Print the table, what it was measured on, and why parts are missing."""
    for made in (Block(title=title_of(result), table=_table(result)), *_further(result)):
        print_block(console, made)
    for name, text in notes_of(result):
        console.print(f"{name}: {text}", markup=False, soft_wrap=True)


def page_of(result: Json) -> str:
    """bench.html: the report over this benchmark alone."""
    return html.study_page(extended(None, [(Path(), result)]), Path())


def title_of(result: Json) -> str:
    """The title of a benchmark: target, dtype and its own words."""
    return f"{result['target']}, {result['dtype']}: {BENCHMARKS[result['bench']].title(result)}"


def _table(result: Json, folder: Path | None = None) -> Table:
    lines = [Line(cells=cells, link=folder) for cells in cells_of(result)]
    return Table(header=header_of(result), lines=lines, num_left=NUM_LEFT - 1)


def header_of(result: Json) -> list[str]:
    """Headings of the table: the benchmark's own between those that every benchmark has."""
    columns = [*BENCHMARKS[result["bench"]].columns(result), *OF_PARTS]
    return ["method", "engine", *(column.heading for column in columns)]


def cells_of(result: Json) -> Iterator[list[str]]:
    """Yield the cells of each engine's and method's lines, and below both engines' their ratios."""
    benchmark = BENCHMARKS[result["bench"]]
    columns = benchmark.columns(result)
    for parts in _measured(result).values():
        lines = {engine: benchmark.lines(part) for engine, part in parts.items()}
        for i in range(max(map(len, lines.values()), default=0)):
            here = {engine: of[i] for engine, of in lines.items() if i < len(of)}
            for engine, line in here.items():
                ours = [column.cell(line) for column in columns]
                yield [*_names(parts[engine]), *ours, *_of_part(i, parts[engine])]
            if {OURS, THEIRS} <= {*here}:
                ours = [column.ratio_cell(here[OURS], here[THEIRS]) for column in columns]
                yield ["", f"{OURS} / {THEIRS}", *ours, *_of_part(i, parts[OURS], parts[THEIRS])]


def _names(part: Json) -> tuple[str, str]:
    most, method = part["num_speculative_tokens"], part["method"]
    drafts = f"auto (0 to {most})" if part.get("chooses_drafts") else most
    return f"{method} K={drafts}" if drafts else method, part["engine"]


def _peak(part: Json) -> list[float | None]:
    peak = part["peak_memory_bytes"].get("allocated")
    return [None if peak is None else peak / GIB]


OF_PARTS = (
    Column("first step, s", lambda part: [part["first_step_s"]], 1, 2),
    Column("peak, GiB", _peak, 1),
)


def _of_part(line: int, *parts: Json) -> list[str]:
    """Cells that every benchmark has, of a part or of two parts' ratios; empty after line 0."""
    if line:
        return [""] * len(OF_PARTS)
    return [c.cell(*parts) if len(parts) == 1 else c.ratio_cell(*parts) for c in OF_PARTS]


def notes_of(result: Json) -> Iterator[tuple[str, str]]:
    """Name and text of each note: warnings, and versions, device and memory of a part, or why the
    part is missing."""
    yield from (("warning", text) for text in result.get("warnings", ()))
    for part in result["parts"]:
        name = f"{part['engine']}, {part['method']}"
        if part["status"] != "ok":
            yield f"{name} {part['status']}", part["reason"]
            continue
        found = part["environment"]
        versions = [f"{key} {found['versions'][key]}" for key in VERSIONS if found["versions"][key]]
        yield f"{name}, versions", ", ".join([*versions, *_commit(found["git"])])
        if part["gpu_clocks"]:
            for gpu in part["gpu_clocks"]:
                clocks = ", ".join(f"{key} {gpu.get(key)}" for key in CLOCKS)
                yield f"{name}, {gpu.get('name')}", f"driver {gpu.get('driver_version')}, {clocks}"
        memory = {**part["memory_bytes"], **_named(part["peak_memory_bytes"])}
        if memory:
            text = ", ".join(f"{key} {value / GIB:.2f}" for key, value in memory.items())
            yield f"{name}, memory in GiB", text
        unit = BENCHMARKS[result["bench"]].unit
        counts = [row.get("num_built", 0) for row in part["rows"]]
        if any(counts):
            built = [f"{count} in {unit} {i}" for i, count in enumerate(counts, 1) if count]
            yield f"{name}, kernels and graphs built while measured", ", ".join(built)
        graphs = part["cudagraph"]
        yield f"{name}, CUDA graphs", ", ".join(f"{k} {v}" for k, v in graphs.items() if v)


def _named(peak: Json) -> Json:
    return {f"peak {key}": value for key, value in peak.items()}


def _commit(git: Json | None) -> list[str]:
    if not git:
        return []
    changed = " with changes" if git["uncommitted_changes"] else ""
    return [f"commit {git['commit'][:12]}{changed}"]

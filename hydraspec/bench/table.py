"""A benchmark's figures as a table: on the console and as bench.html. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from hydraspec.bench.benchmark import figure
from hydraspec.bench.choices import BENCHMARKS
from hydraspec.metrics.files import Json
from hydraspec.metrics.statistics import ratio
from hydraspec.study import html
from hydraspec.study.console import print_table

OURS, THEIRS = "native", "vllm"
GIB = 1 << 30
VERSIONS = ("hydraspec", "torch", "triton", "transformers", "vllm")
CLOCKS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")


def ratios(result: Json) -> Json:
    """Our times over vLLM's where both were measured, method → figure → ratio: below 1, faster."""
    benchmark = BENCHMARKS[result["bench"]]
    parts = {(part["engine"], part["method"]): part for part in result["parts"] if part["rows"]}
    found: Json = {}
    for (engine, method), ours in parts.items():
        theirs = parts.get((THEIRS, method))
        if engine == OURS and theirs is not None:
            found[method] = {
                **benchmark.ratios(ours, theirs),
                "first_step": ratio(ours["first_step_s"], theirs["first_step_s"]),
            }
    return found


def print_result(result: Json, console: Console) -> None:
    """The table, what it was measured on, and why cells are missing."""
    print_table(console, title_of(result), header_of(result), list(cells_of(result)), num_left=2)
    for name, text in notes_of(result):
        console.print(f"{name}: {text}", markup=False, soft_wrap=True)


def page_of(result: Json) -> str:
    """bench.html."""
    return html.render(
        "bench.html",
        title=title_of(result),
        heading=BENCHMARKS[result["bench"]].heading,
        header=header_of(result),
        lines=list(cells_of(result)),
        notes=list(notes_of(result)),
    )


def title_of(result: Json) -> str:
    """What is measured, in a line."""
    return f"{result['target']}, {result['dtype']}: {BENCHMARKS[result['bench']].title(result)}"


def header_of(result: Json) -> list[str]:
    """Headings: the benchmark's own columns between those of every benchmark."""
    columns = BENCHMARKS[result["bench"]].columns(result)
    return ["method", "engine", *columns, "first step, s", "peak, GiB"]


def cells_of(result: Json) -> Iterator[list[str]]:
    """The lines of each engine and method, and below the two engines one with their ratios."""
    benchmark = BENCHMARKS[result["bench"]]
    methods = dict.fromkeys(part["method"] for part in result["parts"])
    for method in methods:
        parts = [part for part in result["parts"] if part["method"] == method and part["rows"]]
        found = result["ratios"].get(method)
        for line in range(benchmark.num_lines(result)):
            for part in parts:
                if cells := benchmark.cells(part, line, result):
                    yield [*_names(part), *cells, *(_of_all_lines(part) if line == 0 else ("", ""))]
            if found and (cells := benchmark.ratio_cells(found, line, result)):
                start = figure(found["first_step"], 2) if line == 0 else ""
                yield ["", f"{OURS} / {THEIRS}", *cells, start, "-" if line == 0 else ""]


def _names(part: Json) -> tuple[str, str]:
    drafts, method = part["num_speculative_tokens"], part["method"]
    return f"{method} K={drafts}" if drafts else method, part["engine"]


def _of_all_lines(part: Json) -> tuple[str, str]:
    """The cells that every benchmark has, on the first line of a part."""
    peak = part["peak_memory_bytes"].get("allocated")
    return figure(part["first_step_s"], 1), figure(None if peak is None else peak / GIB, 1)


def notes_of(result: Json) -> Iterator[tuple[str, str]]:
    """Name and text of each note: versions, device and memory of a part, or why it is missing."""
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

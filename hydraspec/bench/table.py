"""A benchmark's figures as a table: on the console and as bench.html. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from hydraspec.metrics.files import Json
from hydraspec.report import html
from hydraspec.report.console import print_table

OURS, THEIRS = "native", "vllm"
GIB = 1 << 30
VERSIONS = ("hydraspec", "torch", "triton", "transformers", "vllm")
CLOCKS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")


def ratios(result: Json) -> Json:
    """Our times over vLLM's where both were measured, method → figure → ratio: below 1, faster."""
    parts = {(part["engine"], part["method"]): part for part in result["parts"] if part["rows"]}
    found: Json = {}
    for (engine, method), ours in parts.items():
        theirs = parts.get((THEIRS, method))
        if engine != OURS or theirs is None:
            continue
        other = {row["batch"]: row for row in theirs["rows"]}
        both = [(row, other[row["batch"]]) for row in ours["rows"] if row["batch"] in other]
        found[method] = {
            "tpot": {str(a["batch"]): _ratio(a["tpot_ms"], b["tpot_ms"]) for a, b in both},
            "prefill": {str(a["batch"]): _ratio(a["prefill_s"], b["prefill_s"]) for a, b in both},
            "first_step": _ratio(ours["first_step_s"], theirs["first_step_s"]),
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
        header=header_of(result),
        lines=list(cells_of(result)),
        notes=list(notes_of(result)),
    )


def title_of(result: Json) -> str:
    """What is measured, in a line."""
    return (
        f"{result['target']}, {result['dtype']}: time per output token, prompts of "
        f"{result['prompt_tokens']}, {result['output_tokens']} tokens out"
    )


def header_of(result: Json) -> list[str]:
    """The heads of the table's columns: times per batch size, then prefill, drafts, memory."""
    largest = result["batches"][-1]
    batches = [f"batch {batch}, ms" for batch in result["batches"]]
    prefill = f"prefill {largest} x {result['prompt_tokens']}, s"
    return ["method", "engine", *batches, prefill, "tokens a draft", "first step, s", "peak, GiB"]


def cells_of(result: Json) -> Iterator[list[str]]:
    """A line for each engine and method, and below the two one with their ratios."""
    methods = dict.fromkeys(part["method"] for part in result["parts"])
    for method in methods:
        for part in result["parts"]:
            if part["method"] == method and part["rows"]:
                yield _cells(part, result)
        if method in result["ratios"]:
            yield _ratio_cells(method, result)


def _cells(part: Json, result: Json) -> list[str]:
    rows = {row["batch"]: row for row in part["rows"]}
    drafts = part["num_speculative_tokens"]
    last = rows.get(result["batches"][-1], {})
    peak = part["peak_memory_bytes"].get("allocated")
    return [
        f"{part['method']} K={drafts}" if drafts else part["method"],
        part["engine"],
        *(_figure(rows.get(batch, {}).get("tpot_ms"), 2) for batch in result["batches"]),
        _figure(last.get("prefill_s"), 3),
        _figure(last.get("acceptance_length"), 2),
        _figure(part["first_step_s"], 1),
        _figure(None if peak is None else peak / GIB, 1),
    ]


def _ratio_cells(method: str, result: Json) -> list[str]:
    found = result["ratios"][method]
    batches = [str(batch) for batch in result["batches"]]
    return [
        "",
        f"{OURS} / {THEIRS}",
        *(_figure(found["tpot"].get(batch), 3) for batch in batches),
        _figure(found["prefill"].get(batches[-1]), 3),
        "-",
        _figure(found["first_step"], 2),
        "-",
    ]


def notes_of(result: Json) -> Iterator[tuple[str, str]]:
    """Name and text: machine, versions, memory of each part, and what is missing."""
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
        graphs = part["cudagraph"]
        yield f"{name}, CUDA graphs", ", ".join(f"{k} {v}" for k, v in graphs.items() if v)


def _named(peak: Json) -> Json:
    return {f"peak {key}": value for key, value in peak.items()}


def _commit(git: Json | None) -> list[str]:
    if not git:
        return []
    changed = " with changes" if git["uncommitted_changes"] else ""
    return [f"commit {git['commit'][:12]}{changed}"]


def _ratio(ours: float, theirs: float) -> float | None:
    return ours / theirs if theirs else None


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"

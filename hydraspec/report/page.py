"""report.html: one self-contained page about one run.

Shows the summary's figures, computes none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import yaml  # type: ignore[import-untyped]

from hydraspec.metrics.files import Json, plain
from hydraspec.metrics.lossless import HEADLINES
from hydraspec.metrics.summary import PROFILE
from hydraspec.report.charts import (
    Bar,
    Series,
    Stack,
    grouped_bars,
    horizontal_bars,
    stacked_bars,
)
from hydraspec.report.console import TOO_FEW, number
from hydraspec.report.style import card, facts, legend, page, table

FEW_DRAFTS = 30  # a rate of fewer is known to 0.1 at best, so its bar says how many
METHOD, SECOND, BASELINE = "var(--method)", "var(--second)", "var(--baseline)"


def render(summary: Json, *, resolved: Mapping[str, object], samples: str, made: str) -> str:
    """The page. `samples` is the HTML of the sample requests, `made` says when and on what."""
    parts = [
        _header(summary, made),
        _headline(summary),
        _warnings(summary["warnings"]),
        _cpu_note(summary),
        _pair(_by_position(summary), _by_category(summary)),
        _pair(_speed(summary), _breakdown(summary)),
        _pair(_accuracy(summary), _lossless(summary)),
        samples,
        _settings(summary, resolved),
    ]
    return page(f"{summary['target']}, {summary['method']}", "\n".join(filter(None, parts)))


def _pair(*cards: str) -> str:
    kept = [one for one in cards if one]
    return f'<div class="pair">{"".join(kept)}</div>' if kept else ""


def _header(summary: Json, made: str) -> str:
    drafts = summary["num_speculative_tokens"]
    method = f"{summary['method']}, {drafts} draft tokens" if drafts else "no speculation"
    at_once = summary["concurrency"] or "all"
    facts = (
        f"{summary['num_requests']} requests of workload {summary['workload']}, {at_once} at once, "
        f"temperature {summary['temperature']:g}, engine {summary['engine']}, {summary['dtype']} "
        f"on {summary['device']}"
    )
    title = escape(f"{summary['target']} with {method}")
    return (
        f'<h1>{title}</h1><p class="muted">{escape(facts)}</p>'
        f'<p class="muted small">{escape(made)}</p>'
    )


# ---------------------------------------------------------------- headline


def _headline(summary: Json) -> str:
    cards = []
    if summary["status"] != "ok":
        note = f"{summary['num_requests']} of {summary['num_requests_in_workload']} requests ended"
        cards.append(_figure("Status", escape(summary["status"]), note, "bad"))
    if summary["lossless"]["num_requests_checked"] or summary["num_drafts"]:
        kind, word, note = HEADLINES[summary["lossless"]["verdict"]]
        note = note or summary["lossless"]["reason"]
        if count := summary["lossless"]["num_requests_checked"]:
            note += f" ({count} checked)"
        cards.append(_figure("Lossless", word, note, kind))
    if summary["speedup"]:
        note = f"{_range(summary['speedup'])}, decode throughput over method=none"
        cards.append(_figure("Speedup", f"{summary['speedup']['mean']:.2f}×", note))  # noqa: RUF001
    if summary["acceptance_length"]["mean"] is not None:
        most = summary["num_speculative_tokens"] + 1
        over_requests = number(summary["acceptance_length"]["mean_over_requests"])
        note = f"{_range(summary['acceptance_length'])}, tokens per verification, at most {most}"
        note += f"; {over_requests} as a mean over requests"
        cards.append(
            _figure("Acceptance length", number(summary["acceptance_length"]["mean"]), note)
        )
    rate = summary["output_tokens_per_second"]
    cards.append(
        _figure(
            "Decode throughput",
            f"{number(rate, 0)} <small>tok/s</small>",
            f"{number(summary['time_per_output_token_ms'])} ms per token for one user, "
            f"{number(summary['time_to_first_token_ms'], 1)} ms to the first",
        )
    )
    return f'<div class="cards">{"".join(cards)}</div>'


def _figure(label: str, figure: str, note: str, kind: str = "") -> str:
    """A headline box; `figure` is HTML."""
    return (
        f'<div class="card {kind}"><div class="label">{escape(label)}</div>'
        f'<div class="figure">{figure}</div><div class="small">{escape(note)}</div></div>'
    )


def _range(estimate: Json) -> str:
    if not estimate["ci95"]:
        return f"no interval: {TOO_FEW}"
    return "95 % interval {:.2f} to {:.2f}".format(*estimate["ci95"])


def _warnings(warnings: Sequence[str]) -> str:
    if not warnings:
        return ""
    items = "".join(f"<li>{escape(warning)}</li>" for warning in warnings)
    return f'<div class="note warn"><b>Warnings</b><ul>{items}</ul></div>'


def _cpu_note(summary: Json) -> str:
    if summary["device"] != "cpu" or not summary["num_speculative_tokens"]:
        return ""
    rows = summary["num_speculative_tokens"] + 1
    at_once = summary["concurrency"]
    here = f"Here {at_once} may share a step" if at_once else "Here all of them may"
    return (
        '<div class="note">On a CPU the rows that verify drafts are not free: each request brings '
        f"{rows} rows to a step instead of one, and arithmetic, not memory, sets the pace as soon "
        f"as several requests share it. So the speedup depends on concurrency. {here}; compare "
        "with <code>-m workload.concurrency=1,4,16</code>.</div>"
    )


# ---------------------------------------------------------------- acceptance


def _by_position(summary: Json) -> str:
    rates = summary["acceptance_rate_per_position"]
    if not summary["num_drafts"]:
        return ""
    series = [
        Series(name="of all drafts", color=METHOD, values=rates),
        Series(
            name="once the one before was accepted",
            color=SECOND,
            values=summary["conditional_acceptance_rate_per_position"],
        ),
    ]
    labels = [f"draft {i + 1}" if len(rates) <= 8 else str(i + 1) for i in range(len(rates))]
    reached = summary["num_reached_per_position"]
    labels = [label + _few(n) for label, n in zip(labels, reached, strict=True)]
    chart = grouped_bars(labels, series, description="Acceptance rate by draft position")
    return card(
        "Accepted drafts by position",
        chart,
        legend([(one.name, one.color) for one in series]),
        note=f"{number(summary['num_accepted_tokens'], 0)} of "
        f"{number(summary['num_draft_tokens'], 0)} draft tokens accepted in "
        f"{number(summary['num_drafts'], 0)} verifications",
    )


def _few(num_drafts: int) -> str:
    """How many drafts a bar is of, where they are few."""
    return f" (n={num_drafts})" if num_drafts < FEW_DRAFTS else ""


def _by_category(summary: Json) -> str:
    lengths = {k: v for k, v in summary["acceptance_length_by_category"].items() if v is not None}
    if not lengths:
        return ""
    bars = [
        Bar(
            label=name[:24],
            value=value,
            text=number(value) + _few(summary["num_drafts_by_category"][name]),
            color=METHOD,
        )
        for name, value in sorted(lengths.items(), key=lambda item: -item[1])
    ]
    chart = horizontal_bars(bars, description="Acceptance length by category", mark=1.0)
    most = summary["num_speculative_tokens"] + 1
    return card(
        "Acceptance length by category",
        chart,
        note=f"Tokens per verification, from 1 (dashed: no draft accepted) to {most}",
    )


# ---------------------------------------------------------------- speed


def _speed(summary: Json) -> str:
    sides = [(summary["method"], summary, METHOD)]
    if summary["baseline"]:
        sides.append(("none (baseline)", summary["baseline"], BASELINE))
    bars = [
        Bar(
            label=name,
            value=side["output_tokens_per_second"],
            text=f"{number(side['output_tokens_per_second'], 0)} tok/s",
            color=color,
            ci95=side["output_tokens_per_second_ci95"],
        )
        for name, side, color in sides
        if side["output_tokens_per_second"] is not None
    ]
    rows = [
        [label, *(number(side[key], digits) for _, side, _ in sides)]
        for label, key, digits in (
            ("time per output token, ms", "time_per_output_token_ms", 3),
            ("time to first token, ms", "time_to_first_token_ms", 2),
            ("steps", "num_steps", 0),
            ("time in steps, prompts included, s", "total_step_time_s", 2),
            ("output tokens", "num_output_tokens", 0),
        )
    ]
    return card(
        "Speed",
        horizontal_bars(bars, description="Decode throughput") if bars else "",
        table(["", *(name for name, _, _ in sides)], rows),
        note=_throughput_note(sides),
    )


def _throughput_note(sides: Sequence[tuple[str, Json, str]]) -> str:
    if all(side["output_tokens_per_second_ci95"] is None for _, side, _ in sides):
        return f"Decode throughput; no interval: {TOO_FEW}"
    return "Decode throughput with 95 % intervals, bootstrap over requests"


def _breakdown(summary: Json) -> str:
    sides = [(summary["method"], summary["time_breakdown_ms"])]
    if summary["baseline"]:
        sides.append(("none", summary["baseline"]["time_breakdown_ms"]))
    phases = [name for name, value in sides[0][1].items() if value is not None]
    if not phases:
        return ""
    colors = {name: f"var(--p{min(i, 5)})" for i, name in enumerate(sides[0][1])}
    stacks = [
        Stack(
            label=label,
            parts=[(name, side.get(name) or 0.0, colors[name]) for name in phases],
            text=f"{number(sum(side.get(name) or 0.0 for name in phases))} ms",
        )
        for label, side in sides
    ]
    rows = [[name, *(number(side.get(name), 3) for _, side in sides)] for name in phases]
    return card(
        "Where a step's time goes",
        stacked_bars(stacks, description="Mean milliseconds per step by phase"),
        legend([(name, colors[name]) for name in phases]),
        table(["mean ms per step", *(label for label, _ in sides)], rows),
        note=_breakdown_note(summary),
    )


def _breakdown_note(summary: Json) -> str:
    if summary["time_breakdown_from"] == PROFILE:
        return f"Over {PROFILE}; schedule is the host's time, the rest the device's"
    return "Over all steps, those that read prompts included"


# ---------------------------------------------------------------- answers


def _accuracy(summary: Json) -> str:
    ours, theirs = summary["accuracy"], (summary["baseline"] or {}).get("accuracy")
    if not ours:
        return ""
    sides = [side for side in (ours, theirs) if side]
    rows = [
        [name, str(marks["num_scored"]), *(_share(side["by_category"].get(name)) for side in sides)]
        for name, marks in ours["by_category"].items()
    ]
    rows.append(["all", str(ours["num_scored"]), *(_share(side) for side in sides)])
    header = ["", "scored", summary["method"], "none (baseline)"][: 2 + len(sides)]
    return card("Exact match", table(header, rows), note="Answers as the workload gives them")


def _share(marks: Json) -> str:
    return "-" if not marks else f"{marks['exact_match']:.1%}"


def _lossless(summary: Json) -> str:
    lossless = summary["lossless"]
    if lossless["verdict"] == "not_checked":
        return ""
    rows = [
        ["greedy requests checked", str(lossless["num_requests_checked"])],
        ["with another output", str(lossless["num_requests_diverged"])],
    ]
    if count := lossless["num_requests_sampled"]:
        rows.append(["sampled requests, not checked", str(count)])
    for side in ("method", "baseline"):
        if count := lossless[f"num_failed_with_{side}_only"]:
            rows.append([f"with an error in the {side} only", str(count)])
    for title, key in (("first", "first_divergence"), ("beyond rounding", "first_beyond_margin")):
        if found := lossless[key]:
            margins = f"{_digits(found['target_margin'])}, rounding allows "
            margins += _digits(found["allowed_margin"])
            rows.append(
                [f"{title}: request, output token", f"{found['request']}, {found['position']}"]
            )
            rows.append([f"{title}: margin of the target's two best", margins])
    return card("Lossless", facts(rows), note=HEADLINES[lossless["verdict"]][2])


def _digits(margin: float | None) -> str:
    return "-" if margin is None else f"{margin:.3g}"


def _settings(summary: Json, resolved: Mapping[str, object]) -> str:
    graphs = summary["cudagraph"]
    memory = summary["memory_bytes"]
    rows = [
        ["CUDA graphs", ", ".join(f"{key}: {value}" for key, value in graphs.items() if value)],
        ["verification, draft sampling", f"{summary['verification']}, {summary['draft_sampling']}"],
        ["memory, MiB", ", ".join(f"{k}: {v / 2**20:,.1f}" for k, v in memory.items())],
        ["threads, seed", f"{summary['num_threads']}, {summary['seed']}"],
        ["preemptions, peak KV use", _kv(summary)],
    ]
    if summary["draft_spec"]:
        spec = ", ".join(f"{k}: {v}" for k, v in summary["draft_spec"].items())
        rows.append(["drafter", spec])
    config = escape(yaml.safe_dump(plain(resolved), sort_keys=False, allow_unicode=True))
    details = f"<details><summary>Configuration</summary><pre>{config}</pre></details>"
    return card("How it was run", facts(rows), details)


def _kv(summary: Json) -> str:
    return f"{summary['num_preemptions']}, {summary['peak_kv_usage']:.0%} of the blocks"

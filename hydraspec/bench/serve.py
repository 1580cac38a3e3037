"""bench=serve: latencies and goodput of requests that arrive at several rates, the same rates for
every engine and method."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from hydraspec.bench import load
from hydraspec.bench.benchmark import Benchmark, Curve, figure
from hydraspec.bench.passes import Passes
from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Engine
from hydraspec.metrics.files import Json
from hydraspec.metrics.latency import Limits, goodput, percentiles, waits
from hydraspec.metrics.statistics import ratio
from hydraspec.types import Request
from hydraspec.workloads.arrivals import ArrivalProcess

log = logging.getLogger(__name__)

PLACES = ("p50", "p90", "p99")
WAITS = {  # by key of a row: its heading, the figures of a cell, digits
    "ttft": ("TTFT {}, ms", PLACES, 0),
    "queue": ("queue {}, ms", PLACES, 0),
    "inter_token": ("ITL {}, ms", ("mean", "p99"), 2),
}
MOST = 0.9  # of the requests: a rate that is kept


def _by_rate(
    title: str, key: str, figure_name: str, *, unit: str = "ms", of: str = "By request rate."
) -> Curve:
    """A figure of a part's rows against their rates."""

    def points(part: Json) -> list[tuple[float, float | None]]:
        rows = _at_rates(part)
        return [(row["request_rate"], (row[key] or {}).get(figure_name)) for row in rows]

    return Curve(title=title, note=of, x_name="requests/s offered", y_name=unit, points=points)


def _at_rates(part: Json) -> list[Json]:
    """The rows but that of all requests at once."""
    return [row for row in part["rows"] if row["request_rate"] is not None]


class Serve(Benchmark):
    """The requests of bench=load, first all at once and then at each rate."""

    question = "Up to what request rates are limits kept with {}?"
    curves = (
        *(_by_rate(f"Time to first token, {place}", "ttft", place) for place in PLACES),
        _by_rate("Time between tokens, p99", "inter_token", "p99"),
        _by_rate(
            *("Goodput", "goodput", "requests_per_second"),
            unit="requests/s in limits",
            of="Requests in limits per second, by request rate.",
        ),
    )
    heading = "Latencies at several request rates"
    unit, units = "line", "lines"
    needs_times = True

    def settings(self, config: RunConfig) -> Json:
        bench = config.bench
        return {
            **load.settings_of_requests(config),
            "rates": bench.rates,
            "peak_rate": bench.peak_rate,
            "limits": {
                "ttft_ms": bench.goodput.ttft_ms,
                "inter_token_ms": bench.goodput.inter_token_ms,
            },
        }

    def num_rows(self, config: RunConfig) -> int:
        return 1 + len(config.bench.rates)

    def rows(self, config: RunConfig, engine: Engine) -> Iterator[Json]:
        requests = load.requests_of(config, engine)
        Passes(engine, requests).run()  # kernels are compiled and graphs captured
        at_once = _row(config, engine, requests, None)
        yield at_once
        peak_rate = config.bench.peak_rate or at_once["requests_per_second"]
        for share in config.bench.rates:
            yield _row(config, engine, requests, share * peak_rate)

    def heavy_requests(self, config: RunConfig, engine: Engine) -> list[Request]:
        return load.requests_of(config, engine)[: config.engine.max_num_seqs]

    def carried(self, config: RunConfig, parts: Sequence[Json]) -> list[str]:
        """The peak rate of the first part that was measured, for all others."""
        if config.bench.peak_rate is not None:
            return []
        found = [part["rows"][0]["requests_per_second"] for part in parts if part["rows"]]
        return [f"bench.peak_rate={rate:.6f}" for rate in found[:1]]

    def said(self, part: Json) -> str:
        limited = [row for row in _at_rates(part) if row["goodput"] is not None]
        if not limited:
            return "no limits were set"
        kept = [r["request_rate"] for r in limited if (r["goodput"]["share"] or 0) >= MOST]
        if not kept:
            return f"at no rate {MOST:.0%} of requests in limits"
        return f"{MOST:.0%} of requests or more in limits up to {max(kept):.3g} requests/s"

    def told(self, ours: Json, theirs: Json) -> str:
        a, b = list(zip(ours["rows"], theirs["rows"], strict=False))[-1]
        rate = "all at once" if a["request_rate"] is None else f"at {a['request_rate']:.3g}/s"
        known = [
            f"{what} {figure(a[key]['p99'], digits)} ms and {figure(b[key]['p99'], digits)} ms"
            for key, what, digits in (("ttft", "first token", 0), ("inter_token", "next tokens", 1))
            if None not in (a[key]["p99"], b[key]["p99"])
        ]
        return f"p99 {rate}: {', '.join(known) or 'no times of tokens'}"

    def title(self, result: Json) -> str:
        return (
            f"{result['num_requests']} requests at each rate, {result['max_num_seqs']} slots, "
            f"prompts around {result['prompt_tokens']}, outputs around "
            f"{result['output_tokens']} tokens"
        )

    def columns(self, result: Json) -> list[str]:
        latencies = [heading.format(" / ".join(keys)) for heading, keys, _ in WAITS.values()]
        good = "in limits, %"
        return [
            "requests/s",
            "total, s",
            "tokens/s",
            *latencies,
            "TPOT, ms",
            good,
            "tokens a draft",
        ]

    def num_lines(self, result: Json) -> int:
        return 1 + len(result["rates"])

    def cells(self, part: Json, line: int, result: Json) -> list[str]:
        if line >= len(part["rows"]):
            return []
        row = part["rows"][line]
        share = None if row["goodput"] is None else row["goodput"]["share"]
        return [
            "all at once" if line == 0 else figure(row["request_rate"], 2),
            figure(row["seconds"], 2),
            figure(row["tokens_per_second"], 0),
            *(_several(row[name], keys, digits) for name, (_, keys, digits) in WAITS.items()),
            figure(row["time_per_output_token_ms"], 2),
            figure(None if share is None else 100 * share, 0),
            figure(row["acceptance_length"], 2),
        ]

    def ratios(self, ours: Json, theirs: Json) -> Json:
        pairs = zip(ours["rows"], theirs["rows"], strict=False)
        return {"rates": [_ratios(a, b) for a, b in pairs]}

    def ratio_cells(self, ratios: Json, line: int, result: Json) -> list[str]:
        if line >= len(ratios["rates"]):
            return []
        found = ratios["rates"][line]
        waiting = (_several(found[name], keys, 2) for name, (_, keys, _) in WAITS.items())
        per_token = figure(found["time_per_output_token"], 3)
        return ["", figure(found["seconds"], 3), "", *waiting, per_token, "", ""]


def _row(
    config: RunConfig, engine: Engine, requests: Sequence[Request], rate: float | None
) -> Json:
    """One pass; None: all requests at once. Arrivals at other rates are the same, stretched."""
    process = ArrivalProcess(rate=rate, burstiness=1.0, seed=config.seed)
    passes = Passes(engine, process.offered(requests, 1))
    passes.run()
    (seconds,), meter = passes.seconds, passes.meter
    limits = config.bench.goodput
    row = {
        "request_rate": rate,
        "seconds": seconds,
        "requests_per_second": len(requests) / seconds,
        "num_output_tokens": meter.num_output_tokens(),
        "tokens_per_second": meter.num_output_tokens() / seconds,
        **{name: summary_of(values) for name, values in waits(meter.completed).items()},
        "time_per_output_token_ms": meter.time_per_output_token_ms(),
        "goodput": goodput(
            meter.completed,
            Limits(ttft_ms=limits.ttft_ms, inter_token_ms=limits.inter_token_ms),
            seconds,
        ),
        "acceptance_length": meter.acceptance_length().mean,
        "num_steps": meter.steps.num_steps or None,
        "num_built": passes.num_built,
    }
    offered = "all at once" if rate is None else f"{rate:.2f} requests per second"
    log.info("%s: %.2f s, %.0f tokens per second", offered, seconds, row["tokens_per_second"])
    return row


def summary_of(values: Sequence[float]) -> Json:
    """Mean and percentiles; null without values."""
    return {"mean": ratio(sum(values), len(values)), **percentiles(values)}


def _several(found: Json, keys: Sequence[str], digits: int) -> str:
    return " / ".join(figure(found[key], digits) for key in keys)


def _ratios(ours: Json, theirs: Json) -> Json:
    def of(name: str) -> Json:
        keys = ("mean", *PLACES)
        return {key: _ratio(ours[name][key], theirs[name][key]) for key in keys}

    return {
        "seconds": _ratio(ours["seconds"], theirs["seconds"]),
        **{name: of(name) for name in WAITS},
        "time_per_output_token": _ratio(
            ours["time_per_output_token_ms"], theirs["time_per_output_token_ms"]
        ),
    }


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None else ratio(ours, theirs)

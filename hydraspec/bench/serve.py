"""bench=serve: latencies and goodput of requests that arrive at several rates, the same rates for
every engine and method."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial

from hydraspec.bench import load
from hydraspec.bench.benchmark import Benchmark, Column, Curve, figure, ratio_of
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
MOST = 0.9  # share of requests in limits at which a rate counts as kept


def _by_rate(
    title: str, key: str, figure_name: str, *, unit: str = "ms", of: str = "By request rate."
) -> Curve:
    """Curve of a figure of a part's rows against their request rates."""

    def points(part: Json) -> list[tuple[float, float | None]]:
        rows = _at_rates(part)
        return [(row["request_rate"], (row[key] or {}).get(figure_name)) for row in rows]

    return Curve(title=title, note=of, x_name="requests/s offered", y_name=unit, points=points)


def _at_rates(part: Json) -> list[Json]:
    """The rows of a part that have a request rate: all but that of all requests at once."""
    return [row for row in part["rows"] if row["request_rate"] is not None]


class Serve(Benchmark):
    """Benchmark of the requests of bench=load, offered first all at once and then at each rate."""

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
    keys = (*load.REQUEST_KEYS, "rates", "peak_rate")
    engine_keys = ("max_num_seqs",)

    def settings(self, config: RunConfig) -> Json:
        return {**super().settings(config), "limits": asdict(config.bench.goodput)}

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
        """The override of bench.peak_rate with that of the first part measured, for later parts."""
        if config.bench.peak_rate is not None:
            return []
        found = [part["rows"][0]["requests_per_second"] for part in parts if part["rows"]]
        return [f"bench.peak_rate={rate:.6f}" for rate in found[:1]]

    def summary_line(self, part: Json) -> str:
        limited = [row for row in _at_rates(part) if row["goodput"] is not None]
        if not limited:
            return "no limits were set"
        kept = [r["request_rate"] for r in limited if (r["goodput"]["share"] or 0) >= MOST]
        if not kept:
            return f"at no rate {MOST:.0%} of requests in limits"
        return f"{MOST:.0%} of requests or more in limits up to {max(kept):.3g} requests/s"

    def comparison_line(self, ours: Json, theirs: Json) -> str:
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

    def columns(self, result: Json) -> list[Column]:
        return [
            Column("requests/s", _offered),
            Column("total, s", lambda row: [row["seconds"]], 2, 3),
            Column("tokens/s", lambda row: [row["tokens_per_second"]]),
            *(
                Column(heading.format(" / ".join(keys)), partial(_waits, name, keys), digits, 2)
                for name, (heading, keys, digits) in WAITS.items()
            ),
            Column("TPOT, ms", lambda row: [row["time_per_output_token_ms"]], 2, 3),
            Column("in limits, %", _percent_in_limits),
            Column("tokens a draft", lambda row: [row["acceptance_length"]], 2),
        ]

    def lines(self, part: Json) -> list[Json]:
        return list(part["rows"])

    def ratios(self, ours: Json, theirs: Json) -> Json:
        pairs = zip(ours["rows"], theirs["rows"], strict=False)
        return {"rates": [_ratios(a, b) for a, b in pairs]}


def _offered(row: Json) -> str:
    rate = row["request_rate"]
    return "all at once" if rate is None else figure(rate, 2)


def _waits(name: str, keys: Sequence[str], row: Json) -> list[float | None]:
    return [row[name][key] for key in keys]


def _percent_in_limits(row: Json) -> list[float | None]:
    share = (row["goodput"] or {}).get("share")
    return [None if share is None else 100 * share]


def _row(
    config: RunConfig, engine: Engine, requests: Sequence[Request], rate: float | None
) -> Json:
    """The row of a pass; rate None: all requests at once. All rates stretch the same arrivals."""
    process = ArrivalProcess(rate=rate, burstiness=1.0, seed=config.seed)
    passes = Passes(engine, process.offered(requests, 1))
    passes.run()
    found, meter, limits = passes.figures(), passes.meter, config.bench.goodput
    seconds = found["seconds"]
    row = {
        "request_rate": rate,
        **found,
        "requests_per_second": len(requests) / seconds,
        **{name: summary_of(values) for name, values in waits(meter.completed).items()},
        "time_per_output_token_ms": meter.time_per_output_token_ms(),
        "goodput": goodput(meter.completed, Limits(**asdict(limits)), seconds),
        "num_built": passes.num_built,
    }
    offered = "all at once" if rate is None else f"{rate:.2f} requests per second"
    log.info("%s: %.2f s, %.0f tokens per second", offered, seconds, row["tokens_per_second"])
    return row


def summary_of(values: Sequence[float]) -> Json:
    """Mean and percentiles of values, each None without values."""
    return {"mean": ratio(sum(values), len(values)), **percentiles(values)}


def _ratios(ours: Json, theirs: Json) -> Json:
    return {
        "seconds": ratio_of(ours["seconds"], theirs["seconds"]),
        **{
            name: {key: ratio_of(ours[name][key], theirs[name][key]) for key in ("mean", *PLACES)}
            for name in WAITS
        },
        "time_per_output_token": ratio_of(
            ours["time_per_output_token_ms"], theirs["time_per_output_token_ms"]
        ),
    }

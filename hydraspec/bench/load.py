"""bench=load: time for a mixed load, requests of different lengths that are all offered at once."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hydraspec.bench.benchmark import Benchmark, Curve, figure
from hydraspec.bench.bound import bound_of
from hydraspec.bench.passes import Passes, make_requests
from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Engine
from hydraspec.metrics.files import Json
from hydraspec.metrics.statistics import ratio
from hydraspec.types import Request

log = logging.getLogger(__name__)

PROMPT_SIGMA, OUTPUT_SIGMA = 1.0, 0.6  # of the logarithms of the lengths
SHORTEST = 16  # tokens, or the median where that is less


class Load(Benchmark):
    """Passes over the same requests, through as many slots as engine.max_num_seqs."""

    question = "How long does a mixed load take with {}?"
    curves = (
        Curve(
            title="Seconds for all requests",
            note="By pass; the first compiles kernels and captures graphs.",
            x_name="pass",
            y_name="s",
            points=lambda part: [(row["pass"], row["seconds"]) for row in part["rows"]],
        ),
    )
    heading = "Seconds for all requests"
    unit, units = "pass", "passes"

    def settings(self, config: RunConfig) -> Json:
        return {**settings_of_requests(config), "repeats": config.bench.repeats}

    def num_rows(self, config: RunConfig) -> int:
        return config.bench.repeats

    def rows(self, config: RunConfig, engine: Engine) -> Iterator[Json]:
        requests = requests_of(config, engine)
        for number in range(1, config.bench.repeats + 1):
            yield _time_pass(engine, requests, number)

    def figures(self, config: RunConfig, engine: Engine, rows: Sequence[Json]) -> Json:
        return {"bound": bound_of(config, engine, requests_of(config, engine), rows[-1])}

    def heavy_requests(self, config: RunConfig, engine: Engine) -> list[Request]:
        return requests_of(config, engine)[: config.engine.max_num_seqs]

    def said(self, part: Json) -> str:
        last = part["rows"][-1]
        seconds, rate = figure(last["seconds"], 2), figure(last["tokens_per_second"], 0)
        return f"all requests in {seconds} s, {rate} tokens/s"

    def told(self, ours: Json, theirs: Json) -> str:
        a, b = (part["rows"][-1]["seconds"] for part in (ours, theirs))
        return f"{figure(a, 2)} s and {figure(b, 2)} s for all requests"

    def title(self, result: Json) -> str:
        return (
            f"{result['num_requests']} requests through {result['max_num_seqs']} slots, prompts "
            f"around {result['prompt_tokens']}, outputs around {result['output_tokens']} tokens"
        )

    def columns(self, result: Json) -> list[str]:
        passes = [f"pass {number}, s" for number in range(1, result["repeats"] + 1)]
        bound = ["bound, s", "last pass / bound"]
        return [*passes, *bound, "tokens/s", "steps", "tokens a draft"]

    def cells(self, part: Json, line: int, result: Json) -> list[str]:
        rows, bound = part["rows"], part.get("bound") or {}
        missing = ["-"] * (result["repeats"] - len(rows))
        last = rows[-1]
        return [
            *(figure(row["seconds"], 2) for row in rows),
            *missing,
            figure(bound.get("seconds"), 2),
            figure(bound.get("ratio"), 2),
            figure(last["tokens_per_second"], 0),
            figure(last["num_steps"], 0),
            figure(last["acceptance_length"], 2),
        ]

    def ratios(self, ours: Json, theirs: Json) -> Json:
        pairs = zip(ours["rows"], theirs["rows"], strict=False)
        return {"seconds": [ratio(a["seconds"], b["seconds"]) for a, b in pairs]}

    def ratio_cells(self, ratios: Json, line: int, result: Json) -> list[str]:
        found = [figure(value, 3) for value in ratios["seconds"]]
        return [*found, *["-"] * (len(self.columns(result)) - len(found))]


def _time_pass(engine: Engine, requests: Sequence[Request], number: int) -> Json:
    passes = Passes(engine, requests)
    passes.run()
    (seconds,), meter = passes.seconds, passes.meter
    num_tokens = meter.num_output_tokens()
    rate = ratio(num_tokens, seconds)
    log.info("pass %d: %.2f s, %.0f tokens per second", number, seconds, rate or 0.0)
    return {
        "pass": number,
        "seconds": seconds,
        "num_output_tokens": num_tokens,
        "tokens_per_second": rate,
        "num_steps": meter.steps.num_steps or None,  # an engine may report completions only
        "acceptance_length": meter.acceptance_length().mean,
    }


def settings_of_requests(config: RunConfig) -> Json:
    """The keys of bench.json that say what `requests_of` gives."""
    bench = config.bench
    return {
        "num_requests": bench.num_requests,
        "max_num_seqs": config.engine.max_num_seqs,
        "prompt_tokens": bench.prompt_tokens,
        "output_tokens": bench.output_tokens,
        "max_prompt_tokens": bench.max_prompt_tokens,
        "max_output_tokens": bench.max_output_tokens,
    }


def requests_of(config: RunConfig, engine: Engine) -> list[Request]:
    """Random prompts with lognormal lengths of prompts and outputs, the same for every engine."""
    bench, rng = config.bench, np.random.default_rng(config.seed)
    prompts = _lengths(
        rng, bench.num_requests, bench.prompt_tokens, PROMPT_SIGMA, bench.max_prompt_tokens
    )
    outputs = _lengths(
        rng, bench.num_requests, bench.output_tokens, OUTPUT_SIGMA, bench.max_output_tokens
    )
    ids = [rng.integers(0, engine.info.vocab_size, length).tolist() for length in prompts]
    return make_requests(config, ids, outputs.tolist())


def _lengths(
    rng: np.random.Generator, count: int, median: int, sigma: float, longest: int
) -> NDArray[np.int64]:
    drawn = rng.lognormal(math.log(median), sigma, count)
    return np.clip(drawn, min(SHORTEST, median), longest).astype(np.int64)

"""bench=load: time for a mixed load, requests of different lengths that are all offered at once."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from hydraspec.bench.benchmark import Benchmark, Column, Curve, figure
from hydraspec.bench.passes import Passes, make_requests
from hydraspec.config.schema import BenchConfig, RunConfig
from hydraspec.engine.base import Engine
from hydraspec.metrics.files import Json
from hydraspec.metrics.latency import percentiles, waits
from hydraspec.metrics.statistics import ratio
from hydraspec.types import Request, StepRecord

log = logging.getLogger(__name__)

PROMPT_SIGMA, OUTPUT_SIGMA = 1.0, 0.6  # standard deviations of the logarithms of the lengths
SHORTEST = 16  # tokens, or the median where that is less
UNSETTLED_STEPS = 2  # first decode steps of a pass; left out where others follow
REQUEST_KEYS = (
    *("num_requests", "prompt_tokens", "output_tokens"),
    *("max_prompt_tokens", "max_output_tokens", "equal_lengths"),
)


class Load(Benchmark):
    """Benchmark of passes over the same requests, through engine.max_num_seqs slots."""

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
    keys = (*REQUEST_KEYS, "repeats")
    engine_keys = ("max_num_seqs",)

    def num_rows(self, config: RunConfig) -> int:
        return config.bench.repeats

    def rows(self, config: RunConfig, engine: Engine) -> Iterator[Json]:
        requests = requests_of(config, engine)
        engine.prepare(requests)
        for number in range(1, config.bench.repeats + 1):
            yield _time_pass(engine, requests, number)

    def figures(self, config: RunConfig, engine: Engine, rows: Sequence[Json]) -> Json:
        return {"bound": bound_of(config, engine, requests_of(config, engine), rows[-1])}

    def heavy_requests(self, config: RunConfig, engine: Engine) -> list[Request]:
        return requests_of(config, engine)[: config.engine.max_num_seqs]

    def summary_line(self, part: Json) -> str:
        last = part["rows"][-1]
        seconds, rate = figure(last["seconds"], 2), figure(last["tokens_per_second"], 0)
        found = f"all requests in {seconds} s, {rate} tokens/s"
        if (over := _of_bound(("ratio",), part)[0]) is not None:
            p99 = figure(_between_tokens(part)[1], 1)
            found += f", {over:.2f} of reading and decoding alone, p99 {p99} ms between tokens"
        return found

    def comparison_line(self, ours: Json, theirs: Json) -> str:
        a, b = (part["rows"][-1]["seconds"] for part in (ours, theirs))
        return f"{figure(a, 2)} s and {figure(b, 2)} s for all requests"

    def title(self, result: Json) -> str:
        about = "of" if result.get("equal_lengths") else "around"
        return (
            f"{result['num_requests']} requests through {result['max_num_seqs']} slots, prompts "
            f"{about} {result['prompt_tokens']}, outputs {about} {result['output_tokens']} tokens"
        )

    def columns(self, result: Json) -> list[Column]:
        return [
            *(
                Column(f"pass {i + 1}, s", partial(_of_pass, "seconds", i), 2, 3)
                for i in range(result["repeats"])
            ),
            Column("prefill / decode alone, s", partial(_of_bound, ("prefill_s", "decode_s")), 2),
            Column("last pass / alone", partial(_of_bound, ("ratio",)), 2),
            Column("ITL p50 / p99, ms", _between_tokens, 2),
            Column("tokens/s", partial(_of_pass, "tokens_per_second", -1)),
            Column("steps", partial(_of_pass, "num_steps", -1)),
            Column("tokens a draft", partial(_of_pass, "acceptance_length", -1), 2),
        ]

    def ratios(self, ours: Json, theirs: Json) -> Json:
        pairs = zip(ours["rows"], theirs["rows"], strict=False)
        return {"seconds": [ratio(a["seconds"], b["seconds"]) for a, b in pairs]}


def _of_pass(key: str, index: int, part: Json) -> list[float | None]:
    rows = part["rows"]
    return [rows[index][key] if index < len(rows) else None]


def _of_bound(keys: Sequence[str], part: Json) -> list[float | None]:
    return [(part.get("bound") or {}).get(key) for key in keys]


def _between_tokens(part: Json) -> list[float | None]:
    found = part["rows"][-1].get("inter_token") or {}
    return [found.get(place) for place in ("p50", "p99")]


def _time_pass(engine: Engine, requests: Sequence[Request], number: int) -> Json:
    passes = Passes(engine, requests)
    passes.run()
    gaps = waits(passes.meter.completed)["inter_token"]
    found = {"pass": number, **passes.figures(), "inter_token": percentiles(gaps)}
    rate = found["tokens_per_second"] or 0.0
    log.info("pass %d: %.2f s, %.0f tokens per second", number, found["seconds"], rate)
    return found


def requests_of(config: RunConfig, engine: Engine) -> list[Request]:
    """Random prompts with lognormal lengths of prompts and outputs, or with bench.equal_lengths of
    the medians, the same for every engine."""
    bench, rng = config.bench, np.random.default_rng(config.seed)
    prompts = _lengths(bench, rng, bench.prompt_tokens, PROMPT_SIGMA, bench.max_prompt_tokens)
    outputs = _lengths(bench, rng, bench.output_tokens, OUTPUT_SIGMA, bench.max_output_tokens)
    ids = [rng.integers(0, engine.info.vocab_size, length).tolist() for length in prompts]
    return make_requests(config, ids, outputs)


def _lengths(
    bench: BenchConfig, rng: np.random.Generator, median: int, sigma: float, longest: int
) -> list[int]:
    if bench.equal_lengths:
        return [median] * bench.num_requests
    drawn = rng.lognormal(math.log(median), sigma, bench.num_requests)
    lengths: list[int] = np.clip(drawn, min(SHORTEST, median), longest).astype(np.int64).tolist()
    return lengths


def bound_of(
    config: RunConfig, engine: Engine, requests: Sequence[Request], last: Json
) -> Json | None:
    """The least time of a mixed load with this engine's own times, that of its parts alone, and
    the ratio of the `last` pass to it.

    Reading alone is a pass over the load's own prompts, each followed by one token. Decoding alone
    is (output tokens after these / slots / tokens per step) x time of a full step: the median
    decode step with every slot in use, over requests of the load's mean lengths. Returns None for
    an engine that reports completions only, or where no step was full.
    """
    if last["num_steps"] is None:
        return None
    slots = min(config.engine.max_num_seqs, len(requests))
    step_ms = _full_step_ms(engine, requests, slots)
    if step_ms is None:
        return None
    num_prompt = sum(len(request.prompt_token_ids or ()) for request in requests)
    prefill = Passes(engine, [_shortened(request, 1) for request in requests])
    for _ in range(2):  # the first may compile kernels
        prefill.run()
    per_step = last["acceptance_length"] or 1.0
    num_decoded = last["num_output_tokens"] - len(requests)
    decode_s, prefill_s = num_decoded / slots / per_step * step_ms / 1e3, prefill.seconds[-1]
    seconds = decode_s + prefill_s
    ratio = last["seconds"] / seconds
    log.info("bound %.2f s: full step %.3f ms; ratio %.2f", seconds, step_ms, ratio)
    return {
        "seconds": seconds,
        "ratio": ratio,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "full_step_ms": step_ms,
        "tokens_per_step": per_step,
        "prompt_tokens": num_prompt,
        "prefill_tokens_per_second": num_prompt / prefill_s,
    }


def _full_step_ms(engine: Engine, requests: Sequence[Request], slots: int) -> float | None:
    """Median ms of the decode steps in which `slots` requests take part; None without any."""
    prompts = [request.prompt_token_ids or [] for request in requests]
    length = round(statistics.fmean(map(len, prompts)))
    num_tokens = round(statistics.fmean(request.sampling.max_tokens for request in requests))
    drawn = [token for prompt in prompts for token in prompt]
    equal = [
        replace(
            _shortened(requests[i], max(2, num_tokens)),
            prompt_token_ids=drawn[i * length : (i + 1) * length],
        )
        for i in range(slots)
    ]
    passes = Passes(engine, equal)
    passes.run()
    times = [step.total_ms for step in passes.steps if _is_full(step, slots)]
    settled = times[UNSETTLED_STEPS:] or times
    return statistics.median(settled) if settled else None


def _is_full(step: StepRecord, slots: int) -> bool:
    return len(step.requests) == slots and not any(part.is_prefill for part in step.requests)


def _shortened(request: Request, num_tokens: int) -> Request:
    return replace(request, sampling=replace(request.sampling, max_tokens=num_tokens))

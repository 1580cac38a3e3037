"""bench=decode: time per output token and prefill time at several batch sizes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from hydraspec.bench.benchmark import Benchmark, Column, Curve, figure
from hydraspec.bench.passes import Passes, make_requests, random_prompts
from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Engine
from hydraspec.metrics.files import Json
from hydraspec.metrics.latency import BatchTimes
from hydraspec.metrics.statistics import ratio
from hydraspec.types import Request

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 16
CLOCK_TOKENS = 64


class Decode(Benchmark):
    """Benchmark of batches of equal requests, decoded to full length and for one token alone."""

    question = "What is the time per output token with {}?"
    curves = (
        Curve(
            title="Milliseconds per output token",
            note="Of one user, by batch size.",
            x_name="batch",
            y_name="ms",
            points=lambda part: [(row["batch"], row["tpot_ms"]) for row in part["rows"]],
        ),
    )
    heading = "Milliseconds per output token"
    unit, units = "batch size", "batch sizes"
    keys = ("prompt_tokens", "output_tokens", "batches", "repeats")

    def num_rows(self, config: RunConfig) -> int:
        return len(config.bench.batches)

    def rows(self, config: RunConfig, engine: Engine) -> Iterator[Json]:
        largest = config.bench.batches[-1]
        engine.prepare(requests_of(config, engine, largest, config.bench.output_tokens))
        for batch in config.bench.batches:
            yield _time_batch(config, engine, batch)

    def heavy_requests(self, config: RunConfig, engine: Engine) -> list[Request]:
        num_tokens = min(CLOCK_TOKENS, config.bench.output_tokens)
        return requests_of(config, engine, config.bench.batches[-1], num_tokens)

    def summary_line(self, part: Json) -> str:
        ends = [part["rows"][0], part["rows"][-1]][: len(part["rows"])]
        words = [f"{figure(row['tpot_ms'], 2)} ms at batch {row['batch']}" for row in ends]
        return f"time per output token {' and '.join(words)}"

    def comparison_line(self, ours: Json, theirs: Json) -> str:
        found = self.ratios(ours, theirs)["tpot"]
        ratios = [value for value in found.values() if value is not None]
        if not ratios:
            return "no batch was measured on both"
        words = f"{min(ratios):.2f} to {max(ratios):.2f}"
        return f"ratio of times per output token {words} (below 1: the first is faster)"

    def title(self, result: Json) -> str:
        return (
            f"time per output token, prompts of {result['prompt_tokens']}, "
            f"{result['output_tokens']} tokens out"
        )

    def columns(self, result: Json) -> list[Column]:
        last = result["batches"][-1]
        return [
            *(
                Column(f"batch {batch}, ms", _of_batch(batch, "tpot_ms"), 2, 3)
                for batch in result["batches"]
            ),
            Column(
                f"prefill {last} x {result['prompt_tokens']}, s", _of_batch(last, "prefill_s"), 3, 3
            ),
            Column("tokens a draft", _of_batch(last, "acceptance_length"), 2),
            Column("drafts chosen", _drafts_chosen, 1),
        ]

    def ratios(self, ours: Json, theirs: Json) -> Json:
        other = {row["batch"]: row for row in theirs["rows"]}
        both = [(row, other[row["batch"]]) for row in ours["rows"] if row["batch"] in other]
        return {
            "tpot": {str(a["batch"]): ratio(a["tpot_ms"], b["tpot_ms"]) for a, b in both},
            "prefill": {str(a["batch"]): ratio(a["prefill_s"], b["prefill_s"]) for a, b in both},
        }


def _of_batch(batch: int, key: str) -> Callable[[Json], list[float | None]]:
    """Getter of figure `key` of a part at a batch size; [None] where that was not measured."""

    def of(part: Json) -> list[float | None]:
        rows = [row for row in part["rows"] if row["batch"] == batch]
        return [rows[0][key] if rows else None]

    return of


def _drafts_chosen(part: Json) -> list[float | None]:
    """The mean number of drafts by batch size; empty where K is fixed."""
    used = [row.get("num_speculative_tokens_used") for row in part["rows"]]
    return [found and found["mean"] for found in used] if any(used) else []


def _time_batch(config: RunConfig, engine: Engine, batch: int) -> Json:
    """The row of a batch size: after a warm-up, the whole output and one token alone are timed in
    turn, bench.repeats times."""
    num_tokens = config.bench.output_tokens
    whole = Passes(engine, requests_of(config, engine, batch, num_tokens))
    first = Passes(engine, requests_of(config, engine, batch, 1))
    Passes(engine, requests_of(config, engine, batch, WARM_UP_TOKENS)).run()
    Passes(engine, requests_of(config, engine, batch, 1)).run()
    for _ in range(config.bench.repeats):
        whole.run()
        first.run()
    times = BatchTimes(
        num_requests=batch,
        num_tokens=num_tokens,
        whole_s=whole.seconds,
        one_token_s=first.seconds,
    )
    tpot_ms = times.time_per_output_token_ms
    log.info("batch %d: %.3f ms per token, prefill %.3f s", batch, tpot_ms, times.prefill_s)
    return {
        "batch": batch,
        "tpot_ms": tpot_ms,
        "prefill_s": times.prefill_s,
        "output_tokens_per_second": times.output_tokens_per_second,
        "acceptance_length": whole.meter.acceptance_length().mean,
        "num_speculative_tokens_used": whole.drafts_used(),
        "whole_s": times.whole_s,
        "one_token_s": times.one_token_s,
    }


def requests_of(config: RunConfig, engine: Engine, batch: int, num_tokens: int) -> list[Request]:
    """Requests for `batch` random prompts, each of which decodes exactly num_tokens tokens."""
    prompts = random_prompts(config, engine.info.vocab_size, batch)
    return make_requests(config, prompts, [num_tokens] * batch)

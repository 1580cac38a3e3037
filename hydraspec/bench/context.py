"""bench=context: time per token by batch and context length, without drafts, with fixed numbers of
drafts and, if the method has one, with the number chosen for each step, in turn in one process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, geometric_mean, median

import numpy as np

from hydraspec.bench.benchmark import Benchmark, Column, figure
from hydraspec.bench.passes import STREAM, make_requests
from hydraspec.config.benches import context_tokens, drafts_of
from hydraspec.config.drafts import is_per_step
from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Engine, closing_run
from hydraspec.metrics.files import Json
from hydraspec.metrics.statistics import ratio
from hydraspec.study.blocks import Block
from hydraspec.study.maps import DOES_NOT_FIT, Cell, map_block
from hydraspec.types import Completion, Request

log = logging.getLogger(__name__)

PLAIN, AUTO = "none", "auto"
WARM_UP_TOKENS = 4
CLOCK_TOKENS = 64
OK, STOPPED = "ok", "out of time"  # statuses of a cell, beside DOES_NOT_FIT


class Context(Benchmark):
    """Benchmark of batches whose KV is filled to a context and not read. A row is a cell, a batch
    at a context, with the time per token of every choice of drafts."""

    question = "Where do drafts pay with {}, by batch and context?"
    curves = ()
    heading = "Milliseconds per token by batch and context"
    unit, units = "cell", "cells"
    keys = ("batches", "contexts", "output_tokens", "repeats", "cell_timeout_s")

    def settings(self, config: RunConfig) -> Json:
        """The settings, the names of the choices, of which the last one is compared with the
        others, and the share of requests whose drafts are all rejected."""
        return {
            **super().settings(config),
            "choices": choices_of(config),
            "undraftable": config.method.synthetic_undraftable or 0.0,
        }

    def num_rows(self, config: RunConfig) -> int:
        return len(config.bench.batches) * len(config.bench.contexts)

    def rows(self, config: RunConfig, engine: Engine) -> Iterator[Json]:
        engine.prepare(_shortest_to_longest(config, engine))
        plain = engine.baseline()
        for context in config.bench.contexts:
            for batch in config.bench.batches:
                yield _time_cell(config, engine, plain, batch, context)

    def heavy_requests(self, config: RunConfig, engine: Engine) -> list[Request]:
        num_tokens = min(CLOCK_TOKENS, config.bench.output_tokens)
        return requests_of(
            config, engine, config.bench.batches[-1], config.bench.contexts[0], num_tokens
        )

    def summary_line(self, part: Json) -> str:
        measured = [row for row in part["rows"] if row["ratio_to_none"] is not None]
        if not measured:
            return "no cell was measured"
        worst = {
            key: max(measured, key=lambda row: row[key])
            for key in ("ratio_to_none", "ratio_to_best")
        }
        named = {PLAIN: worst["ratio_to_none"], "the best fixed K": worst["ratio_to_best"]}
        words = [
            f"at most {row[key]:.3f} of {name} ({row['batch']} at once, {row['context']:,} tokens)"
            for (name, row), key in zip(named.items(), worst, strict=True)
        ]
        line = f"time per token with {part['rows'][0]['choice']} {' and '.join(words)}"
        if several := [1 / row["ratio_to_best"] for row in measured if row["batch"] > 1]:
            line += (
                f"; {min(several):.2f} to {max(several):.2f} times the speed of the best fixed K "
                f"with several at once, {geometric_mean(several):.2f} on average"
            )
        return line

    def comparison_line(self, ours: Json, theirs: Json) -> str:
        return "other engines are not measured here"

    def title(self, result: Json) -> str:
        title = f"time per token by batch and context, {result['output_tokens']} tokens out"
        share = result.get("undraftable")
        return f"{title}, {share:.0%} of the requests undraftable" if share else title

    def columns(self, result: Json) -> list[Column]:
        choices = result["choices"]
        return [
            Column("context", lambda row: f"{row['context']:,}"),
            Column("batch", lambda row: [row["batch"]]),
            *(Column(f"{choice}, ms", partial(_time_of, choice), 2) for choice in choices),
            Column(f"{choices[-1]} / none", lambda row: [row["ratio_to_none"]], 3),
            Column(f"{choices[-1]} / best", lambda row: [row["ratio_to_best"]], 3),
            Column("tokens a step", partial(_tokens_per_step, choices[-1]), 2),
            Column("status", lambda row: row["status"]),
        ]

    def lines(self, part: Json) -> list[Json]:
        return list(part["rows"])

    def ratios(self, ours: Json, theirs: Json) -> Json:
        return {}

    def blocks(self, part: Json) -> Iterator[Block]:
        """Yield the maps of the speed over none, and over the best fixed K where it is chosen."""
        choice = part["rows"][0]["choice"]
        note = "Green: faster. The KV cache is filled to the context and not read."
        yield _map(part, f"Speed of {choice} over none", note, "ratio_to_none", lambda row: "")
        if choice == AUTO:
            note = "The best of none and the fixed K that were measured, in hindsight."
            yield _map(part, "Speed of auto over the best", note, "ratio_to_best", _best_name)


def _map(part: Json, title: str, note: str, key: str, named: Callable[[Json], str]) -> Block:
    cells = {}
    for row in part["rows"]:
        speed = ratio(1.0, row[key]) if row[key] else None
        words = [named(row), row["status"] if speed is None else f"{speed:.2f}x"]
        text = " ".join(filter(None, words))
        cells[row["batch"], row["context"]] = Cell(text, speed)
    return map_block(title, note, cells)


def _best_name(row: Json) -> str:
    return row["best_fixed"] or ""


def _tokens_per_step(choice: str, row: Json) -> list[float | None]:
    return [row["tokens_per_step"].get(choice)]


def _time_of(choice: str, row: Json) -> list[float | None]:
    return [row["tpot_ms"].get(choice)]


def choices_of(config: RunConfig) -> list[str]:
    """Names of the choices of drafts that are timed, none first."""
    chosen = [AUTO] if is_per_step(config) else []
    return [PLAIN, *(f"K={k}" for k in drafts_of(config)), *chosen]


def _new_choices(config: RunConfig, engine: Engine, plain: Engine) -> list[Choice]:
    names, drafts = choices_of(config), drafts_of(config)
    is_chosen = names[-1] == AUTO
    forced = {f"K={k}": k for k in drafts} if is_chosen else {}
    return [Choice(name, plain if name == PLAIN else engine, forced.get(name)) for name in names]


@dataclass(slots=True)
class Choice:
    """Passes of one choice of drafts: an engine, and the drafts of each of its steps (None: as the
    engine has them)."""

    name: str
    engine: Engine
    num_drafts: int | None
    tpot_ms: list[float] = field(default_factory=list)  # of the passes so far
    tokens_per_step: list[float] = field(default_factory=list)  # of a request, in each of them

    def run(self, requests: Sequence[Request], num_tokens: int, *, counts: bool = True) -> None:
        """Time decode steps of all the requests together until they have emitted `num_tokens` each
        on average. Not `counts`: a warm-up.

        Raises:
            RuntimeError: a request ended before.
        """
        k = self.num_drafts
        milliseconds, num_emitted, num_parts = 0.0, 0, 0
        drafts = nullcontext() if k is None else self.engine.with_drafts(k)
        with drafts, closing_run(self.engine, requests, None) as events:
            for event in events:
                if isinstance(event, Completion):
                    raise RuntimeError(f"request {event.index} ended: {event.error}")
                if len(event.requests) < len(requests) or event.requests[-1].is_prefill:
                    continue
                milliseconds += event.total_ms
                num_parts += len(requests)
                num_emitted += sum(len(part.output_token_ids) for part in event.requests)
                if num_emitted >= len(requests) * num_tokens:
                    break
        if counts:
            self.tpot_ms.append(milliseconds * len(requests) / num_emitted)
            self.tokens_per_step.append(num_emitted / num_parts)


def _time_cell(config: RunConfig, engine: Engine, plain: Engine, batch: int, context: int) -> Json:
    """The row of a batch at a context: after a short warm-up of each choice they are timed in turn,
    bench.repeats times or as often as bench.cell_timeout_s allows, once at least. Every round has
    the next requests, whose acceptance differs, so choices are compared within rounds."""
    bench, choices = config.bench, _new_choices(config, engine, plain)
    status, started = OK, time.perf_counter()
    num_tokens = bench.output_tokens
    most_tokens = context_tokens(config)
    most = engine.most_at_once(context + most_tokens)
    if most is not None and batch > most:
        status = DOES_NOT_FIT
    else:
        requests = requests_of(config, engine, batch, context, most_tokens)
        for choice in choices:
            choice.run(requests, min(WARM_UP_TOKENS, num_tokens), counts=False)
        for number in range(bench.repeats):
            first = number * batch
            requests = requests_of(config, engine, batch, context, most_tokens, first=first)
            for choice in choices[:: -1 if number % 2 else 1]:
                choice.run(requests, num_tokens)
            if time.perf_counter() - started > bench.cell_timeout_s and number + 1 < bench.repeats:
                status = STOPPED
                break
    rounds = {choice.name: choice.tpot_ms for choice in choices if choice.tpot_ms}
    last = choices[-1].name
    fixed = [name for name in rounds if name != AUTO]
    best = max(fixed, key=lambda name: _by_round(rounds[last], rounds[name]), default=None)
    to_none, to_best = (
        _by_round(rounds[last], rounds[other]) if other in rounds else None
        for other in (PLAIN, best)
    )
    log.info("%d at once, %d tokens: %s", batch, context, status)
    log.info("%s: %s of none, %s of the best", last, figure(to_none, 3), figure(to_best, 3))
    return {
        "batch": batch,
        "context": context,
        "status": status,
        "choice": last,
        "num_rounds": len(choices[0].tpot_ms),
        "tpot_ms": {name: median(times) for name, times in rounds.items()},
        "tokens_per_step": {
            choice.name: fmean(choice.tokens_per_step) if choice.tokens_per_step else None
            for choice in choices
        },
        "best_fixed": best,
        "ratio_to_none": to_none,
        "ratio_to_best": to_best,
    }


def _by_round(times: Sequence[float], others: Sequence[float]) -> float:
    """The median over rounds of times / others."""
    return median(time / other for time, other in zip(times, others, strict=True))


def requests_of(
    config: RunConfig,
    engine: Engine,
    batch: int,
    context: int,
    num_tokens: int,
    *,
    first: int = 0,
) -> list[Request]:
    """Requests from index `first` on, with random prompts of `context` tokens whose KV is filled,
    all but the last row's, each of which decodes exactly num_tokens tokens."""
    rng = np.random.default_rng([config.seed, STREAM, batch, context, first])
    prompts: list[list[int]] = rng.integers(0, engine.info.vocab_size, (batch, context)).tolist()
    requests = make_requests(config, prompts, [num_tokens] * batch, first=first)
    return [replace(request, num_filled=context - 1) for request in requests]


def _shortest_to_longest(config: RunConfig, engine: Engine) -> list[Request]:
    """Requests of the largest batch at the shortest context whose outputs would reach the longest:
    for the costs by which the engine chooses."""
    bench = config.bench
    num_tokens = bench.contexts[-1] - bench.contexts[0] + context_tokens(config)
    return requests_of(config, engine, bench.batches[-1], bench.contexts[0], num_tokens)

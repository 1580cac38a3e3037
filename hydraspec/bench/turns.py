"""bench=turns: conversations whose turns find the turns before in the prefix cache."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from hydraspec.bench.benchmark import Benchmark, Column, Curve, figure
from hydraspec.bench.passes import Passes, make_requests
from hydraspec.bench.serve import summary_of
from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Engine
from hydraspec.metrics.files import Json
from hydraspec.metrics.statistics import ratio
from hydraspec.types import Completion, Request
from hydraspec.workloads.conversations import in_conversations

log = logging.getLogger(__name__)

STREAM, COLD_STREAM = 0x7475726E, 0x636F6C64  # seeds of the prompts' random numbers


def _first_tokens(turns: Sequence[Json]) -> list[tuple[float, float | None]]:
    """Pairs of a turn's number and its mean time to first token in ms."""
    return [(each["turn"], each["ttft"]["mean"]) for each in turns]


class Turns(Benchmark):
    """Benchmark of passes over the same conversations, each from an empty prefix cache; then of
    cold prompts, as long as those of the turns, which find nothing in the cache."""

    question = "How soon does each turn of a conversation begin with {}?"
    curves = (
        Curve(
            title="Time to first token by turn",
            note="Means of the last pass, with the turns before in the prefix cache.",
            x_name="turn",
            y_name="ms",
            points=lambda part: _first_tokens(part["rows"][-1]["turns"]),
        ),
        Curve(
            title="Time to first token, cold",
            note="Prompts as long as those of the turn, with an empty cache.",
            x_name="turn",
            y_name="ms",
            points=lambda part: _first_tokens(part.get("cold") or []),
        ),
    )
    heading = "Time to first token by turn"
    unit, units = "pass", "passes"
    needs_times = True
    keys = ("num_conversations", "num_turns", "turn_tokens", "output_tokens", "repeats")
    engine_keys = ("max_num_seqs", "prefix_caching")

    def num_rows(self, config: RunConfig) -> int:
        return config.bench.repeats

    def rows(self, config: RunConfig, engine: Engine) -> Iterator[Json]:
        requests = requests_of(config, engine)
        for number in range(1, config.bench.repeats + 1):
            yield _time_pass(engine, requests, number)

    def figures(self, config: RunConfig, engine: Engine, rows: Sequence[Json]) -> Json:
        turns = config.bench.cold_turns or range(1, config.bench.num_turns + 1)
        return {"cold": [_cold_turn(config, engine, turn) for turn in turns]}

    def heavy_requests(self, config: RunConfig, engine: Engine) -> list[Request]:
        return [request for request in requests_of(config, engine) if request.after is None]

    def summary_line(self, part: Json) -> str:
        row = part["rows"][-1]
        last = row["turns"][-1]
        cold = [each for each in part.get("cold") or [] if each["turn"] == last["turn"]]
        beside = f", {figure(cold[0]['ttft']['mean'], 0)} ms cold" if cold else ""
        first = figure(last["ttft"]["mean"], 0)
        hits = figure(None if row["hit_rate"] is None else 100 * row["hit_rate"], 1)
        return f"first token of turn {last['turn']} after {first} ms{beside}; prefix hits {hits} %"

    def comparison_line(self, ours: Json, theirs: Json) -> str:
        a, b = (part["rows"][-1]["turns"][-1] for part in (ours, theirs))
        first, other = (figure(each["ttft"]["mean"], 0) for each in (a, b))
        return f"first token of turn {a['turn']} after {first} ms and {other} ms"

    def title(self, result: Json) -> str:
        cached = "" if result["prefix_caching"] else ", no prefix cache"
        return (
            f"{result['num_conversations']} conversations of {result['num_turns']} turns, each of "
            f"{result['turn_tokens']} new tokens and {result['output_tokens']} out{cached}"
        )

    def columns(self, result: Json) -> list[Column]:
        return [
            Column("prompts", lambda line: line["prompts"]),
            *(
                Column(f"turn {turn}, ms", partial(_of_turn, turn), 0, 3)
                for turn in range(1, result["num_turns"] + 1)
            ),
            Column("total, s", partial(_of_pass, "seconds"), 2, 3),
            Column("hits, %", partial(_of_pass, "hit_rate", factor=100), 1),
            Column("of eligible, %", partial(_of_pass, "eligible_hit_rate", factor=100), 1),
            Column("tokens a draft", partial(_of_pass, "acceptance_length"), 2),
        ]

    def lines(self, part: Json) -> list[Json]:
        cold = part.get("cold")
        found = [{"prompts": "turns", **part["rows"][-1]}]
        return [*found, {"prompts": "cold", "turns": cold}] if cold else found

    def ratios(self, ours: Json, theirs: Json) -> Json:
        last = [part["rows"][-1] for part in (ours, theirs)]
        return {
            "seconds": ratio(*(row["seconds"] for row in last)),
            "turns": _ratios(*(row["turns"] for row in last)),
            "cold": _ratios(*(part.get("cold") or [] for part in (ours, theirs))),
        }


def _of_turn(turn: int, line: Json) -> list[float | None]:
    """Mean time to the first token of a turn; None for a turn that was not measured."""
    return [dict(_first_tokens(line["turns"])).get(turn)]


def _of_pass(key: str, line: Json, *, factor: float = 1) -> list[float | None] | str:
    """A figure of a whole pass x `factor`; empty for cold prompts, which have none."""
    if key not in line:
        return ""
    return [None if line[key] is None else factor * line[key]]


def requests_of(config: RunConfig, engine: Engine) -> list[Request]:
    """Turns of conversations in random tokens, equal for every engine; answers are the engine's."""
    bench, rng = config.bench, np.random.default_rng([config.seed, STREAM])
    count = bench.num_conversations * bench.num_turns
    prompts: list[list[int]] = rng.integers(
        0, engine.info.vocab_size, (count, bench.turn_tokens)
    ).tolist()
    requests = make_requests(config, prompts, [bench.output_tokens] * count)
    return in_conversations(requests, bench.num_turns)


def _time_pass(engine: Engine, requests: Sequence[Request], number: int) -> Json:
    passes = Passes(engine, requests)
    passes.run()
    found, hits = passes.figures(), passes.meter.prefix_hits
    places = {request.index: request.turn for request in requests}
    turns = [
        _turn(turn, [done for done in passes.completions if places[done.index] == turn])
        for turn in range(1, max(places.values()) + 1)
    ]
    num_cached = sum(done.num_cached_tokens for done in passes.completions)
    hit_rate = ratio(num_cached, sum(len(done.prompt_token_ids) for done in passes.completions))
    log.info("pass %d: %.2f s, hit rate %.3f", number, found["seconds"], hit_rate or 0.0)
    return {
        "pass": number,
        **found,
        "hit_rate": hit_rate,
        "eligible_hit_rate": None if hits is None else hits.eligible_hit_rate(),
        "num_built": passes.num_built,
        "turns": turns,
    }


def _turn(turn: int, completions: Sequence[Completion]) -> Json:
    """Figures of one turn over all conversations. Answers have the same length in each, and so
    have prompts."""
    num_prompt = sum(len(done.prompt_token_ids) for done in completions)
    return {
        "turn": turn,
        "prompt_tokens": ratio(num_prompt, len(completions)),
        "hit_rate": ratio(sum(done.num_cached_tokens for done in completions), num_prompt),
        "ttft": summary_of([done.ttft_ms for done in completions if done.ttft_ms is not None]),
    }


def _cold_turn(config: RunConfig, engine: Engine, turn: int) -> Json:
    """Figures of random prompts as long as those of `turn`, one for each conversation, offered all
    at once; a run begins with an empty cache."""
    bench, rng = config.bench, np.random.default_rng([config.seed, COLD_STREAM, turn])
    length = turn * bench.turn_tokens + (turn - 1) * bench.output_tokens
    count = bench.num_conversations
    prompts: list[list[int]] = rng.integers(0, engine.info.vocab_size, (count, length)).tolist()
    passes = Passes(engine, make_requests(config, prompts, [1] * count))
    passes.run()
    found = _turn(turn, passes.completions)
    log.info("turn %d cold: %.1f ms to the first token", turn, found["ttft"]["mean"] or 0.0)
    return found


def _ratios(ours: Sequence[Json], theirs: Sequence[Json]) -> Json:
    other = {each["turn"]: each["ttft"]["mean"] for each in theirs}
    found = {str(each["turn"]): (each["ttft"]["mean"], other.get(each["turn"])) for each in ours}
    return {turn: ratio(a, b) for turn, (a, b) in found.items() if a is not None and b is not None}

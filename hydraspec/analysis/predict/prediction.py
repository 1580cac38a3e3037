"""Predicted speedups, filled in K by K as engines are measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hydraspec.analysis.predict.auto import auto_steps, gain, with_plain
from hydraspec.analysis.predict.measure import (
    Answers,
    Costs,
    Filled,
    interleaved,
    joined,
    new_times,
    read_answers,
    run_loads,
    warm_up,
)
from hydraspec.analysis.predict.model import (
    Acceptance,
    Load,
    Speed,
    Steps,
    assumed_acceptance,
    break_even,
    constant_rate,
    equal_steps,
    simulate,
)
from hydraspec.config.schema import RunConfig, Verification
from hydraspec.engine.base import Engine
from hydraspec.engine.costs import CostTable, StepTimes
from hydraspec.errors import WorkloadError
from hydraspec.metrics.assessment import as_interval
from hydraspec.metrics.files import Json
from hydraspec.metrics.formats import KEY, recorded
from hydraspec.metrics.meter import cost_ratio, finished_pairs, speedup
from hydraspec.metrics.paired import balanced
from hydraspec.types import Request
from hydraspec.workloads import generated
from hydraspec.workloads.reading import Workload

SCHEMA_VERSION = 1
LEAST_REQUESTS = 32  # of a load, where the workload has them; more where more run at once
LEAST_PART = 4  # requests of a load that are offered at once
ROUNDS = 4  # of timed steps; half of them after the measurement, where there is one
NOTHING_DECODED = "workload: no request has a second token, so nothing is decoded"


@dataclass(slots=True, frozen=True, kw_only=True)
class Wanted:
    """The numbers of drafts and the loads that a prediction is asked for."""

    drafts: Sequence[int]  # K
    concurrencies: Sequence[int]
    rates: Sequence[float] | None = None  # assumed conditional acceptance; None: measured
    waves: int = 2  # of requests that follow each other in a load; 1: all of a load begin together
    contexts: Sequence[int] = ()  # also measured at, in filled caches
    check: bool = False  # run the loads too, and put the measured speedups beside

    def num_requests(self, concurrency: int) -> int:
        """Number of requests of a load, which has two parts at least."""
        return max(LEAST_REQUESTS, 2 * self.waves * concurrency)

    def part(self, concurrency: int) -> int:
        """Number of requests of one part of a load, which are offered at once."""
        return max(LEAST_PART, self.waves * concurrency)


@dataclass(slots=True, kw_only=True)
class Prediction:
    """The answers that predictions stand on, and the predictions so far.

    Attributes:
        acceptance: acceptance measured on the answers, or assumed.
        facts: facts of the engine in predict.json.
        notes: warnings, such as on disturbed measurements.
        rows: rows of the table so far, one by K and concurrency.
        drafter_times: timed steps with drafts, of all K.
        plain_times: timed steps of the baseline beside them.
        drafter_filled, plain_filled: the same by context, in filled caches.
        cells: speedups by K, context and requests at once, see `map_cells`.
        prompt_row_ms: milliseconds of a prompt's token, of the last K that was measured.
        beside: the baseline's costs beside each K.
    """

    config: RunConfig
    wanted: Wanted
    say: Callable[[str], None]
    answers: Answers
    acceptance: Acceptance
    facts: Json
    notes: list[str]
    rows: list[Json] = field(default_factory=list)
    drafter_times: StepTimes
    plain_times: StepTimes
    drafter_filled: Filled = field(default_factory=dict)
    plain_filled: Filled = field(default_factory=dict)
    cells: list[Json] = field(default_factory=list)
    prompt_row_ms: float = 0.0
    beside: dict[int, CostTable] = field(default_factory=dict)

    @classmethod
    def begin(
        cls,
        config: RunConfig,
        wanted: Wanted,
        engine: Engine,
        workload: Workload | None,
        say: Callable[[str], None],
    ) -> Prediction:
        """Answer the workload's requests once, with the engine of the largest K."""
        most, drafts = max(wanted.concurrencies), max(wanted.drafts)
        requests = _requests(config, engine, workload, wanted.num_requests(most))
        say(f"{len(requests)} requests are answered with K={drafts}")
        warm_up(engine, requests, most)
        answers = read_answers(engine, requests, concurrency=most)
        count, notes = len(answers.requests), []
        if not count:
            raise WorkloadError("workload: no request could be answered; see their errors in a run")
        if count < most:
            notes.append(
                f"the workload has fewer requests ({count}) than run at once: predictions for a "
                f"higher concurrency are of at most {count} at once"
            )
        acceptance = answers.acceptance
        is_real = config.method.verification is not Verification.synthetic
        if workload is None and is_real and wanted.rates is None:
            source = f"workload={config.workload.name}"
            notes.append(generated.random_text_warning(source, generated.REAL_TEXT))
        if wanted.rates is not None:
            acceptance = assumed_acceptance(wanted.rates, drafts, count)
        assert acceptance is not None, "method=none is not predicted"
        info = engine.info
        return cls(
            config=config,
            wanted=wanted,
            say=say,
            answers=answers,
            acceptance=acceptance,
            facts={
                "target": info.target,
                "method": info.method,
                "device": info.devices[0] if info.devices else info.device,
                "dtype": info.dtype,
                KEY: recorded(info.quantization, info.draft_spec),
            },
            notes=notes,
            drafter_times=Costs(engine).times,
            plain_times=Costs(engine).times,
        )

    @property
    def batches(self) -> list[int]:
        """Batch sizes of the steps that are timed."""
        return sorted({1, *self.wanted.concurrencies})

    def add(self, engine: Engine, plain: Engine) -> None:
        """Measure an engine beside its baseline and predict every concurrency; with `check`, loads
        run in between, so that costs and speedups are of the same time."""
        num_drafts, batches = engine.info.num_speculative_tokens, self.batches
        self.say(f"K={num_drafts}: steps are timed, {', '.join(map(str, batches))} at once")
        contexts = self.wanted.contexts
        slow, fast = costs = Costs(plain), Costs(engine, self.drafter_times, self.drafter_filled)
        for each in (plain, engine):
            warm_up(each, self.answers.requests, batches[-1])
            Costs(each).measure(self.answers, batches[-1])  # not kept: what runs first is slow
        measured: dict[int, Json] = {}
        if self.wanted.check:
            interleaved(costs, self.answers, batches, ROUNDS // 2, contexts)
            measured = {c: self._run(engine, plain, c) for c in self.wanted.concurrencies}
        rounds = ROUNDS - (ROUNDS // 2 if measured else 0)
        interleaved(costs, self.answers, batches, rounds, contexts)
        fast.split(self.answers, batches)
        self.prompt_row_ms = fast.ms_per_prompt_row(batches)
        self.beside[num_drafts] = slow.table(batches, self.answers.mean_context)
        self._keep_plain(slow)
        self.cells += map_cells(fast, slow, self.acceptance, contexts, self.wanted.concurrencies)
        for concurrency in self.wanted.concurrencies:
            row = self._row(fast, slow, concurrency)
            if (run := measured.get(concurrency)) is not None:
                row |= {"measured": run, "error": row["speedup"] / run["speedup"]["mean"] - 1}
            self.rows.append(row)

    def _keep_plain(self, slow: Costs) -> None:
        """Keep the baseline's timed steps of this K with those of the others."""
        kept = [(self.plain_times, slow.times)]
        for context, times in slow.filled.items():
            kept.append((self.plain_filled.setdefault(context, new_times()), times))
        for every, times in kept:
            for size, found in times.step_ms.items():
                every.step_ms[size] += found

    def _run(self, engine: Engine, plain: Engine, concurrency: int) -> Json:
        """Measured speedup and acceptance length of a load, both engines in turn part by part."""
        requests, parts = self._parts(concurrency)
        where = f"K={engine.info.num_speculative_tokens}"
        before = engine.num_built() + plain.num_built()
        fast, slow = run_loads((engine, plain), requests, parts, concurrency=concurrency)
        if engine.num_built() + plain.num_built() != before:
            self.notes.append(
                f"{where} at concurrency {concurrency}: kernels were compiled or graphs captured "
                "while it was measured; run it again"
            )
        costs = cost_ratio(fast, slow)
        gained = speedup(finished_pairs(fast, slow), at_once=concurrency, costs=costs)
        if gained.ratio is None:
            raise WorkloadError(NOTHING_DECODED)
        self.say(f"{where}, {concurrency} at once: {gained.ratio:.2f}x")
        return {
            "speedup": as_interval(gained),
            "acceptance_length": fast.acceptance_length().mean,
        }

    def _parts(self, concurrency: int) -> tuple[Sequence[Request], list[tuple[int, int]]]:
        """The requests of a load, and the bounds (first, end) of its parts."""
        requests = self.answers.requests[: self.wanted.num_requests(concurrency)]
        count, size = len(requests), self.wanted.part(concurrency)
        return requests, [(first, min(count, first + size)) for first in range(0, count, size)]

    def _row(self, fast: Costs, slow: Costs, concurrency: int) -> Json:
        num_drafts = fast.num_drafts
        context = self.answers.mean_context
        method, plain = (each.table(self.batches, context) for each in (fast, slow))
        with_drafts, without = (
            self._speed(
                equal_steps(table, costs.num_drafts),
                concurrency,
                costs.ms_per_prompt_row(self.batches),
                num_drafts=costs.num_drafts,
            )
            for table, costs in ((method, fast), (plain, slow))
        )
        if not without.num_tokens:
            raise WorkloadError(NOTHING_DECODED)
        needed = break_even(method, plain, concurrency, num_drafts, context)
        cost = method.at(concurrency, num_drafts, context)
        return {
            "num_speculative_tokens": num_drafts,
            "concurrency": concurrency,
            "acceptance_length": self.acceptance.length(num_drafts),
            "speedup": with_drafts.tokens_per_second / without.tokens_per_second,
            "break_even_acceptance_length": needed,
            "break_even_acceptance_rate": constant_rate(needed, num_drafts),
            "step_ms": cost.step_ms,
            "draft_ms": cost.draft_ms,
            "verify_ms": cost.verify_ms,
            "plain_step_ms": plain.at(concurrency, 0, context).step_ms,
            "measured": None,
            "error": None,
        }

    def _speed(
        self, steps: Steps, concurrency: int, ms_per_prompt_row: float, *, num_drafts: int
    ) -> Speed:
        requests, parts = self._parts(concurrency)
        ended = [self.answers.completions[request.index] for request in requests]
        load = Load(
            prompts=[len(c.prompt_token_ids) - c.num_cached_tokens for c in ended],
            cached=[c.num_cached_tokens for c in ended],
            outputs=[len(c.output_token_ids) for c in ended],
            concurrency=concurrency,
            parts=parts,
        )
        return simulate(
            load,
            steps,
            ms_per_prompt_row=ms_per_prompt_row,
            acceptance=self.acceptance if num_drafts else None,
            max_rows=self.config.engine.max_num_batched_tokens,
        )

    def _auto(self, method: CostTable, plain: CostTable) -> list[Json]:
        """Speedups with the drafts of each request chosen among those that were measured, by
        concurrency and then by cell of the map: those of the best K, or of none, times what that
        gains over it."""
        costs, survival = with_plain(method, plain, self.beside), self.acceptance.survival
        most, found = costs.drafts[-1], list[Json]()
        for concurrency in self.wanted.concurrencies:
            fixed = _best(self.rows, concurrency)
            k = fixed["num_speculative_tokens"]
            chosen, equal = (
                self._speed(steps, concurrency, self.prompt_row_ms, num_drafts=drafts)
                for steps, drafts in (
                    (auto_steps(costs, survival, costs.drafts), most),
                    (equal_steps(costs, k), k),
                )
            )
            ratio = fixed["speedup"] * chosen.tokens_per_second / equal.tokens_per_second
            found.append({"concurrency": concurrency, "context": None, "speedup": ratio})
        best: dict[tuple[int, int], float] = {}
        for cell in self.cells:
            place = cell["concurrency"], cell["context"]
            best[place] = max(best.get(place, 1.0), cell["speedup"])
        for (batch, context), ratio in best.items():
            ratio *= gain(costs, survival, batch, context)
            found.append({"concurrency": batch, "context": context, "speedup": ratio})
        return found

    def as_json(self) -> Json:
        """The content of predict.json; see docs/outputs/predict.md."""
        order = ("concurrency", "num_speculative_tokens")
        rows = sorted(self.rows, key=lambda row: [row[key] for key in order])
        errors = [abs(row["error"]) for row in rows if row["error"] is not None]
        drafts = sorted({row["num_speculative_tokens"] for row in rows})
        own = {KEY: self.facts[KEY]}
        method = self._table(self.drafter_times, self.drafter_filled, drafts)
        plain = self._table(self.plain_times, self.plain_filled, [0])
        return {
            "schema_version": SCHEMA_VERSION,
            **self.facts,
            "num_requests": len(self.answers.requests),
            "acceptance": {
                "source": "measured" if self.wanted.rates is None else "assumed",
                "num_speculative_tokens": self.acceptance.most_drafts,
                "conditional_rate_per_position": self.acceptance.conditional(),
            },
            "predictions": rows,
            "best": [_best(rows, c) for c in self.wanted.concurrencies],
            "map": self.cells,
            "auto": self._auto(method, plain),
            "warnings": [*self.notes, *_losing(rows)],
            "mean_absolute_error": sum(errors) / len(errors) if errors else None,
            "costs": {
                "method": method.as_json() | own,
                "plain": plain.as_json() | own,
            },
        }

    def _table(self, own: StepTimes, filled: Filled, drafts: Sequence[int]) -> CostTable:
        return joined(own, filled, self.answers.mean_context, self.batches, drafts)


def map_cells(
    fast: Costs,
    slow: Costs,
    acceptance: Acceptance,
    contexts: Sequence[int],
    concurrencies: Sequence[int],
) -> list[Json]:
    """Speedup of a K at every measured context and batch: acceptance length over the ratio of the
    steps' times, in which all requests decode. Without cells whose KV does not fit."""
    num_drafts, length = fast.num_drafts, acceptance.length(fast.num_drafts)
    return [
        {
            "context": context,
            "concurrency": batch,
            "num_speculative_tokens": num_drafts,
            "step_ms": (step_ms := fast.filled[context].typical(timed)),
            "plain_step_ms": (plain_ms := slow.filled[context].typical(plain)),
            "speedup": length * plain_ms / step_ms,
        }
        for context in contexts
        for batch in concurrencies
        if context in fast.filled
        and (timed := fast.filled[context].step_ms.get((batch, num_drafts)))
        and (plain := slow.filled[context].step_ms.get((batch, 0)))
    ]


def _requests(
    config: RunConfig, engine: Engine, workload: Workload | None, count: int
) -> list[Request]:
    """Tokenised first turns of the workload, with categories mixed: at most `count`, or all of them
    with workload.limit."""
    if workload is None:
        workload = generated.random_requests(config, engine.info.vocab_size)
    workload.check_vocabulary(engine.info.vocab_size)
    engine.tokenize(workload.requests)
    firsts = [replace(r, arrival_s=None) for r in workload.requests if r.after is None]
    mixed = [firsts[i] for i in balanced([r.category for r in firsts])]
    return mixed if config.workload.limit else mixed[:count]


def _best(rows: Sequence[Json], concurrency: int) -> Json:
    """The K with the highest predicted speedup at a concurrency; 0 where none is above 1."""
    best = max(
        (row for row in rows if row["concurrency"] == concurrency), key=lambda row: row["speedup"]
    )
    wins = best["speedup"] > 1
    return {
        "concurrency": concurrency,
        "num_speculative_tokens": best["num_speculative_tokens"] if wins else 0,
        "speedup": best["speedup"] if wins else 1.0,
    }


def _losing(rows: Sequence[Json]) -> list[str]:
    return [
        f"K={row['num_speculative_tokens']} at concurrency {row['concurrency']} is predicted to be "
        f"slower than no drafts: {row['speedup']:.2f}x at acceptance length "
        f"{row['acceptance_length']:.2f}, since a step takes as long as "
        f"{row['break_even_acceptance_length']:.2f} without drafts"
        for row in rows
        if row["speedup"] < 1
    ]

"""What is to be predicted, and a prediction as its engines are loaded one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hydraspec.analysis.predict.measure import (
    Costs,
    Texts,
    interleaved,
    read_texts,
    run_loads,
    warm_up,
)
from hydraspec.analysis.predict.model import (
    Acceptance,
    Load,
    Speed,
    assumed_acceptance,
    break_even,
    constant_rate,
    simulate,
)
from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Engine
from hydraspec.engine.costs import CostTable, averaged, merged
from hydraspec.errors import WorkloadError
from hydraspec.metrics.assessment import as_interval
from hydraspec.metrics.files import Json
from hydraspec.metrics.meter import finished_pairs, speedup
from hydraspec.metrics.paired import balanced
from hydraspec.types import Request
from hydraspec.workloads import generated
from hydraspec.workloads.reading import Workload

SCHEMA_VERSION = 1
LEAST_REQUESTS = 32  # of a load, where the workload has them; more where more run at once
LEAST_PART = 4  # requests of a load that are offered at once
ROUNDS = 4  # of timed steps; half of them after the measurement, where there is one


@dataclass(slots=True, frozen=True, kw_only=True)
class Wanted:
    """What is to be predicted."""

    drafts: Sequence[int]  # K
    concurrencies: Sequence[int]
    rates: Sequence[float] | None = None  # assumed conditional acceptance; None: measured
    waves: int = 2  # of requests that follow each other in a load; 1: all of a load begin together
    check: bool = False  # run the loads too, and put the measured speedups beside

    def num_requests(self, concurrency: int) -> int:
        """Requests of a load: of two parts at least."""
        return max(LEAST_REQUESTS, 2 * self.waves * concurrency)

    def part(self, concurrency: int) -> int:
        """Requests of it that are offered at once."""
        return max(LEAST_PART, self.waves * concurrency)


@dataclass(slots=True, frozen=True)
class _Measured:
    """The step costs of one engine."""

    table: CostTable
    ms_per_prompt_row: float


class Prediction:
    """Rows of the table, as engines are measured one after another."""

    def __init__(
        self,
        config: RunConfig,
        wanted: Wanted,
        workload: Workload | None,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._wanted, self._workload, self._say = config, wanted, workload, say
        self.texts: Texts | None = None
        self._acceptance: Acceptance | None = None
        # By K: the method's costs, and those of the baseline beside it.
        self._measured: dict[int, tuple[_Measured, _Measured]] = {}
        self._rows: list[Json] = []
        self._facts: Json = {}
        self._notes: list[str] = []  # of what disturbed a measurement

    # ------------------------------------------------------------------ measure

    def read(self, engine: Engine) -> None:
        """Answer the workload's requests once, with the most drafts."""
        most = max(self._wanted.concurrencies)
        count = self._wanted.num_requests(most)
        requests = _requests(self._config, engine, self._workload, count)
        self._say(f"{len(requests)} requests are answered with K={max(self._wanted.drafts)}")
        warm_up(engine, requests, most)
        self.texts = read_texts(engine, requests, concurrency=most)
        if not self.texts.requests:
            raise WorkloadError("workload: no request could be answered; see their errors in a run")
        if (count := len(self.texts.requests)) < most:
            self._notes.append(
                f"the workload has fewer requests ({count}) than run at once: predictions for a "
                f"higher concurrency are of at most {count} at once"
            )
        self._acceptance = self.texts.acceptance
        if self._wanted.rates is not None:
            drafts = max(self._wanted.drafts)
            self._acceptance = assumed_acceptance(self._wanted.rates, drafts, count)
        self._facts = {
            "target": engine.info.target,
            "method": engine.info.method,
            "device": engine.info.devices[0] if engine.info.devices else engine.info.device,
            "dtype": engine.info.dtype,
        }

    def add(self, engine: Engine, plain: Engine) -> None:
        """Measure an engine beside its baseline and predict every concurrency; with `check` the
        loads run in between, so that costs and speedups are of the same time."""
        assert self.texts is not None
        num_drafts = engine.info.num_speculative_tokens
        batches = sorted({1, *self._wanted.concurrencies})
        self._say(f"K={num_drafts}: steps are timed, {', '.join(map(str, batches))} at once")
        costs = (Costs(plain), Costs(engine))
        for each in (plain, engine):
            warm_up(each, self.texts.requests, batches[-1])
            Costs(each).measure(self.texts, batches[-1])  # not kept: what runs first is slow
        found: dict[int, Json] = {}
        if self._wanted.check:
            interleaved(costs, self.texts, batches, ROUNDS // 2)
            found = {c: self._run(engine, plain, c) for c in self._wanted.concurrencies}
        interleaved(costs, self.texts, batches, ROUNDS - (ROUNDS // 2 if found else 0))
        costs[1].split(self.texts)
        slow, fast = (_Measured(each.table(), each.ms_per_prompt_row()) for each in costs)
        self._measured[num_drafts] = (fast, slow)
        for concurrency in self._wanted.concurrencies:
            row = self._row(num_drafts, concurrency)
            if (run := found.get(concurrency)) is not None:
                row["measured"] = run
                row["error"] = row["speedup"] / run["speedup"]["mean"] - 1
            self._rows.append(row)

    def _run(self, engine: Engine, plain: Engine, concurrency: int) -> Json:
        """The speedup of a load as a run measures it, both sides in turn part by part."""
        requests, parts = self._parts(concurrency)
        before = engine.num_built() + plain.num_built()
        fast, slow = run_loads((engine, plain), requests, parts, concurrency=concurrency)
        if engine.num_built() + plain.num_built() != before:
            self._notes.append(
                f"K={engine.info.num_speculative_tokens} at concurrency {concurrency}: kernels "
                "were compiled or graphs captured while it was measured; run it again"
            )
        gained = speedup(finished_pairs(fast, slow), at_once=concurrency)
        if gained.ratio is None:
            raise WorkloadError("workload: no request has a second token, so nothing is decoded")
        self._say(
            f"K={engine.info.num_speculative_tokens}, {concurrency} at once: {gained.ratio:.2f}x"
        )
        return {
            "speedup": as_interval(gained),
            "acceptance_length": fast.acceptance_length().mean,
        }

    # ------------------------------------------------------------------ predict

    def _parts(self, concurrency: int) -> tuple[Sequence[Request], list[tuple[int, int]]]:
        """The requests of a load, and the bounds of its parts."""
        assert self.texts is not None
        requests = self.texts.requests[: self._wanted.num_requests(concurrency)]
        count, size = len(requests), self._wanted.part(concurrency)
        return requests, [(first, min(count, first + size)) for first in range(0, count, size)]

    def _load(self, concurrency: int) -> Load:
        assert self.texts is not None
        requests, parts = self._parts(concurrency)
        ended = [self.texts.completions[request.index] for request in requests]
        return Load(
            prompts=[len(c.prompt_token_ids) - c.num_cached_tokens for c in ended],
            outputs=[len(c.output_token_ids) for c in ended],
            concurrency=concurrency,
            parts=parts,
        )

    def _row(self, num_drafts: int, concurrency: int) -> Json:
        acceptance = self._acceptance
        assert acceptance is not None
        method, plain = self._measured[num_drafts]
        load = self._load(concurrency)
        fast = self._speed(load, method, num_drafts)
        slow = self._speed(load, plain, 0)
        if not slow.num_tokens:
            raise WorkloadError("workload: no request has a second token, so nothing is decoded")
        needed = break_even(method.table, plain.table, concurrency, num_drafts)
        cost = method.table.at(concurrency, num_drafts)
        return {
            "num_speculative_tokens": num_drafts,
            "concurrency": concurrency,
            "acceptance_length": acceptance.length(num_drafts),
            "speedup": fast.tokens_per_second / slow.tokens_per_second,
            "break_even_acceptance_length": needed,
            "break_even_acceptance_rate": constant_rate(needed, num_drafts),
            "step_ms": cost.step_ms,
            "draft_ms": cost.draft_ms,
            "verify_ms": cost.verify_ms,
            "plain_step_ms": plain.table.at(concurrency, 0).step_ms,
            "measured": None,
            "error": None,
        }

    def _speed(self, load: Load, costs: _Measured, num_drafts: int) -> Speed:
        return simulate(
            load,
            costs.table,
            num_drafts,
            ms_per_prompt_row=costs.ms_per_prompt_row,
            acceptance=self._acceptance if num_drafts else None,
            max_rows=self._config.engine.max_num_batched_tokens,
        )

    # ------------------------------------------------------------------ predict.json

    def as_json(self) -> Json:
        """The content of predict.json; see docs/outputs/predict.md."""
        acceptance, texts = self._acceptance, self.texts
        assert acceptance is not None
        assert texts is not None
        rows = sorted(
            self._rows, key=lambda row: (row["concurrency"], row["num_speculative_tokens"])
        )
        measured = [self._measured[k] for k in sorted(self._measured)]
        errors = [abs(row["error"]) for row in rows if row["error"] is not None]
        return {
            "schema_version": SCHEMA_VERSION,
            **self._facts,
            "num_requests": len(texts.requests),
            "acceptance": {
                "source": "measured" if self._wanted.rates is None else "assumed",
                "num_speculative_tokens": acceptance.most_drafts,
                "conditional_rate_per_position": acceptance.conditional(),
            },
            "predictions": rows,
            "best": [_best(rows, c) for c in self._wanted.concurrencies],
            "warnings": [*self._notes, *_losing(rows)],
            "mean_absolute_error": sum(errors) / len(errors) if errors else None,
            "costs": {
                "method": merged([fast.table for fast, _ in measured]).as_json(),
                "plain": averaged([slow.table for _, slow in measured]).as_json(),
            },
        }


def _requests(
    config: RunConfig, engine: Engine, workload: Workload | None, count: int
) -> list[Request]:
    """`count` tokenised first turns of the workload, fewer where it has fewer, with categories
    mixed; all that workload.limit names."""
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

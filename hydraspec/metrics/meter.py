"""Counts what an engine reports, and defines every metric once, in the docstring of its method;
percentiles of latencies and goodput are in latency.py.

The meter turns StepRecords and Completions into numbers, and knows no engine, config or file.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from hydraspec.metrics.counters import RequestCounters, RunningTotals, StepSums
from hydraspec.metrics.paired import SPEEDUP, PairedRatio, balanced, costed_ratio, paired_ratio
from hydraspec.metrics.prefix_cache import PrefixHits
from hydraspec.metrics.statistics import Estimate, ratio, ratio_of_sums
from hydraspec.metrics.step_blocks import StepBlocks
from hydraspec.metrics.step_costs import CostRatio, fit
from hydraspec.metrics.survival import DraftSurvival, reliability
from hydraspec.types import IMAGE, Completion, PrefixCaching, Request, StepRecord


class Meter:
    """All counts of one pass over a workload with one engine.

    Every metric is over the requests that completed; in an interrupted run the others are left
    out, so that counts, speeds and requests.jsonl speak of the same requests. Only `steps`,
    `blocks` and `totals` are over all steps.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        *,
        num_speculative_tokens: int = 0,
        prefix_caching: PrefixCaching | None = None,
    ) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.prefix_hits = None if prefix_caching is None else PrefixHits(prefix_caching)
        self.counters = {
            r.index: RequestCounters(index=r.index, category=r.category, turn=r.turn)
            for r in requests
        }
        self.totals = RunningTotals()
        self.steps = StepSums()
        self.blocks = StepBlocks()

    def begin_run(self) -> None:
        """Record that the engine begins a run, with an empty prefix cache."""
        self.blocks.begin_run()
        if self.prefix_hits is not None:
            self.prefix_hits.begin_run()

    def add_step(self, record: StepRecord) -> None:
        """Count a step. Its wall time goes to the requests in it in proportion to their rows."""
        total_ms = self.steps.add(record)
        self.blocks.add(record, total_ms)
        num_rows = sum(step.num_rows for step in record.requests)
        ms_per_row = total_ms / num_rows if num_rows else 0.0
        for step in record.requests:
            self.counters[step.index].add(step, ms_per_row, self.totals)
        self.first_steps(step.index for step in record.requests)

    def first_steps(self, indices: Iterable[int]) -> None:
        """Record that requests have a step; each looks into the prefix cache in its first one."""
        if self.prefix_hits is not None:
            for index in indices:
                self.prefix_hits.begun(index)

    def add_completion(self, completion: Completion) -> None:
        """Count the output of a request that ended, and the times its user waited."""
        counters = self.counters[completion.index]
        counters.finish_reason = completion.finish_reason
        counters.num_output_tokens = len(completion.output_token_ids)
        images = (span for span in completion.spans if span.kind == IMAGE)
        counters.num_image_tokens = sum(span.length for span in images)
        counters.ttft_ms, counters.latency_ms = completion.ttft_ms, completion.latency_ms
        if self.prefix_hits is not None:
            self.prefix_hits.ended(completion)
        counters.queue_ms = completion.queue_ms
        counters.inter_token_ms = array("f", completion.inter_token_ms)

    @property
    def completed(self) -> list[RequestCounters]:
        """Requests that ended, errors included, in workload order."""
        ended = [c for c in self.counters.values() if c.finish_reason is not None]
        return sorted(ended, key=lambda counters: counters.index)

    def completed_by_category(self) -> dict[str, list[RequestCounters]]:
        """`completed` requests that have a category, by category in order of first appearance."""
        groups: dict[str, list[RequestCounters]] = {}
        for counters in self.completed:
            if counters.category is not None:
                groups.setdefault(counters.category, []).append(counters)
        return groups

    # ------------------------------------------------------------------ acceptance

    def num_output_tokens(self) -> int:
        """Tokens that users received: every output token of every completed request."""
        return sum(c.num_output_tokens for c in self.completed)

    def num_image_tokens(self) -> int:
        """Prompt tokens of completed requests that stand for pictures."""
        return sum(c.num_image_tokens for c in self.completed)

    def num_drafts(self) -> int:
        """Verifications: (request, step) pairs that verified at least one draft token."""
        return sum(c.num_drafts for c in self.completed)

    def num_draft_tokens(self) -> int:
        """Draft tokens that were verified; drafts that no step verified do not count."""
        return sum(c.num_draft_tokens for c in self.completed)

    def num_accepted_tokens(self) -> int:
        """Draft tokens the verifier accepted, also where a stop or a limit then cut them."""
        return sum(c.num_accepted_tokens for c in self.completed)

    def num_jump_forward_tokens(self) -> int:
        """Accepted tokens that a grammar decided in the drafter's place. They are in none of the
        other counts of drafts, and in no acceptance rate or length."""
        return sum(c.num_jump_forward_tokens for c in self.completed)

    def acceptance_length(self) -> Estimate:
        """1 + num_accepted_tokens / num_drafts: tokens per verification, the bonus one included.

        It lies in [1, K+1]; steps without drafts do not count. The interval is a bootstrap over
        requests.
        """
        return acceptance_length(self.completed)

    def acceptance_length_over_requests(self) -> float | None:
        """Mean over the requests with drafts of 1 + accepted tokens / drafts of each.

        Every request weighs the same here; in `acceptance_length` every verification does, so that
        long outputs weigh more.
        """
        lengths = self.acceptance_lengths()
        return ratio(sum(lengths), len(lengths))

    def acceptance_lengths(self) -> list[float]:
        """1 + accepted tokens / drafts of each request that has drafts, in workload order."""
        return [1 + c.num_accepted_tokens / c.num_drafts for c in self.completed if c.num_drafts]

    def num_drafts_by_category(self) -> dict[str, int]:
        """`num_drafts` of the requests of each category, in order of first appearance."""
        groups = self.completed_by_category()
        return {name: sum(c.num_drafts for c in members) for name, members in groups.items()}

    def num_reached_per_position(self) -> list[int]:
        """Steps that offered a draft token at i and accepted the one before, i in 0..K-1: the
        denominators of the conditional acceptance rates."""
        return self._per_position("reached_per_position")

    def acceptance_length_by_category(self) -> dict[str, float | None]:
        """`acceptance_length` of the requests of each category, in order of first appearance."""
        groups = self.completed_by_category()
        return {name: acceptance_length(members).mean for name, members in groups.items()}

    def acceptance_rate(self) -> float | None:
        """Share of draft tokens that were accepted: num_accepted_tokens / num_draft_tokens."""
        return ratio(self.num_accepted_tokens(), self.num_draft_tokens())

    def acceptance_rate_per_position(self) -> list[float | None]:
        """Acceptance rates of the positions: accepted at i / num_drafts, i in 0..K-1.

        With a constant K they sum to acceptance_length.mean - 1 and never increase with i. Drafts
        shorter than i count in the denominator, so late positions of trimmed drafts are
        understated; conditional rates are not. Where the engine chooses K per step, the
        denominator counts the drafts that have a token at i.
        """
        accepted = self._per_position("accepted_per_position")
        drafts = [self.num_drafts()] * len(accepted)
        if self.steps.draft_lengths:
            drafts = self._per_position("drafted_per_position")
        return [ratio(a, n) for a, n in zip(accepted, drafts, strict=True)]

    def conditional_acceptance_rate_per_position(self) -> list[float | None]:
        """Conditional acceptance rates: accepted at i / (offered at i and accepted at i-1)."""
        accepted = self._per_position("accepted_per_position")
        reached = self._per_position("reached_per_position")
        return [ratio(a, r) for a, r in zip(accepted, reached, strict=True)]

    def draft_survival(self) -> DraftSurvival | None:
        """Verified drafts by the drafter's estimate of their survival, that they and those before
        them are accepted, with the share accepted in each bin; None without estimates."""
        return reliability(c.survival_bins for c in self.completed)

    # ------------------------------------------------------------------ cache

    def num_recomputed_tokens(self) -> int:
        """Tokens whose KV was computed a second time: those of preempted requests that they had to
        read again, and prompt tokens that the cache should have had (PrefixHits.num_missed_tokens).
        """
        again = sum(c.num_recomputed_tokens for c in self.completed)
        return again + (0 if self.prefix_hits is None else self.prefix_hits.num_missed_tokens())

    # ------------------------------------------------------------------ speed

    def output_tokens_per_second(self) -> float | None:
        """Decode throughput: tokens emitted by decode steps / their wall time, over all requests.

        A step's wall time is split over the requests in it by rows (their drafts are rows too)
        and a request's prefill rows are left out. With several requests in a step their tokens
        share its time, so concurrency counts.
        """
        return self.throughput().mean

    def throughput(self) -> Estimate:
        """`output_tokens_per_second` with its interval: bootstrap over requests."""
        return ratio_of_sums(
            [1000 * c.decode_tokens for c in self.completed],
            [c.decode_ms for c in self.completed],
        )

    def time_per_output_token_ms(self) -> float | None:
        """Time that one user waits per token after the first: Σ (latency - time to first token) /
        Σ (tokens - 1).
        """
        streams = [
            (c.latency_ms - c.ttft_ms, max(0, c.num_output_tokens - 1))
            for c in self.completed
            if c.ttft_ms is not None
        ]
        return ratio(sum(waited for waited, _ in streams), sum(tokens for _, tokens in streams))

    def time_to_first_token_ms(self) -> float | None:
        """Mean over requests of the time from being offered to the engine to the first token."""
        waits = [c.ttft_ms for c in self.completed if c.ttft_ms is not None]
        return ratio(sum(waits), len(waits))

    # ------------------------------------------------------------------ helpers

    def _per_position(self, name: str) -> list[int]:
        rows: list[list[int]] = [getattr(c, name) for c in self.completed]
        width = max([self.num_speculative_tokens, *map(len, rows)])
        sums = np.zeros(width, dtype=np.int64)
        for row in rows:
            sums[: len(row)] += np.asarray(row, dtype=np.int64)
        return [int(n) for n in sums]


def acceptance_length(members: Sequence[RequestCounters]) -> Estimate:
    """`Meter.acceptance_length` of some requests."""
    accepted = [c.num_accepted_tokens for c in members]
    return ratio_of_sums(accepted, [c.num_drafts for c in members], offset=1.0)


Pair = tuple[RequestCounters, RequestCounters]


def finished_pairs(method: Meter, baseline: Meter) -> list[Pair]:
    """Counters (method, baseline) of the requests that both sides finished, in workload order."""
    other = {c.index: c for c in baseline.completed if c.finished}
    return [(c, other[c.index]) for c in method.completed if c.finished and c.index in other]


def cost_ratio(method: Meter, baseline: Meter, *, at_once: int | None = None) -> CostRatio | None:
    """The cost of the baseline's steps / the cost of the method's, of full steps where requests
    queue up for `at_once` places (`fit`) and K is fixed: a chosen K depends on their number. None
    where too few steps were timed."""
    sides = {"method": method.blocks.blocks, "baseline": baseline.blocks.blocks}
    found = fit([sides], [None if method.steps.draft_lengths else at_once])
    return None if found is None else found.ratio("method", "baseline")


def measured_speedup(pairs: Sequence[Pair]) -> float | None:
    """The method's `output_tokens_per_second` / the baseline's, over `finished_pairs` or some."""
    return ratio(
        sum(m.decode_tokens for m, _ in pairs) * sum(b.decode_ms for _, b in pairs),
        sum(m.decode_ms for m, _ in pairs) * sum(b.decode_tokens for _, b in pairs),
    )


def speedup(pairs: Sequence[Pair], *, at_once: int, costs: CostRatio | None = None) -> PairedRatio:
    """`measured_speedup` without the machine's drift between both sides and, as `costs` have it,
    the steps of the last few requests of a round.

    The interval joins a paired bootstrap of tokens per step over requests, within categories, and
    the error of the step costs. Without costs, or where drift is not as modelled, timings are
    resampled in blocks of requests, of which `at_once` share steps (`paired_ratio`).
    """
    order = [pairs[i] for i in balanced([m.category for m, _ in pairs])]
    measure = "decode_ms" if costs is None or not costs.holds else "decode_steps"
    columns = np.array(
        [[getattr(c, key) for c in pair for key in ("decode_tokens", measure)] for pair in order],
        float,
    )
    columns = columns.reshape(-1, 4).T
    if costs is None or not costs.holds:
        return paired_ratio(columns, SPEEDUP, at_once=at_once)
    strata = [m.category for m, _ in order]
    measured = measured_speedup(pairs)
    return costed_ratio(columns, SPEEDUP, measured=measured, costs=costs, strata=strata)

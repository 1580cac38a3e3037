"""Raw counts of requests and of steps, which the meter's metrics are made of."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hydraspec.metrics import survival
from hydraspec.metrics.statistics import ratio
from hydraspec.metrics.summary import DraftLengths
from hydraspec.metrics.survival import SurvivalBins
from hydraspec.types import PHASES, RequestStep, StepRecord

FIRST_PLACES = 16  # output tokens in the first bin of `place_bin`; each next bin ends at twice that


def place_bin(place: int) -> int:
    """The bin of an output token's place: 0 for 0..15, 1 for 16..31, 2 for 32..63, and so on."""
    return (place // FIRST_PLACES).bit_length()


@dataclass(slots=True, kw_only=True)
class RequestCounters:
    """Raw counts of one request. Position i of a draft token counts from 0.

    A step counts as a draft of this request if it verified at least one draft token; padding (ids
    below 0) is no draft token. Accepted tokens are those that the verifier accepted, also where
    a stop or a limit then cuts them. Drafts that a grammar decided are no drafts of the drafter's:
    they are counted apart, and positions skip them.
    """

    index: int
    category: str | None = None
    turn: int = 1  # number in its conversation, from 1
    num_drafts: int = 0  # steps of this request that verified at least one draft token
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_jump_forward_tokens: int = 0  # accepted, of those that a grammar decided
    # By position i, steps that offered a draft, that accepted it, that offered it and accepted i-1.
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    reached_per_position: list[int] = field(default_factory=list)
    # [steps with drafts, accepted draft tokens] by `place_bin` of the step's first output token.
    drafts_by_place: dict[int, list[int]] = field(default_factory=dict)
    survival_bins: SurvivalBins = field(default_factory=dict)  # of drafts with an estimate
    num_emitted: int = 0  # output tokens so far
    decode_steps: int = 0  # steps of this request that were not prefill
    decode_tokens: int = 0  # tokens emitted by decode steps, after stop and limit
    decode_ms: float = 0.0  # this request's share of the decode steps' wall time
    num_computed_tokens: int = 0  # the most tokens that had KV after any step
    num_recomputed_tokens: int = 0  # tokens that were computed again after a preemption
    # From the completion.
    finish_reason: str | None = None  # null until the request has ended
    num_output_tokens: int = 0
    num_image_tokens: int = 0  # of the prompt
    ttft_ms: float | None = None
    latency_ms: float = 0.0
    queue_ms: float | None = None
    inter_token_ms: array[float] = field(default_factory=lambda: array("f"))

    @property
    def finished(self) -> bool:
        """Returns whether the request ended without an error."""
        return self.finish_reason not in (None, "error")

    def add(self, step: RequestStep, ms_per_row: float, totals: RunningTotals) -> None:
        """Count a request's part of a step, here and in `totals`; ms_per_row is its time / rows."""
        place = place_bin(self.num_emitted)
        self.num_emitted += len(step.output_token_ids)
        if not step.is_prefill:
            self.decode_steps += 1
            for sums in (self, totals):
                sums.decode_tokens += len(step.output_token_ids)
                sums.decode_ms += ms_per_row * step.num_rows
        self._add_computed(step)
        num_offered = sum(token >= 0 for token in step.draft_token_ids)
        num_accepted = min(step.num_accepted, num_offered)
        num_jumped = sum(place < num_accepted for place in step.jump_forward_places)
        self.num_jump_forward_tokens += num_jumped
        num_offered -= len(step.jump_forward_places)
        num_accepted -= num_jumped
        if num_offered == 0:
            return
        for sums in (self, totals):
            sums.num_drafts += 1
            sums.num_accepted_tokens += num_accepted
        self.num_draft_tokens += num_offered
        at_place = self.drafts_by_place.setdefault(place, [0, 0])
        at_place[0] += 1
        at_place[1] += num_accepted
        for counts in (
            self.drafted_per_position,
            self.accepted_per_position,
            self.reached_per_position,
        ):
            counts.extend([0] * (num_offered - len(counts)))
        if step.draft_survivals is not None:
            survival.count(self.survival_bins, step.draft_survivals, num_accepted)
        for i in range(num_offered):
            self.drafted_per_position[i] += 1
            self.reached_per_position[i] += num_accepted >= i
            self.accepted_per_position[i] += num_accepted > i

    def _add_computed(self, step: RequestStep) -> None:
        before = step.num_computed_tokens
        after = before + (step.num_rows if step.is_prefill else step.num_accepted + 1)
        self.num_recomputed_tokens += max(0, min(self.num_computed_tokens, after) - before)
        self.num_computed_tokens = max(self.num_computed_tokens, after)


@dataclass(slots=True, kw_only=True)
class RunningTotals:
    """Sums over all steps so far, unfinished requests included: for displays and curves."""

    num_drafts: int = 0
    num_accepted_tokens: int = 0
    decode_tokens: int = 0
    decode_ms: float = 0.0

    def since(self, earlier: RunningTotals) -> RunningTotals:
        """The sums that were added after `earlier`."""
        return RunningTotals(
            num_drafts=self.num_drafts - earlier.num_drafts,
            num_accepted_tokens=self.num_accepted_tokens - earlier.num_accepted_tokens,
            decode_tokens=self.decode_tokens - earlier.decode_tokens,
            decode_ms=self.decode_ms - earlier.decode_ms,
        )

    @property
    def acceptance_length(self) -> float | None:
        """`Meter.acceptance_length` over these sums."""
        rate = ratio(self.num_accepted_tokens, self.num_drafts)
        return None if rate is None else 1 + rate

    @property
    def output_tokens_per_second(self) -> float | None:
        """`Meter.output_tokens_per_second` over these sums."""
        return ratio(1000 * self.decode_tokens, self.decode_ms)


class DraftLengthCounts(Counter[int]):
    """Numbers of requests' decode steps by the drafts that these have rows for; empty where K is
    fixed."""

    def add(self, record: StepRecord) -> None:
        """Count the requests of a step that decode."""
        if record.draft_length is not None:
            self.update(part.num_rows - 1 for part in record.requests if not part.is_prefill)

    def used(self, most: int) -> DraftLengths | None:
        """Numbers of requests' steps with 0, 1, … drafts, at least up to `most`, and the mean;
        None where K is fixed. Steps of requests that did not complete count too.
        """
        if not self:
            return None
        histogram = [self[length] for length in range(max(most, *self) + 1)]
        total = sum(length * count for length, count in enumerate(histogram))
        return {"mean": total / sum(histogram), "histogram": histogram}


@dataclass(slots=True, kw_only=True)
class StepSums:
    """Sums and peaks over all steps so far, whatever became of the requests in them."""

    num_steps: int = 0
    num_preemptions: int = 0
    total_ms: float = 0.0  # wall time; a step of one of R replicas counts 1/R of its time
    rounds_s: float = 0.0  # wall time of the rounds so far, waits for arrivals included
    peak_kv_usage: float = 0.0
    kv_peak_usage_per_group: dict[str, float] = field(default_factory=dict)
    phase_ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    phase_steps: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    draft_lengths: DraftLengthCounts = field(default_factory=DraftLengthCounts)

    def add(self, record: StepRecord) -> float:
        """Count a step; returns its share of the wall time in milliseconds."""
        total_ms = record.total_ms / record.num_replicas
        self.num_steps += 1
        self.total_ms += total_ms
        self.num_preemptions += record.num_preempted
        self.peak_kv_usage = max(self.peak_kv_usage, record.kv_usage)
        self.draft_lengths.add(record)
        peaks = self.kv_peak_usage_per_group
        for name, usage in record.kv_usage_per_group.items():
            peaks[name] = max(peaks.get(name, 0.0), usage)
        for phase, milliseconds in record.phase_ms.items():
            if milliseconds is not None:
                self.phase_ms[phase] = self.phase_ms.get(phase, 0.0) + milliseconds
                self.phase_steps[phase] = self.phase_steps.get(phase, 0) + 1
        return total_ms

    def total_step_time_s(self) -> float:
        """Wall time of all steps in seconds, those that read prompts included. A step of one of R
        replicas that work side by side counts 1/R of its time."""
        return self.total_ms / 1000

    def time_breakdown_ms(self) -> dict[str, float | None]:
        """Mean milliseconds per step of each phase, over the steps where it was measured; None
        for a phase that was never measured."""
        return {
            phase: ratio(total, self.phase_steps[phase]) for phase, total in self.phase_ms.items()
        }

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> StepSums:
        """The sums read back from their plain numbers in a file."""
        lengths = {int(length): count for length, count in found["draft_lengths"].items()}
        return cls(**{**found, "draft_lengths": DraftLengthCounts(lengths)})

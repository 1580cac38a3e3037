"""Conversion of a step's results to host state, record and completions: the one place where the
host waits for a step of the device."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from hydraspec.engine.base import EngineInfo
from hydraspec.engine.finish import FinishCheck
from hydraspec.engine.grammars import NO_TOKEN
from hydraspec.engine.run.draft_check import check_draft_ids
from hydraspec.engine.run.logprobs import note_logprobs, note_prompt_logprobs
from hydraspec.engine.run.results import LaunchedStep, StepResult
from hydraspec.engine.run.timing import StepClock
from hydraspec.engine.schedule.scheduler import Scheduler
from hydraspec.engine.schedule.sequence import Scheduled, Sequence
from hydraspec.speculators.base import BaseSpeculator
from hydraspec.types import Completion, NotFiniteError, RequestStep, StepRecord


@dataclass(slots=True, frozen=True)
class Flight:
    """A launched step whose results are not in the sequences yet."""

    scheduled: list[Scheduled]
    step: LaunchedStep
    num_preempted: int  # requests preempted while the step was scheduled
    kv_usage: float  # share of blocks in use, with those of the step
    kv_usage_per_group: dict[str, float]
    launch_ms: dict[str, float]  # the host's milliseconds for "schedule" and "launch"
    draft_length: int | None = None  # drafts per request, where the engine chooses them per step
    after: LaunchedStep | None = None  # the step before, if it was in flight at the launch


@dataclass(slots=True, frozen=True)
class Collected:
    """A step's record and completions."""

    record: StepRecord | None  # None: no step has ended
    completions: list[Completion] = field(default_factory=list)
    error: NotFiniteError | None = None  # the error of the first request without finite logits


class Collector:
    """Applies results to sequences, ends those that are done, and writes the step's record."""

    def __init__(
        self,
        scheduler: Scheduler,
        finish: FinishCheck,
        info: EngineInfo,
        speculator: BaseSpeculator,
    ) -> None:
        self._scheduler = scheduler
        self._finish = finish
        self._info, self._speculator = info, speculator
        self.num_steps = 0

    def collect(self, flight: Flight, clock: StepClock) -> Collected:
        """Wait for a step's results and apply them; finished sequences give back slot and blocks.

        Results of a request that had ended, which was not known when the step was launched, are
        dropped. A request whose logits are not finite ends with an error, as does the run.
        """
        result = flight.step.result()
        note_prompt_logprobs(flight.scheduled, result)
        check_draft_ids(result.draft_tokens, self._info.vocab_size, self._speculator)
        now = time.perf_counter()
        tokens, drafts = result.tokens.tolist(), result.draft_tokens.tolist()
        num_sampled, not_finite = result.num_sampled.tolist(), result.not_finite.tolist()
        survivals = _next_survivals(flight, result)
        requests, slots = list[RequestStep](), list[int]()
        completions = self.failed()
        error: NotFiniteError | None = None
        for place, item in enumerate(flight.scheduled):
            sequence = item.sequence
            if sequence.finish_reason is not None:
                continue
            slots.append(sequence.slot)
            emitted = tokens[place][: num_sampled[place]]
            valid = emitted[:-1] if not_finite[place] else emitted
            requests.append(self._apply(item, drafts[place], emitted, valid, now))
            if item.num_proposed and self._scheduler.step_drafts is not None:
                self._scheduler.step_drafts.observe(item, requests[-1].num_accepted)
            note_logprobs(item, result, place, requests[-1].output_token_ids)
            sequence.survivals = survivals[place]
            if result.next_tokens is not None:
                sequence.next_tokens = result.next_tokens[place].tolist()
            sequence.num_worthwhile = self._num_worthwhile(survivals[place])
            if len(valid) < len(emitted) and sequence.finish_reason is None:
                found = self._not_finite(sequence)
                sequence.fail(found.finding)
                error = error or found
            self._scheduler.arrived(item)
            if sequence.finish_reason is not None:
                self._scheduler.release(sequence)
                self._note_output(sequence)
                completions.append(self._finish.completion(sequence))
        if self._scheduler.draft_lengths is not None:
            self._scheduler.draft_lengths.observe(slots, requests)
        record = StepRecord(
            step=self.num_steps,
            phase_ms=clock.phase_ms(),
            total_ms=clock.total_ms(flight.launch_ms),
            requests=requests,
            num_preempted=flight.num_preempted,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            kv_usage=flight.kv_usage,
            kv_usage_per_group=flight.kv_usage_per_group,
            draft_length=flight.draft_length,
            device_ms=None if flight.after is None else flight.step.ms_since(flight.after),
        )
        self.num_steps += 1
        return Collected(record, completions, error)

    def failed(self) -> list[Completion]:
        """Completions of requests that the scheduler failed or cancelled since the last call."""
        completions = [self._finish.completion(sequence) for sequence in self._scheduler.failed]
        self._scheduler.failed.clear()
        return completions

    def _note_output(self, sequence: Sequence) -> None:
        drafts = self._scheduler.step_drafts
        if drafts is not None and sequence.finish_reason != "error":
            drafts.finished(sequence.output_token_ids)

    def _not_finite(self, sequence: Sequence) -> NotFiniteError:
        position = len(sequence.output_token_ids)
        return NotFiniteError(sequence.request.id, position, self._info.dtype)

    def _apply(
        self,
        item: Scheduled,
        drafts: Seq[int],
        emitted: list[int],
        valid: list[int],
        now: float,
    ) -> RequestStep:
        sequence, survivals = item.sequence, item.sequence.survivals
        offered = _offered(drafts, item.num_drafts)
        decided = [] if item.follows is None else item.follows.decided
        num_computed = sequence.num_computed
        num_accepted = max(0, len(emitted) - 1)
        num_rejected = item.num_drafts - num_accepted if emitted else 0
        sequence.num_computed += item.num_rows - num_rejected
        grammar = sequence.grammar
        allowed = valid if grammar is None else grammar.accept(valid)
        kept = self._finish.append(sequence, allowed)
        if len(allowed) < len(valid) and sequence.finish_reason is None:
            sequence.fail(NO_TOKEN)
        if kept:
            sequence.decoding = True
            sequence.note_tokens(now)
        return RequestStep(
            index=sequence.request.index,
            num_rows=item.num_rows,
            is_prefill=item.is_prefill,
            num_computed_tokens=num_computed,
            draft_token_ids=offered,
            num_accepted=num_accepted,
            output_token_ids=kept,
            jump_forward_places=decided,
            draft_survivals=None if survivals is None or decided else survivals[: len(offered)],
        )

    def _num_worthwhile(self, survivals: Seq[float] | None) -> int | None:
        """Number of drafts that the drafter did not leave out; see `min_survival`."""
        least = self._speculator.min_survival
        if survivals is None or least is None:
            return None
        return sum(each >= least for each in survivals)


def _next_survivals(flight: Flight, result: StepResult) -> Seq[list[float] | None]:
    """Estimates of the drafts that a step proposed, by request."""
    estimates, length = result.next_survivals, flight.draft_length
    if estimates is None or length == 0:
        return [None] * len(flight.scheduled)
    found: list[list[float] | None] = estimates[:, :length].tolist()
    return found


def _offered(drafts: Seq[int], num_drafts: int) -> list[int]:
    """The drafts under verification, up to the first place where the drafter had none."""
    offered = list(drafts[:num_drafts])
    return offered[: offered.index(-1)] if -1 in offered else offered

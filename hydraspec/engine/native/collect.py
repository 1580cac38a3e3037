"""From a step's results to host state, records and completions: the one place where the device is
read."""

from __future__ import annotations

import time
from itertools import takewhile

from hydraspec.engine.finish import FinishCheck
from hydraspec.engine.native.scheduler import Scheduled, Scheduler
from hydraspec.engine.native.timing import PhaseClock
from hydraspec.types import Batch, Completion, RequestStep, StepRecord, Verdict


class Collector:
    """Applies verdicts to sequences, ends those that are done, and writes the step's record."""

    def __init__(self, scheduler: Scheduler, finish: FinishCheck) -> None:
        self._scheduler = scheduler
        self._finish = finish
        self._num_steps = 0

    def collect(
        self, scheduled: list[Scheduled], batch: Batch, verdict: Verdict, clock: PhaseClock
    ) -> tuple[StepRecord, list[Completion]]:
        """Record and completions of a step; finished sequences give back slot and blocks."""
        tokens, num_sampled = verdict.tokens.tolist(), verdict.num_sampled.tolist()
        drafts = batch.draft_tokens.tolist()
        kv_usage = self._scheduler.kv.usage
        now = time.perf_counter()
        requests, completions = [], self.failed()
        for place, item in enumerate(scheduled):
            emitted = tokens[place][: num_sampled[place]]
            offered = list(takewhile(lambda token: token >= 0, drafts[place][: item.num_drafts]))
            requests.append(self._apply(item, offered, emitted, now))
            if item.sequence.finish_reason:
                self._scheduler.release(item.sequence)
                completions.append(self._finish.completion(item.sequence))
        record = StepRecord(
            step=self._num_steps,
            phase_ms=clock.phase_ms(),
            total_ms=clock.total_ms(),
            requests=requests,
            num_preempted=self._scheduler.num_preempted,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            kv_usage=kv_usage,
        )
        self._num_steps += 1
        return record, completions

    def failed(self) -> list[Completion]:
        """Completions of requests that can never be served."""
        completions = [self._finish.completion(sequence) for sequence in self._scheduler.failed]
        self._scheduler.failed.clear()
        return completions

    def _apply(
        self, item: Scheduled, drafts: list[int], emitted: list[int], now: float
    ) -> RequestStep:
        sequence = item.sequence
        num_computed = sequence.num_computed
        num_accepted = max(0, len(emitted) - 1)
        num_rejected = item.num_drafts - num_accepted if emitted else 0
        sequence.num_computed += item.num_rows - num_rejected
        kept = self._finish.append(sequence, emitted)
        if kept:
            sequence.decoding = True
            sequence.note_tokens(now)
        return RequestStep(
            index=sequence.request.index,
            num_rows=item.num_rows,
            is_prefill=item.is_prefill,
            num_computed_tokens=num_computed,
            draft_token_ids=drafts,
            num_accepted=num_accepted,
            output_token_ids=kept,
        )

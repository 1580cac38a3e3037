"""The native engine: loads target and drafter, and runs requests step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq

import numpy as np
import torch

from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Engine, EngineInfo
from hydraspec.engine.finish import FinishCheck
from hydraspec.engine.native.collect import Collector
from hydraspec.engine.native.loading import Loaded, load, load_baseline
from hydraspec.engine.native.scheduler import Scheduled, Sequence
from hydraspec.engine.native.state import write_request
from hydraspec.engine.native.timing import PhaseClock
from hydraspec.engine.prompts import tokenize
from hydraspec.types import Completion, Request, SamplingParams, StepPlan, StepRecord


class NativeEngine(Engine):
    """Continuous batching over a paged, hybrid KV cache; each step verifies drafts and proposes the
    next."""

    def __init__(self, config: RunConfig, loaded: Loaded | None = None) -> None:
        """Load what `config` names, or wrap parts that are loaded already (`baseline` does)."""
        self.parts = loaded or load(config)
        self.info: EngineInfo = self.parts.info
        self._scheduler = self.parts.scheduler
        decode = self.parts.tokenizer.decode if self.parts.tokenizer else None
        self._collector = Collector(
            self._scheduler,
            FinishCheck(self.parts.target.eos_token_ids, self.info.max_model_len, decode),
        )
        self._last_logits: torch.Tensor | None = None
        self._clock = PhaseClock(enabled=self.info.device == "cpu")
        self._schedule = self._clock.timed("schedule", self._next_plan)
        self.parts.runner.time_with(self._clock)

    @torch.inference_mode()
    def step(self) -> tuple[StepRecord | None, list[Completion]]:
        """One step; the record is None when nothing ran and only failed requests came back."""
        self._clock.start()
        scheduled, plan = self._schedule()
        if plan is None:
            return None, self._collector.failed()
        batch, target_step, verdict = self.parts.runner.step(plan)
        self._last_logits = target_step.logits
        return self._collector.collect(scheduled, batch, verdict, self._clock)

    def _next_plan(self) -> tuple[list[Scheduled], StepPlan | None]:
        scheduled = self._scheduler.schedule()
        for sequence in self._scheduler.admitted:
            if sequence.slot >= 0:
                write_request(
                    self.parts.runner.state,
                    sequence.slot,
                    sequence.token_ids,
                    sequence.request.sampling,
                )
        return scheduled, self._scheduler.plan(scheduled) if scheduled else None

    def run(
        self, requests: Seq[Request], *, concurrency: int | None
    ) -> Iterator[StepRecord | Completion]:
        pending = deque(requests)
        limit = concurrency or len(pending)
        num_offered = 0
        try:
            while pending or num_offered:
                while pending and num_offered < limit:
                    self._scheduler.add(_new_sequence(pending.popleft()))
                    num_offered += 1
                record, completions = self.step()
                num_offered -= len(completions)
                if record is not None:
                    yield record
                yield from completions
        finally:
            self._scheduler.clear()

    def tokenize(self, requests: Seq[Request]) -> None:
        checkpoint = self.parts.config.target.checkpoint
        tokenize(requests, self.parts.tokenizer, self.info, checkpoint)

    def baseline(self) -> NativeEngine:
        parts = load_baseline(self.parts)
        return NativeEngine(parts.config, parts)

    def next_token_logits(self, token_ids: Seq[int]) -> np.ndarray:
        request = Request(
            index=0,
            id="logits",
            sampling=SamplingParams(max_tokens=1, ignore_eos=True),
            prompt_token_ids=list(token_ids),
        )
        for _ in self.run([request], concurrency=1):
            pass
        assert self._last_logits is not None
        return self._last_logits[-1].double().cpu().numpy()


def _new_sequence(request: Request) -> Sequence:
    assert request.prompt_token_ids is not None, "call tokenize() first"
    tokens = list(request.prompt_token_ids)
    return Sequence(request=request, token_ids=tokens, num_prompt=len(tokens))

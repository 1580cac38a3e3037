"""A deterministic engine without a model: its target is arithmetic, its drafter a script of
accepted counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hydraspec.engine.base import Built, Engine, EngineInfo
from hydraspec.types import Completion, Image, Request, RequestStep, Span, StepRecord, WorkloadError

VOCAB_SIZE = 64
MAX_MODEL_LEN = 64
PHASES = {"schedule": 0.1, "prepare": 0.1, "forward": 1.0, "verify": 0.2, "propose": None}


def target_token(token_ids: Sequence[int]) -> int:
    """What the target says after `token_ids`."""
    return (7 * sum(token_ids) + len(token_ids)) % VOCAB_SIZE


def make_info(**changes: object) -> EngineInfo:
    """Facts of a fake engine."""
    facts = {
        "engine": "fake",
        "target": "tiny_fake",
        "method": "gemma4_mtp",
        "num_speculative_tokens": 3,
        "device": "cpu",
        "dtype": "float32",
        "vocab_size": VOCAB_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "greedy_is_exact": True,
        "cudagraph": {
            "requested": "full_and_piecewise",
            "target": "none",
            "draft": "none",
            "reason": "device is cpu",
        },
        "memory_bytes": {"weights": 1000, "draft_weights": 100, "kv_cache": 10},
        "draft_spec": {"kind": "scripted"},
        "warnings": [],
    }
    return EngineInfo(**{**facts, **changes})


@dataclass
class Behaviour:
    """What a fake engine does wrong, and how well it drafts."""

    accepted: Sequence[int] = (3, 0, 2, 1)  # accepted counts, by step of each request, cycled
    wrong_from: dict[int, int] = field(default_factory=dict)  # index -> first wrong output position
    margin: float = 1.0  # between the target's two best logits
    error_indices: set[int] = field(default_factory=set)
    raise_at_step: dict[int, BaseException] = field(default_factory=dict)  # counted over all runs
    ms_per_step: float = 2.0
    builds_at_step: int | None = None  # a kernel is compiled and a graph captured then
    builds_always: bool = False  # the same in every step
    num_cached: int = 0  # prompt tokens that every request finds in the prefix cache
    is_eager: bool = False  # kernels are compiled when a step first needs them


class FakeEngine(Engine):
    """Runs requests `concurrency` at a time; a prompt is read in one step that emits the first
    token.
    """

    def __init__(
        self, behaviour: Behaviour | None = None, *, is_baseline: bool = False, **info: object
    ) -> None:
        self.behaviour = behaviour or Behaviour()
        self.info = make_info(**info)
        self.is_baseline = is_baseline
        self.num_steps = 0
        self.closed = False

    def tokenize(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.prompt is not None and "untokenisable" in request.prompt:
                raise WorkloadError(
                    f"request {request.id!r}: cannot be tokenised", request_id=request.id
                )
            if request.prompt is not None:
                request.prompt_token_ids = [ord(c) % VOCAB_SIZE for c in request.prompt]
            elif request.messages is not None:
                request.prompt_token_ids = [
                    len(m["content"]) % VOCAB_SIZE for m in request.messages
                ]

    def run(
        self, requests: Sequence[Request], *, concurrency: int | None
    ) -> Iterator[StepRecord | Completion]:
        size = concurrency or len(requests)
        for first in range(0, len(requests), size):
            yield from self._batch(list(requests[first : first + size]))

    def has_eager_steps(self) -> bool:
        return self.behaviour.is_eager

    def num_built(self) -> Built:
        if self.behaviour.builds_always:
            return Built(self.num_steps, self.num_steps)
        late = self.behaviour.builds_at_step
        return Built(1, 1) if late is not None and self.num_steps > late else Built()

    def baseline(self) -> Engine:
        base = FakeEngine(
            Behaviour(
                error_indices=self.behaviour.error_indices,
                margin=self.behaviour.margin,
                ms_per_step=self.behaviour.ms_per_step / 2,
            ),
            is_baseline=True,
            method="none",
            num_speculative_tokens=0,
        )
        self.base = base
        return base

    def next_token_logits(
        self,
        token_ids: Sequence[int],
        spans: tuple[Span, ...] = (),
        images: tuple[Image, ...] = (),
    ) -> np.ndarray:
        best = target_token(token_ids)
        logits = np.zeros(VOCAB_SIZE)
        logits[best] = 10.0
        logits[(best + 1) % VOCAB_SIZE] = 10.0 - self.behaviour.margin
        return logits

    def close(self) -> None:
        self.closed = True

    def _batch(self, requests: list[Request]) -> Iterator[StepRecord | Completion]:
        outputs: dict[int, list[int]] = {r.index: [] for r in requests}
        turns: dict[int, int] = {r.index: 0 for r in requests}
        waiting = []
        for request in requests:
            if request.index in self.behaviour.error_indices:
                yield self._completion(request, [], error="prompt is too long")
            else:
                waiting.append(request)
        while waiting:
            if self.num_steps in self.behaviour.raise_at_step:
                raise self.behaviour.raise_at_step[self.num_steps]
            parts = [self._advance(r, outputs[r.index], turns) for r in waiting]
            yield StepRecord(
                step=self.num_steps,
                phase_ms=dict(PHASES),
                total_ms=self.behaviour.ms_per_step,
                requests=parts,
                num_running=len(parts),
                kv_usage_per_group={"<full>": 0.375},
            )
            self.num_steps += 1
            done = [r for r in waiting if len(outputs[r.index]) >= r.sampling.max_tokens]
            waiting = [r for r in waiting if r not in done]
            for request in done:
                yield self._completion(request, outputs[request.index])

    def _advance(self, request: Request, output: list[int], turns: dict[int, int]) -> RequestStep:
        prompt = request.prompt_token_ids or []
        is_prefill = not output
        width = 0 if is_prefill or self.is_baseline else self.info.num_speculative_tokens
        script = self.behaviour.accepted
        num_accepted = min(width, script[turns[request.index] % len(script)]) if width else 0
        turns[request.index] += not is_prefill
        computed = 0 if is_prefill else len(prompt) + len(output) - 1
        emitted = self._continuation(request, output, num_accepted + 1)
        drafts = [*emitted[:num_accepted], *[0] * (width - num_accepted)]
        emitted = emitted[: request.sampling.max_tokens - len(output)]
        output.extend(emitted)
        return RequestStep(
            index=request.index,
            num_rows=len(prompt) if is_prefill else 1 + width,
            is_prefill=is_prefill,
            num_computed_tokens=computed,
            draft_token_ids=drafts,
            num_accepted=num_accepted,
            output_token_ids=emitted,
        )

    def _continuation(self, request: Request, output: list[int], count: int) -> list[int]:
        tokens = [*(request.prompt_token_ids or []), *output]
        start = len(tokens)
        wrong_from = self.behaviour.wrong_from.get(request.index, MAX_MODEL_LEN)
        for position in range(len(output), len(output) + count):
            wrong = position >= wrong_from and not self.is_baseline
            tokens.append((target_token(tokens) + wrong) % VOCAB_SIZE)
        return tokens[start:]

    def _completion(
        self, request: Request, output: list[int], *, error: str | None = None
    ) -> Completion:
        return Completion(
            index=request.index,
            prompt_token_ids=list(request.prompt_token_ids or []),
            output_token_ids=output,
            text=None if error else f"so the answer is {len(output)}",
            finish_reason="error" if error else "length",
            error=error,
            ttft_ms=None if error else 5.0,
            latency_ms=5.0 + 2.0 * len(output),
            num_cached_tokens=0 if error else self.behaviour.num_cached,
        )


class NotingEngine(FakeEngine):
    """Has a note of loading, which its baseline has too, one of the baseline alone, and one that a
    run adds."""

    def __init__(self, **info: object) -> None:
        super().__init__(warnings=["a note of both"], **info)

    def baseline(self) -> Engine:
        base = super().baseline()
        base.info.warnings += ["a note of both", "a baseline's note"]
        return base

    def run(
        self, requests: Sequence[Request], *, concurrency: int | None
    ) -> Iterator[StepRecord | Completion]:
        if "a late note" not in self.info.warnings:
            self.info.warnings.append("a late note")
        yield from super().run(requests, concurrency=concurrency)

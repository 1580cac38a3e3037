"""Hooks into transformers' generate(): step records, ends of requests, and sampling from the native
engine's random streams. generate()'s loops run unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from hydraspec_kernels.sampling.random_streams import DrawKey, Purpose
from hydraspec_kernels.sampling.records import SamplingTensors
from hydraspec_kernels.sampling.token_choice import draw_tokens
from hydraspec_kernels.sampling.truncation import target_probs
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

from hydraspec.engine.finish import FinishCheck, OfferedRequest
from hydraspec.sampling.flags import flags_of
from hydraspec.types import PHASES, RequestStep, StepRecord

NOT_MEASURED: dict[str, float | None] = dict.fromkeys(PHASES)


class StepWatch(StoppingCriteria):  # type: ignore[misc]
    """Stopping criterion, called with the tokens after each forward of the target: keeps records of
    steps, and ends the requests that FinishCheck ends.

    The time of the first step includes what generate() does before its loop. Rows of a batch that
    have ended stay in transformers' batch until the last one ends; they are in no record, so that
    their time counts for the other rows.
    """

    def __init__(
        self, sequences: Sequence[OfferedRequest], finish: FinishCheck, first_step: int
    ) -> None:
        self.sequences, self.finish = sequences, finish
        self.records: list[StepRecord] = []
        self._first_step = first_step
        self._began = time.perf_counter()

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        """Mask [B] bool of the rows that have ended, from input_ids [B, any], left-padded, with the
        newest token last.
        """
        newest = input_ids[:, -1].tolist()
        self._record([[token] for token in newest], [[] for _ in newest])
        return self._ended(input_ids.device)

    def _ended(self, device: torch.device) -> Tensor:
        ended = [sequence.finish_reason is not None for sequence in self.sequences]
        return torch.tensor(ended, device=device)

    def _record(self, emitted: Sequence[list[int]], drafts: Sequence[list[int]]) -> None:
        now = time.perf_counter()
        requests = [
            self._apply(sequence, tokens, offered, now)
            for sequence, tokens, offered in zip(self.sequences, emitted, drafts, strict=True)
            if sequence.finish_reason is None
        ]
        if not requests:  # a forward that was launched before the last end was seen
            return
        self.records.append(
            StepRecord(
                step=self._first_step + len(self.records),
                phase_ms=dict(NOT_MEASURED),
                total_ms=(now - self._began) * 1e3,
                requests=requests,
                num_running=len(requests),
            )
        )
        self._began = now

    def _apply(
        self, sequence: OfferedRequest, emitted: list[int], drafts: list[int], now: float
    ) -> RequestStep:
        is_prefill = not self.records
        num_known = sequence.num_tokens
        kept = self.finish.append(sequence, emitted)
        sequence.note_tokens(now)
        return RequestStep(
            index=sequence.request.index,
            num_rows=(num_known if is_prefill else 1) + len(drafts),
            is_prefill=is_prefill,
            num_computed_tokens=0 if is_prefill else num_known - 1,
            draft_token_ids=drafts,
            num_accepted=len(emitted) - 1,
            output_token_ids=kept,
        )


class AssistedWatch(StepWatch):
    """Stopping criterion of assisted generation with one request, called twice a step: with the
    drafts, then with the accepted drafts and one token more.

    It never ends a request at its drafts (transformers would then drop the token after them), so
    that the loop always emits one token more than the verifier accepted.
    """

    def __init__(self, sequence: OfferedRequest, finish: FinishCheck, first_step: int) -> None:
        super().__init__([sequence], finish, first_step)
        self._drafts: list[int] | None = None

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        """Mask [1] bool, whether the request has ended, from input_ids [1, any]."""
        (sequence,) = self.sequences
        added: list[int] = input_ids[0, sequence.num_tokens :].tolist()
        if self._drafts is None:
            self._drafts = added
            return torch.zeros(1, dtype=torch.bool, device=input_ids.device)
        drafts, self._drafts = self._drafts, None
        self._record([added], [drafts])
        return self._ended(input_ids.device)


class StreamSampler(LogitsProcessor):  # type: ignore[misc]
    """Logits processor that leaves each row only the token that its request's random stream draws.

    generate() then takes the argmax. A draw depends on seed and position only, so the output with
    drafts is the output without. A draft, itself an argmax, is kept if it is the token drawn: with
    probability p(draft), as standard verification keeps certain drafts (q = 1). transformers' own
    rule divides by the softmax of the drafter, which the drafts were not sampled from.
    """

    def __init__(
        self, sequences: Sequence[OfferedRequest], num_padding: Sequence[int], device: torch.device
    ) -> None:
        settings = [sequence.request.sampling for sequence in sequences]
        self._sampling = SamplingTensors(
            temperature=torch.tensor([s.temperature for s in settings], device=device),
            top_k=torch.tensor([s.top_k for s in settings], device=device),
            top_p=torch.tensor([s.top_p for s in settings], device=device),
            min_p=torch.tensor([s.min_p for s in settings], device=device),
        )
        self._seed = torch.tensor([s.seed for s in settings], device=device)
        self._num_padding = torch.tensor(num_padding, device=device)
        _, self._flags = flags_of(settings)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [B, V], finite at one token, from input_ids [B, any] and scores [B, V] of the next
        token.
        """
        position = input_ids.shape[1] - self._num_padding
        key = DrawKey(self._seed, position, Purpose.BONUS, 0)
        drawn = draw_tokens(target_probs(scores, self._sampling, self._flags), key)
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn.unsqueeze(1), 0.0)

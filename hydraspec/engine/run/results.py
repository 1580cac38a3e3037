"""Results of a step on the device, and their way to the host: through pinned memory
and an event, on which the host waits only when it reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from hydraspec_kernels.step_inputs import copy_words
from torch import Tensor

from hydraspec.parallel.ranks import current
from hydraspec.types import Batch, Draft, RequestState, TargetStep, Verdict

RESULT_RING = 4  # launches whose results may be under way at once


@dataclass(slots=True, frozen=True)
class DeviceStep:
    """Results of a step's verbs on the device."""

    batch: Batch
    target_step: TargetStep
    verdict: Verdict
    draft: Draft | None = None


@dataclass(slots=True, frozen=True)
class StepOutputs:
    """Outputs of a captured step."""

    packed: Tensor  # [B, 2k+3], see packed_results
    undrafted: DeviceStep | None = None  # inputs of `propose`, where it runs after the graph


@dataclass(slots=True, frozen=True)
class StepResult:
    """Results of a step on the host, in the plan's order. k is the width of verification in the
    step, K at most."""

    tokens: np.ndarray  # [B, k+1] int64, -1 from num_sampled on
    num_sampled: np.ndarray  # [B] int64
    not_finite: np.ndarray  # [B] int64, 1: the last token comes from logits that are not finite
    draft_tokens: np.ndarray  # [B, k] int64, the drafts that were under verification, or -1
    next_survivals: np.ndarray | None = None  # [B, K] float32, see Draft, of those proposed next
    next_tokens: np.ndarray | None = None  # [B, K] int64 drafts for the next step, or -1
    logprobs: np.ndarray | None = None  # [B, K+1, 1+2M] float32 of tokens, see sampling.logprobs
    prompt_logprobs: np.ndarray | None = None  # [R, 1+2M] float32, see ScoredRows


class LaunchedStep:
    """A step that is running or has run."""

    def __init__(
        self, fetch: Callable[[], StepResult], event: torch.cuda.Event | None = None
    ) -> None:
        self._fetch = fetch
        self._event = event
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        """The step's results; waits for the device if need be."""
        if self._result is None:
            if self._event is not None:
                current().watch.wait_for_device(self._event)
            self._result = self._fetch()
        return self._result

    def ms_since(self, before: LaunchedStep) -> float | None:
        """Milliseconds on the device's clock from the end of `before`; results of both are in. None
        where there is no such clock."""
        if self._event is None or before._event is None:
            return None
        elapsed: float = before._event.elapsed_time(self._event)
        return elapsed


def packed_results(step: DeviceStep) -> Tensor:
    """Results as one tensor [B, 2k+3], to be copied at once: tokens, num_sampled, not_finite, and
    the drafts under verification. k is their width in this step, K at most."""
    batch, verdict = step.batch, step.verdict
    count, broken = verdict.num_sampled.unsqueeze(1), verdict.not_finite.unsqueeze(1)
    return torch.cat((verdict.tokens, count, broken, batch.draft_tokens), 1)


def unpacked(parts: Sequence[np.ndarray]) -> StepResult:
    """The results in arrays [B, 2k+3] that `packed_results` has laid out, with the largest k of
    them. Copied: the memory serves another launch later."""
    k = max(part.shape[1] for part in parts) // 2 - 1
    widest = [widened(part, k) for part in parts]
    packed = widest[0] if len(parts) == 1 else np.concatenate(widest)
    return StepResult(packed[:, : k + 1], packed[:, k + 1], packed[:, k + 2], packed[:, k + 3 :])


def widened(packed: np.ndarray, k: int) -> np.ndarray:
    """A copy [B, 2K+3] of packed results whose drafts have any width up to K; -1 in columns after
    these."""
    width = packed.shape[1] // 2 - 1
    if width == k:
        return packed.copy()
    found = np.full((len(packed), 2 * k + 3), -1, dtype=packed.dtype)
    found[:, : width + 1] = packed[:, : width + 1]
    found[:, k + 1 : k + 3 + width] = packed[:, width + 1 :]
    return found


@dataclass(slots=True, frozen=True, kw_only=True)
class MoreResults:
    """Results of a step that only some steps have."""

    slots: np.ndarray  # [B] of the step's requests
    by_slot: Mapping[str, Tensor]  # [S, any] in the state, by field of StepResult
    prompt_logprobs: Tensor | None = None  # [R, 1+2M], see StepResult


def next_drafts(state: RequestState, num_speculative_tokens: int) -> Tensor:
    """Drafts [S, K] after each slot's newest token."""
    ahead = torch.arange(1, num_speculative_tokens + 1, device=state.num_computed.device)
    return state.token_ids.gather(1, state.num_computed.unsqueeze(1) + ahead)


class ResultRing:
    """Host memory for the results of the last few launches."""

    def __init__(self, max_num_seqs: int, num_drafts: int, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._width = 2 * num_drafts + 3
        size = max_num_seqs * self._width
        self._buffers = [
            torch.zeros(size, dtype=torch.int64, pin_memory=self._is_cuda)
            for _ in range(RESULT_RING)
        ]
        self._by_slot: list[dict[str, Tensor]] = [{} for _ in range(RESULT_RING)]
        self._users: list[LaunchedStep | None] = [None] * RESULT_RING
        self._turn = 0

    def rehearse(self, device: torch.device) -> None:
        """Copies a request's results that are zero, as `launched` will copy others."""
        place = self._buffers[0][: self._width].view(1, -1)
        copy_words(place, torch.zeros(1, self._width, dtype=torch.int64, device=device))

    def launched(
        self, parts: list[tuple[Tensor, int]], more: MoreResults | None = None
    ) -> LaunchedStep:
        """Start the copy of a step's results to the host.

        parts: packed results of each part, and how many of its requests are no padding. An older
        step's results that are still in the same host memory are fetched first.
        """
        place, self._turn = self._turn, (self._turn + 1) % RESULT_RING
        before = self._users[place]
        if before is not None:
            before.result()
        left, copies = self._buffers[place], list[Tensor]()
        for packed, count in parts:
            size = count * packed.shape[1]
            copies.append(left[:size].view(count, -1))
            copy_words(copies[-1], packed[:count])
            left = left[size:]
        kept, scored = self._copied(place, more), None
        if more is not None and more.prompt_logprobs is not None:
            scored = self._to_host(more.prompt_logprobs)
        event = torch.cuda.Event(enable_timing=True) if self._is_cuda else None
        if event is not None:
            event.record()

        def fetch() -> StepResult:
            found = unpacked([each.numpy() for each in copies])
            if more is None:
                return found
            by_slot = {name: of.numpy()[more.slots] for name, of in kept.items()}
            prompts = None if scored is None else scored.numpy()
            return replace(found, **by_slot, prompt_logprobs=prompts)

        launched = self._users[place] = LaunchedStep(fetch, event)
        return launched

    def _copied(self, place: int, more: MoreResults | None) -> dict[str, Tensor]:
        """Start the copies of results by slot, to memory of this place in the ring."""
        kept, copied = self._by_slot[place], {}
        for name, of in ({} if more is None else more.by_slot).items():
            if name not in kept:
                kept[name] = torch.zeros(of.shape, dtype=of.dtype, pin_memory=self._is_cuda)
            copied[name] = kept[name].copy_(of, non_blocking=True)
        return copied

    def _to_host(self, found: Tensor) -> Tensor:
        host = torch.empty(found.shape, pin_memory=self._is_cuda)
        return host.copy_(found, non_blocking=True)

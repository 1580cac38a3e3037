"""Transfers of a pipeline stage within a step: what it receives, what it sends, and the results of
the last stage, which every other stage applies to its own state."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hydraspec_kernels.sampling.verification import commit_tokens
from torch import Tensor

from hydraspec.engine.cache.sizing import Models
from hydraspec.engine.run.state import store_draft
from hydraspec.models.base import TargetModel
from hydraspec.parallel.stages import StageLink
from hydraspec.types import (
    Batch,
    Draft,
    IntermediateTensors,
    RequestState,
    StepPlan,
    Verdict,
)


class StageIO:
    """Transfers between the pipeline stages of one engine: hidden and aux states to the next stage,
    results and drafts from the last one to the others. Shapes follow from each step's plan."""

    def __init__(
        self,
        link: StageLink,
        target: TargetModel,
        aux_layer_ids: Sequence[int],
        num_drafts: int,
        max_num_rows: int,
    ) -> None:
        """max_num_rows: most rows of a step, padding included."""
        self.link, self.stage = link, target.stage
        self._width, self._k = target.hidden_size, num_drafts
        self._num_received = 1 + len(target.aux_ids_before(aux_layer_ids))
        size = 0 if self.stage.is_first else self._num_received * max_num_rows * self._width
        # Always the same memory: a graph may read it.
        self._buffer = torch.zeros(size, dtype=target.dtype, device=target.device)

    @classmethod
    def of(cls, models: Models) -> StageIO:
        """Transfers of the pipeline stage that `models` are of."""
        engine, speculator = models.config.engine, models.speculator
        k = speculator.num_speculative_tokens
        assert models.link is not None
        most = max(engine.max_num_batched_tokens, engine.max_num_seqs * (k + 1))
        return cls(models.link, models.target, speculator.aux_layer_ids, k, most)

    def _tensors(self, num_rows: int) -> Tensor:
        """The buffer as [1 + aux states, T, D], with T `num_rows`."""
        shape = (self._num_received, num_rows, self._width)
        return self._buffer[: shape[0] * shape[1] * shape[2]].view(shape)

    def receive(self, num_rows: int) -> None:
        """Receive the previous stage's tensors of this step; the first stage receives none."""
        if not self.stage.is_first:
            self.link.receive(self._tensors(num_rows))

    def received(self, batch: Batch) -> IntermediateTensors | None:
        """The received tensors, which the forward pass may write to; None on the first stage."""
        if self.stage.is_first:
            return None
        stream, *aux = self._tensors(batch.positions.shape[0]).unbind(0)
        return IntermediateTensors(hidden_states=stream, aux_hidden_states=aux)

    def send(self, stacked: Tensor) -> None:
        """Send [1 + aux states, T, D] (see `stack`) to the next stage; do not write it later."""
        self.link.send(stacked)

    def send_results(self, plan: StepPlan, packed: Tensor, state: RequestState) -> Tensor:
        """Send, from the last stage, a step's `packed_results` [B, 2K+3] and the drafts for the
        next step, which are in `state`. Returns a copy of the results, without padding."""
        packed = packed[: len(plan.slots)]
        slots = PlanRows.of(plan, state).slots
        columns = state.token_ids.shape[1]
        newest = state.num_computed.index_select(0, slots) + slots * columns
        places = newest.unsqueeze(1) + torch.arange(1, self._k + 1, device=slots.device)
        sent = torch.cat((packed, state.token_ids.take(places)), 1)
        self.link.send_results(sent)
        return sent[:, : 2 * self._k + 3]

    def apply_results(
        self, plan: StepPlan, state: RequestState, dropped: Collection[int] = ()
    ) -> Tensor:
        """Receive, on any other stage, what the last one sent by `send_results`, and change `state`
        as it has there, except in the slots `dropped`, which have new owners since. Returns the
        packed results [B, 2K+3].

        Requests of a step must be in no later step until its results are applied.
        """
        k = self._k
        shape = len(plan.slots), 3 * k + 3
        received = torch.empty(shape, dtype=torch.int64, device=state.num_computed.device)
        self.link.receive_results(received)
        kept = [i for i, slot in enumerate(plan.slots.tolist()) if slot not in dropped]
        rows = PlanRows.of(plan, state, kept)
        packed = received if len(kept) == shape[0] else received.index_select(0, rows.places)
        count = packed[:, k + 1].contiguous()
        verdict = Verdict(
            tokens=packed[:, : k + 1].contiguous(),
            num_sampled=count,
            num_rejected=(rows.num_drafts + 1) * rows.samples - count,
            not_finite=packed[:, k + 2].contiguous(),
        )
        commit_tokens(state, rows, verdict)
        if k:
            store_draft(state, rows, Draft(tokens=packed[:, 2 * k + 3 :].contiguous()))
        return received[:, : 2 * k + 3]


def stack(hidden: Tensor, aux: Sequence[Tensor]) -> Tensor:
    """The residual stream [T, D] after a stage and the aux states so far, as one tensor to send,
    [1 + aux states, T, D]."""
    return torch.stack([hidden, *aux])


@dataclass(slots=True, kw_only=True)
class PlanRows:
    """Inputs of committing a step, from its plan and the state before."""

    slots: Tensor  # [B]
    seq_lens: Tensor  # [B]
    num_drafts: Tensor  # [B]
    samples: Tensor  # [B] bool
    places: Tensor  # [B] among all requests of the step

    @classmethod
    def of(cls, plan: StepPlan, state: RequestState, kept: Sequence[int] | None = None) -> PlanRows:
        """Upload a plan's numbers in one copy, for which the host does not wait. kept: places of
        the requests to take; None: all."""
        every = np.arange(len(plan.slots))
        numbers = np.stack([plan.slots, plan.num_rows, plan.num_drafts, plan.samples, every])
        if kept is not None:
            numbers = numbers[:, kept]
        staged = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64))
        if state.num_computed.is_cuda:
            staged = staged.pin_memory()
        placed = staged.to(state.num_computed.device, non_blocking=True)
        slots, num_rows, num_drafts, samples, places = placed.unbind(0)
        return cls(
            slots=slots,
            seq_lens=state.num_computed.index_select(0, slots) + num_rows,
            num_drafts=num_drafts,
            samples=samples.bool(),
            places=places,
        )

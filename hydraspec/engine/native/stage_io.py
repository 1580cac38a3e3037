"""A pipeline stage's ends within a step: what it receives, what it sends, and the results of the
last stage, which every other stage applies to its own state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hydraspec.distributed.stages import StageLink
from hydraspec.engine.native.results import DeviceStep
from hydraspec.engine.native.sizing import Models
from hydraspec.engine.native.state import commit, store_draft
from hydraspec.models.base import TargetModel
from hydraspec.types import Batch, Draft, IntermediateTensors, RequestState, Verdict


class StageIO:
    """Sends and receives for one engine's steps; shapes follow from each step's plan."""

    def __init__(
        self,
        link: StageLink,
        target: TargetModel,
        aux_layer_ids: Sequence[int],
        num_drafts: int,
        max_num_rows: int,
    ) -> None:
        """max_num_rows: of a step, padding included."""
        self.link, self.stage = link, target.stage
        self._width, self._k = target.hidden_size, num_drafts
        self._num_received = 1 + len(target.aux_ids_before(aux_layer_ids))
        size = 0 if self.stage.is_first else self._num_received * max_num_rows * self._width
        # Always the same memory: a graph may read it.
        self._buffer = torch.zeros(size, dtype=target.dtype, device=target.device)

    @classmethod
    def of(cls, models: Models) -> StageIO:
        """For the engine of these models, which are those of a stage."""
        engine, speculator = models.config.engine, models.speculator
        k = speculator.num_speculative_tokens
        assert models.link is not None
        most = max(engine.max_num_batched_tokens, engine.max_num_seqs * (k + 1))
        return cls(models.link, models.target, speculator.aux_layer_ids, k, most)

    def _tensors(self, num_rows: int) -> Tensor:
        """[1 + aux states, T, D] of the buffer."""
        shape = (self._num_received, num_rows, self._width)
        return self._buffer[: shape[0] * shape[1] * shape[2]].view(shape)

    def receive(self, num_rows: int) -> None:
        """What the stage before computed of this step."""
        if not self.stage.is_first:
            self.link.receive(self._tensors(num_rows))

    def received(self, batch: Batch) -> IntermediateTensors | None:
        """What `receive` got, as the forward pass reads it; it may be written to."""
        if self.stage.is_first:
            return None
        stream, *aux = self._tensors(batch.positions.shape[0]).unbind(0)
        return IntermediateTensors(hidden_states=stream, aux_hidden_states=aux)

    def send(self, hidden: Tensor, aux: Sequence[Tensor]) -> None:
        """The stream [T, D] after this stage, and the aux states seen so far."""
        self.link.send(torch.stack([hidden, *aux]))

    def send_results(self, step: DeviceStep) -> None:
        """From the last stage: the verdict of a step, and the drafts for the next one."""
        verdict, batch = step.verdict, step.batch
        drafts = step.draft.tokens if step.draft is not None else batch.draft_tokens
        count, broken = verdict.num_sampled.unsqueeze(1), verdict.not_finite.unsqueeze(1)
        self.link.send_results(torch.cat((verdict.tokens, count, broken, drafts), 1))

    def apply_results(self, batch: Batch, state: RequestState) -> Verdict:
        """On every other stage: receive those results and change the state as the last stage has.

        Requests of a step are in no later one until its results are applied.
        """
        shape, k = (batch.num_requests, 2 * self._k + 3), self._k
        packed = torch.empty(shape, dtype=torch.int64, device=batch.slots.device)
        self.link.receive_results(packed)
        count = packed[:, k + 1].contiguous()
        verdict = Verdict(
            tokens=packed[:, : k + 1].contiguous(),
            num_sampled=count,
            num_rejected=(batch.num_drafts + 1) * batch.samples - count,
            not_finite=packed[:, k + 2].contiguous(),
        )
        commit(state, batch, verdict)
        if k:
            store_draft(state, batch, Draft(tokens=packed[:, k + 3 :].contiguous()))
        return verdict

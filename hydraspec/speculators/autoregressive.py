"""Drafters that propose one token at a time: each step reads the last step's token and state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from hydraspec_kernels.runtime import breaks
from hydraspec_kernels.step_inputs import GroupTables, NewestRows, decode_rows, shifted_tokens
from torch import Tensor

from hydraspec.config.schema import RunConfig
from hydraspec.graphs import Captured, Descriptor, GraphBackend, GraphManager
from hydraspec.graphs.capture import copy_into
from hydraspec.speculators.base import DraftGraphs
from hydraspec.speculators.draft_model import DraftModelSpeculator, step_rows
from hydraspec.types import (
    Batch,
    Draft,
    KVGroupSpec,
    RequestState,
    Rows,
    RowSegment,
    TargetStep,
    Verdict,
)


@dataclass(slots=True)
class DecodeStart:
    """Inputs of the decode pass, which begins after the first draft."""

    row: NewestRows
    tokens: Tensor  # [B] the first drafts
    feedback: Tensor  # [B, H] the next step's hidden states


@dataclass(slots=True, frozen=True)
class DecodeInputs:
    """Inputs of a captured decode pass."""

    start: DecodeStart
    batch: Batch


class AutoRegressiveSpeculator(DraftModelSpeculator):
    """Drafts by a pass over the step's rows, then K-1 decode steps, by default at advancing
    positions.

    Draft row t holds the token at t+1 and the target's state at t; its KV has position t. After a
    step the draft's cache therefore covers exactly the target's computed tokens.

    The first pass is captured with the step. The decode steps are one pass, which is a full graph
    or eager, or part of the step's graph where that holds the whole step.
    """

    owns_kv_cache: ClassVar[bool] = True

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._decode_graphs: GraphManager[DecodeInputs, Draft] | None = None

    def propose(
        self, target_step: TargetStep, verdict: Verdict, batch: Batch, state: RequestState
    ) -> Draft | None:
        length = self.draft_length(batch)
        none_wanted = length == 0 or target_step.logits.shape[0] == 0
        if none_wanted and not self.owns_kv_cache:
            return None
        row = wanted_rows(self.newest_row(verdict, batch, state), batch)
        shared = self.begin(row, batch)
        hidden, feedback = self.first_step(row, shared, target_step, batch, state)
        if none_wanted:  # the draft's cache is filled, and no request needs drafts
            return None
        tokens, probs = self.sample_draft(hidden, batch, state, row.seq_lens, 0)
        first = None if probs is None else probs.unsqueeze(1)
        if length == 1:
            return wanted_drafts(Draft(tokens=tokens.unsqueeze(1), probs=first), batch)
        start = DecodeStart(row, tokens, feedback)
        # A break of piecewise captures: the decode pass has its own graph, or is eager.
        rest = breaks.run(self._decode_pass, start, shared, batch, state)
        if first is not None and rest.probs is not None:
            first = torch.cat((first, rest.probs), 1)
        tokens = torch.cat((tokens.unsqueeze(1), rest.tokens), 1)
        return wanted_drafts(Draft(tokens=tokens, probs=first), batch)

    def begin(self, row: NewestRows, batch: Batch) -> Any:
        """Inputs that all K draft steps share; computed from the newest rows alone.

        By default the start locations [B+1] of steps 1, 2, ..., which have one row per request.
        """
        return torch.arange(batch.num_requests + 1, device=row.rows.device)

    def first_step(
        self,
        row: NewestRows,
        shared: Any,
        target_step: TargetStep,
        batch: Batch,
        state: RequestState,
    ) -> tuple[Tensor, Tensor]:
        """States of the newest rows, for logits [B, H_draft] and for feedback [B, H]."""
        hidden, feedback = self.head.forward(
            target_rows(batch, state, self.draft_specs),
            self.head.combine_target_hidden(target_step),
            self.draft_caches,
            step=0,
        )
        return hidden.index_select(0, row.rows), feedback.index_select(0, row.rows)

    def fill(self, target_step: TargetStep, batch: Batch, state: RequestState) -> None:
        fill_rows(self, target_step, batch, state)

    def next_step(
        self,
        row: NewestRows,
        shared: Any,
        tokens: Tensor,
        feedback: Tensor,
        batch: Batch,
        index: int,
    ) -> tuple[Tensor, Tensor]:
        """States for draft `index`, for logits [B, H_draft] and for feedback [B, H], from draft
        `index` - 1, `tokens` [B], at position p + `index`, with p that of the newest row."""
        rows = single_rows(batch, self.draft_specs, tokens, row, index, shared)
        states: tuple[Tensor, Tensor] = self.head.forward(
            rows, feedback, self.draft_caches, step=index
        )
        return states

    def _decode_pass(
        self, start: DecodeStart, shared: Any, batch: Batch, state: RequestState
    ) -> Draft:
        """Drafts 1 to K-1, [B, K-1], from a graph if there is one; K is `draft_length`."""
        captured = self._captured_for(batch)
        if captured is None:
            return self._decode_steps(start, shared, batch, state)
        copy_into(captured.inputs.start, start)
        return captured.replay()

    def _decode_steps(
        self, start: DecodeStart, shared: Any, batch: Batch, state: RequestState
    ) -> Draft:
        row, last, feedback = start.row, start.tokens, start.feedback
        drafts: list[Tensor] = []
        probs: list[Tensor] = []
        for index in range(1, self.draft_length(batch)):
            hidden, feedback = self.next_step(row, shared, last, feedback, batch, index)
            last, drawn_from = self.sample_draft(hidden, batch, state, row.seq_lens, index)
            drafts.append(last)
            if drawn_from is not None:
                probs.append(drawn_from)
        return Draft(tokens=torch.stack(drafts, 1), probs=torch.stack(probs, 1) if probs else None)

    # ------------------------------------------------------------------ graphs

    def init_cudagraph_manager(self, backend: GraphBackend) -> None:
        if self.num_speculative_tokens > 1:
            self._decode_graphs = GraphManager("draft", backend)

    def capture(self, graphs: DraftGraphs) -> None:
        """Capture the decode pass of greedy drafts; sampled ones run eagerly outside a step's
        graph."""
        manager = self._decode_graphs
        if manager is None:
            return
        inputs = partial(self._static_inputs, graphs.make_batch)
        decode_pass = partial(self._captured_decode_pass, graphs.state)
        manager.capture_all(
            [_one_row_each(size) for size in graphs.sizes],
            lambda each: manager.capture(each, inputs, decode_pass),
        )

    def pause_graphs(self, paused: bool) -> None:
        if self._decode_graphs is not None:
            self._decode_graphs.is_paused = paused

    def padded_requests(self, num_requests: int) -> int:
        if self._decode_graphs is None:
            return num_requests
        captured = self._decode_graphs.dispatch(_one_row_each(num_requests))
        return num_requests if captured is None else captured.descriptor.num_requests

    def _captured_for(self, batch: Batch) -> Captured[DecodeInputs, Draft] | None:
        sampled = self.draws(batch)
        is_shorter = self.draft_length(batch) < self.num_speculative_tokens
        if self._decode_graphs is None or sampled or is_shorter:
            return None
        captured = self._decode_graphs.dispatch(_one_row_each(batch.num_requests))
        fits = captured is not None and captured.descriptor.num_requests == batch.num_requests
        return captured if fits else None

    def _static_inputs(
        self, make_batch: Callable[[int], Batch], descriptor: Descriptor
    ) -> DecodeInputs:
        batch = make_batch(descriptor.num_requests)
        none = torch.zeros_like(batch.slots)
        row = NewestRows(none.clone(), none.clone(), none.clone(), none.clone())
        width = self.head.spec.hidden_width
        feedback = torch.zeros(
            descriptor.num_requests, width, dtype=self.dtype, device=batch.slots.device
        )
        return DecodeInputs(DecodeStart(row, none, feedback), batch)

    def _captured_decode_pass(self, state: RequestState, inputs: DecodeInputs) -> Draft:
        start, batch = inputs.start, inputs.batch
        return self._decode_steps(start, self.begin(start.row, batch), batch, state)


def _one_row_each(num_requests: int) -> Descriptor:
    return Descriptor(num_requests=num_requests, num_rows=num_requests, rows_per_request=1)


def num_busy(batch: Batch) -> int:
    """See RowSegment: half of the requests where drafts are not for all, since that half has as
    many programs then as else all have."""
    return 0 if batch.proposes is None else (batch.num_requests + 1) // 2


def wanted_rows(row: NewestRows, batch: Batch) -> NewestRows:
    """The newest rows with those of requests that want no drafts as padding, which attends to
    nothing and writes nothing."""
    wanted = batch.proposes
    if wanted is None:
        return row
    return replace(row, positions=row.positions * wanted, seq_lens=row.seq_lens * wanted)


def wanted_drafts(draft: Draft, batch: Batch) -> Draft:
    """The drafts of requests that want any, -1 for the others."""
    if batch.proposes is None:
        return draft
    return replace(draft, tokens=draft.tokens.where(batch.proposes.unsqueeze(1), -1))


def target_rows(batch: Batch, state: RequestState, specs: Sequence[KVGroupSpec]) -> Rows:
    """The step's rows as draft rows: each reads the following token, at the same position and cache
    row.

    A prompt row reads the next prompt token, or the encoder's output where that is an image's and
    the head asks for it; the newest row reads the token sampled after it. Rows of rejected drafts
    read arbitrary tokens; their KV is overwritten before any row may see it.
    """
    tokens = shifted_tokens(
        state.token_ids, batch.slots, batch.row_request, batch.positions, padded=batch.has_padding
    )
    rows = step_rows(batch, specs, tokens)
    rows.encoded = batch.next_encoded
    return rows


def fill_rows(
    drafter: DraftModelSpeculator, target_step: TargetStep, batch: Batch, state: RequestState
) -> None:
    """Run a drafter's head over a batch's rows for the KV that it writes."""
    drafter.head.forward(
        target_rows(batch, state, drafter.draft_specs),
        drafter.head.combine_target_hidden(target_step),
        drafter.draft_caches,
        step=0,
    )


def single_rows(
    batch: Batch,
    specs: Sequence[KVGroupSpec],
    tokens: Tensor,
    row: NewestRows,
    lookahead: int,
    query_start_loc: Tensor,
) -> Rows:
    """Draft rows, one per request, `lookahead` positions after its newest row; `tokens` [B] are
    their inputs."""
    tables = batch.block_tables[len(batch.block_tables) - len(specs) :]
    padded = batch.has_padding or batch.proposes is not None
    max_seq_len = max(segment.max_seq_len for segment in batch.segments) + lookahead
    groups = GroupTables(tables, [spec.block_size for spec in specs])
    rows = decode_rows(row.positions, row.seq_lens, lookahead, groups, padded=padded)
    return Rows(
        segments=(RowSegment(0, 0, batch.num_requests, 1, max_seq_len, num_busy(batch)),),
        input_ids=tokens,
        positions=rows.positions,
        seq_lens=rows.seq_lens,
        slot_mapping=rows.slot_mapping,
        block_tables=tables,
        query_start_loc=query_start_loc,
        has_padding=padded,
    )

"""The records of input preparation; all tensors int64 unless they say otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(slots=True, frozen=True, kw_only=True)
class RowLayout:
    """Assignment of the T rows of a step to its B requests."""

    num_rows: Tensor  # [B]
    num_drafts: Tensor  # [B]
    row_request: Tensor  # [T] batch index of the request a row belongs to, -1 for padding
    row_offset: Tensor  # [T] place of the row within its request's rows


@dataclass(slots=True, frozen=True)
class GroupTables:
    """The block tables of the KV groups that a pass writes."""

    tables: Sequence[Tensor]  # per group [B, P]
    block_sizes: Sequence[int]

    @property
    def widths(self) -> tuple[int, ...]:
        """Number P of blocks in a table row of each group."""
        return tuple(table.shape[1] for table in self.tables)


class LaidBatch(Protocol):
    """A step's requests and where their rows start: a part of `hydraspec.types.Batch`."""

    query_start_loc: Tensor  # [B+1] first row of each request
    seq_lens: Tensor  # [B]
    slots: Tensor  # [B]


@dataclass(slots=True)
class StepInputs:
    """Inputs of the target's forward pass."""

    input_ids: Tensor  # [T]
    positions: Tensor  # [T]
    seq_lens: Tensor  # [B]
    draft_tokens: Tensor  # [B, K], -1 where there is no draft
    slot_mapping: list[Tensor]  # per KV group [T]


@dataclass(slots=True)
class NewestRows:
    """Newest computed row of each request, from which drafting starts."""

    rows: Tensor  # [B] the row's place among the step's T rows
    token_ids: Tensor  # [B] the token sampled after the row
    positions: Tensor  # [B] the row's position p
    seq_lens: Tensor  # [B] valid target KV, p + 1


@dataclass(slots=True)
class DecodeRows:
    """Inputs of a pass with a row per request."""

    positions: Tensor  # [B]
    seq_lens: Tensor  # [B]
    slot_mapping: list[Tensor]  # per KV group [B]


@dataclass(slots=True)
class BlockRows:
    """Inputs of a pass with R rows per request, which follow its valid tokens; T' = B * R."""

    input_ids: Tensor  # [T']
    positions: Tensor  # [T']
    seq_lens: Tensor  # [B], with these rows
    query_start_loc: Tensor  # [B+1]
    slot_mapping: list[Tensor]  # per KV group [T']


@dataclass(slots=True)
class ParallelLayout:
    """The rows of a pass that proposes everything at once; T' = T + B * masks."""

    input_ids: Tensor  # [T']
    positions: Tensor  # [T']
    source: Tensor  # [T'] the step's row that a row takes its hidden state from; any for masks
    is_valid: Tensor  # [T'] bool: one of the target's rows that was not rejected
    newest: Tensor  # [B] the row of each request that yields its first draft
    seq_lens: Tensor  # [B]
    slot_mapping: list[Tensor]  # per KV group [T']


def new_cache_rows(like: Tensor, num_groups: int, num_rows: int) -> tuple[Tensor, list[Tensor]]:
    """Unwritten cache rows of all KV groups, as one tensor and as G times [T].

    Each of the G begins at a multiple of 16 bytes, because kernels are compiled for aligned
    pointers, and once more if a pointer is not.
    """
    stored = like.new_empty(num_groups, num_rows + num_rows % 2)
    return stored, list(stored[:, :num_rows].unbind(0))

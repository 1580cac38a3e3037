"""Block drafters: one pass over the newest token and K mask tokens, which see each other and the
context features of all tokens before them (DFlash, arXiv 2602.06036).
"""

from __future__ import annotations

from typing import ClassVar

from hydraspec_kernels.step_inputs import GroupTables, block_rows
from torch import Tensor

from hydraspec.config.schema import PerStep
from hydraspec.errors import ConfigurationError
from hydraspec.models.base import TargetModel
from hydraspec.models.block_drafter.head import BlockHead
from hydraspec.models.block_drafter.loading import load_block_drafter
from hydraspec.speculators.draft_model import step_rows
from hydraspec.speculators.parallel import ParallelSpeculator
from hydraspec.types import Batch, RequestState, Rows, RowSegment, TargetStep, Verdict


class BlockSpeculator(ParallelSpeculator):
    """The drafter of `method=dflash`.

    Every step writes the context KV of its own rows, then the KV of a block after each request's
    valid rows. Rejected rows and blocks are written over before any later row sees them.
    """

    # KV of a row depends on the target's states there, and on no later token.
    num_following_tokens: ClassVar[int] = 0
    may_rest: ClassVar[bool] = True
    head: BlockHead

    def load_draft_model(self, target: TargetModel, checkpoint: str) -> BlockHead:
        method = self.config.method
        head = load_block_drafter(
            checkpoint,
            method=method.name,
            weights=method.weights.value,
            target=target,
            seed=self.config.seed,
        )
        most = head.config.most_drafts
        if method.most_drafts > most:
            is_chosen = isinstance(method.num_speculative_tokens, PerStep)
            key = "max_speculative_tokens" if is_chosen else "num_speculative_tokens"
            raise ConfigurationError(
                f"method.{key}={method.most_drafts} is above what a block of "
                f"drafter {checkpoint!r} holds (block_size {head.config.block_size})\n"
                f"  allowed: 1 to {most}\n  to do: lower it, or choose another drafter"
            )
        return head

    @property
    def reads_all_hidden_states(self) -> bool:
        """Returns False: context features come from aux states."""
        return False

    @property
    def draft_vocab_map(self) -> Tensor | None:
        return self.head.vocab_map

    @property
    def num_lookahead_tokens(self) -> int:
        """Positions after a request's rows that a block takes."""
        return self._block_rows(self.num_speculative_tokens)

    def _block_rows(self, k: int) -> int:
        return k if self.head.config.samples_anchor else k + 1

    def draft_states(
        self, target_step: TargetStep, verdict: Verdict, batch: Batch, state: RequestState
    ) -> Tensor | None:
        states = self.block_states(target_step, verdict, batch, state)
        # Row i is at position p + 1 + i; it predicts its own position, or the next one.
        return None if states is None else states[:, -self.draft_length(batch) :]

    def block_states(
        self, target_step: TargetStep, verdict: Verdict, batch: Batch, state: RequestState
    ) -> Tensor | None:
        """States [B, R, D] of whole blocks, after the step's context is written; None where no
        request needs drafts."""
        self.fill(target_step, batch, state)
        if not self.needs_drafts(target_step, batch):
            return None
        rows = self.lay_out(verdict, batch, state)
        states = self.head.draft_block(rows, self.draft_caches)
        return states.view(batch.num_requests, -1, states.shape[1])

    def fill(self, target_step: TargetStep, batch: Batch, state: RequestState) -> None:
        context = step_rows(batch, self.draft_specs, batch.input_ids)
        features = self.head.context_features(target_step)
        self.head.write_context(context, features, self.draft_caches)

    def lay_out(self, verdict: Verdict, batch: Batch, state: RequestState) -> Rows:
        """The rows of all requests' blocks, from host-known counts and the verdict on the
        device."""
        num_rows, b = self._block_rows(self.draft_length(batch)), batch.num_requests
        tables = batch.block_tables[len(batch.block_tables) - len(self.draft_specs) :]
        newest = self.newest_row(verdict, batch, state)
        laid = block_rows(
            newest.token_ids,
            newest.seq_lens,
            GroupTables(tables, [spec.block_size for spec in self.draft_specs]),
            num_rows=num_rows,
            mask_token_id=self.head.config.mask_token_id,
            padded=batch.has_padding,
        )
        longest = max(segment.max_seq_len for segment in batch.segments)
        return Rows(
            segments=(RowSegment(0, 0, b, num_rows, longest + num_rows),),
            input_ids=laid.input_ids,
            positions=laid.positions,
            seq_lens=laid.seq_lens,
            slot_mapping=laid.slot_mapping,
            block_tables=tables,
            query_start_loc=laid.query_start_loc,
            has_padding=batch.has_padding,
        )

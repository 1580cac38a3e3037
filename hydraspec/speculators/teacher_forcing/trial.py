"""A drafter under one set of conventions, and the drafts it makes from every place of the texts.

Drafting is teacher-forced: step j reads the target's own tokens, which are its earlier drafts as
long as those were accepted. So the leading drafts that are right are exactly those a run accepts.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor

from hydraspec.models.draft_spec import DraftSpec
from hydraspec.speculators.draft_model import DraftModelSpeculator
from hydraspec.speculators.teacher_forcing.texts import BLOCK, Texts
from hydraspec.types import KVGroupSpec, Rows, RowSegment, TargetStep

CHAINS_AT_ONCE = 256
Kind = Literal["own_cache", "parallel", "target_cache", "block"]


@dataclass(slots=True, frozen=True, kw_only=True)
class Trial:
    """A draft head with its flags and weights, and how it is fed; the defaults are the engine's."""

    head: Any
    kind: Kind
    aux_ids: tuple[int, ...] = ()
    token_shift: int = 1  # the row of position t reads the token at t + token_shift
    state_shift: int = 0  # and the target's state at t + state_shift
    reads_normed: bool = True  # final states after the final norm; false: before it
    step_gap: int = 0  # added to the rotary positions of steps 1, 2, ..., or of a block's rows
    advances: bool = True  # rotary positions grow with the step
    kv_layers_back: int = 0  # target_cache: reads so many layers before the last of each kind

    @classmethod
    def of(cls, head: Any) -> Trial:
        """A loaded draft head as the engine uses it."""
        spec: DraftSpec = head.spec
        if spec.kv_mode == "target":
            return cls(head=head, kind="target_cache")
        kind: Kind = "own_cache" if spec.mask_token_id is None else "parallel"
        if spec.block_size is not None:
            kind = "block"
        return cls(head=head, kind=kind, aux_ids=spec.aux_layer_ids)


def can_be_forced(speculator: object) -> TypeGuard[DraftModelSpeculator]:
    """Returns whether a drafter can be teacher-forced: it has a head with a DraftSpec and with the
    methods that draft from given tokens and states."""
    if not isinstance(speculator, DraftModelSpeculator):
        return False
    needed: tuple[str, ...] = ("read_from", "begin", "step")
    mode = getattr(speculator.spec, "kv_mode", None)
    if mode is None:
        return False
    if getattr(speculator.spec, "block_size", None) is not None:
        needed = ("kv_groups", "context_features", "write_context", "draft_block")
    elif mode != "target":
        needed = ("kv_groups", "combine_target_hidden", "forward")
    return all(hasattr(speculator.head, name) for name in needed)


@dataclass(slots=True, frozen=True)
class StepStates:
    """Outputs of a draft step for some chains: states [n, H_draft] for the head's logits."""

    step: int
    chains: slice
    states: Tensor
    # [n, V_draft] of a head that adds to the logits of its states what the token before says
    biased: Tensor | None = None

    def logits(self, head: Any) -> Tensor:
        """Logits [n, V_draft] of the step's drafts."""
        found: Tensor = head.compute_logits(self.states) if self.biased is None else self.biased
        return found

    def tokens(self, head: Any) -> Tensor:
        """The head's best tokens [n], as ids of the target's vocabulary."""
        found: Tensor
        if self.biased is None:
            found = head.greedy_tokens(self.states)
        else:
            found = head.target_ids(self.biased.argmax(-1))
        return found


def draft_states(trial: Trial, texts: Texts, k: int) -> Iterator[StepStates]:
    """The states of all chains and K steps, in pieces of at most CHAINS_AT_ONCE chains."""
    if trial.kind == "target_cache":
        yield from _over_target_cache(trial, texts, k)
        return
    if trial.kind == "block":
        yield from _over_blocks(trial, texts, k)
        return
    head = copy(trial.head)
    specs = head.kv_groups(BLOCK, 0)
    own = -(-(BLOCK - 1 + k) // BLOCK)  # blocks of a chain that are not shared with its text
    num_chains = min(CHAINS_AT_ONCE, texts.chains.count)
    caches = _new_caches(specs, texts.num_blocks + num_chains * own, texts.final)
    tokens, hidden = _tokens(trial, texts), _hidden(trial, texts)
    groups = len(specs)
    rows = replace(
        texts.rows,
        input_ids=tokens,
        slot_mapping=texts.rows.slot_mapping[:1] * groups,
        block_tables=texts.rows.block_tables[:1] * groups,
        encoded=texts.next_encoded if trial.head.spec.supports_mm_inputs else None,
    )
    states, feedback = head.forward(rows, hidden, caches, step=0)
    for part in _parts(texts.chains.count):
        chains = _ChainRows.of(texts, part, own)
        chains.copy_blocks(caches)
        if trial.kind == "parallel":
            ids = tokens[chains.row]
            yield from _parallel(head, chains, part, (ids, hidden[chains.row]), caches, k)
            continue
        first = texts.chains.row[part]
        yield StepStates(0, part, states.index_select(0, first))
        fed = feedback.index_select(0, first)
        for step in range(1, k):
            rotary = chains.position + (step if trial.advances else 0) + trial.step_gap
            ids = texts.rows.input_ids[chains.row + step + trial.token_shift]
            found, fed = head.forward(
                chains.single(ids, rotary, step, groups), fed, caches, step=step
            )
            yield StepStates(step, part, found)


def _parts(count: int) -> Iterator[slice]:
    for start in range(0, count, CHAINS_AT_ONCE):
        yield slice(start, min(start + CHAINS_AT_ONCE, count))


def _new_caches(specs: list[KVGroupSpec], num_blocks: int, like: Tensor) -> list[Tensor]:
    """Zeroed KV caches of the layers, in their order."""
    shapes = {layer: spec.shape.page_row for spec in specs for layer in spec.layers}
    return [like.new_zeros(num_blocks * BLOCK, *shapes[layer]) for layer in sorted(shapes)]


# ------------------------------------------------------------------ what rows read


def _shifted(texts: Texts, values: Tensor, by: int) -> Tensor:
    """The values [T, ...] of the row `by` places further in the same text, for each row; those of
    the text's first or last row beyond its ends."""
    if by == 0:
        return values
    lens = texts.rows.seq_lens
    first = torch.repeat_interleave(texts.first_row, lens)
    last = first + torch.repeat_interleave(lens, lens) - 1
    here = torch.arange(values.shape[0], device=values.device) + by
    return values.index_select(0, here.clamp(min=first, max=last))


def _tokens(trial: Trial, texts: Texts) -> Tensor:
    return _shifted(texts, texts.rows.input_ids, trial.token_shift)


def _final_states(trial: Trial, texts: Texts) -> Tensor:
    final = texts.final if trial.reads_normed else texts.states[texts.num_layers]
    return _shifted(texts, final, trial.state_shift)


def _target_step(trial: Trial, texts: Texts) -> TargetStep:
    states = [_shifted(texts, texts.states[i], trial.state_shift) for i in trial.aux_ids]
    final = _final_states(trial, texts)
    return TargetStep(hidden_states=final, logits=final[:0], aux_hidden_states=states)


def _hidden(trial: Trial, texts: Texts) -> Tensor:
    hidden: Tensor = trial.head.combine_target_hidden(_target_step(trial, texts))
    return hidden


# ------------------------------------------------------------------ rows of chains


@dataclass(slots=True, kw_only=True)
class _ChainRows:
    """Some chains as requests: they share the blocks of their text before the one that holds p, and
    have copies from there on.
    """

    position: Tensor  # [n] p
    row: Tensor  # [n]
    table: Tensor  # [n, P']
    shared: Tensor  # [n] the text's block that holds p
    own: Tensor  # [n, blocks]
    max_seq_len: int

    @classmethod
    def of(cls, texts: Texts, part: slice, num_own: int) -> _ChainRows:
        chains = texts.chains
        position, owner = chains.position[part], chains.text[part]
        n, device = len(position), position.device
        own = texts.num_blocks + torch.arange(n * num_own, device=device).view(n, num_own)
        table = torch.nn.functional.pad(texts.table[owner], (0, num_own))
        block = position // BLOCK
        shared = table.gather(1, block[:, None])[:, 0]
        columns = block[:, None] + torch.arange(num_own, device=device)
        return cls(
            position=position,
            row=chains.row[part],
            table=table.scatter(1, columns, own),
            shared=shared,
            own=own,
            max_seq_len=int(position.max()) + 1,
        )

    def copy_blocks(self, caches: list[Tensor]) -> None:
        """Copy the text's block that holds p to each chain's first own block, in every cache."""
        for cache in caches:
            blocks = cache.view(-1, BLOCK, *cache.shape[1:])
            blocks.index_copy_(0, self.own[:, 0], blocks.index_select(0, self.shared))

    def slots(self, at: Tensor) -> Tensor:
        """The cache rows of positions at [n] or [n, m]."""
        block = at // BLOCK
        found = self.table.gather(1, block.view(len(block), -1)).view(at.shape)
        return found * BLOCK + at % BLOCK

    def single(self, ids: Tensor, rotary: Tensor, step: int, groups: int) -> Rows:
        """Rows, one per chain, at cache position p + step and rotary position `rotary` [n]. (The
        mask of a single row comes from its sequence length alone.)
        """
        at, n = self.position + step, len(self.position)
        return Rows(
            segments=(RowSegment(0, 0, n, 1, self.max_seq_len + step),),
            input_ids=ids,
            positions=rotary.clamp(min=0),
            seq_lens=at + 1,
            slot_mapping=[self.slots(at)] * groups,
            block_tables=[self.table] * groups,
            query_start_loc=torch.arange(n + 1, device=at.device),
        )

    def several(self, ids: Tensor, k: int, groups: int, *, first: int = 0, gap: int = 0) -> Rows:
        """Rows, K per chain, from cache position p + first on; ids [n, K]. gap: added to rotary
        positions."""
        n = len(self.position)
        at = self.position[:, None] + first + torch.arange(k, device=ids.device)
        return Rows(
            segments=(RowSegment(0, 0, n, k, self.max_seq_len + first + k - 1),),
            input_ids=ids.reshape(-1),
            positions=(at + gap).clamp(min=0).reshape(-1),
            seq_lens=self.position + first + k,
            slot_mapping=[self.slots(at).reshape(-1)] * groups,
            block_tables=[self.table] * groups,
            query_start_loc=torch.arange(n + 1, device=ids.device) * k,
        )


def _parallel(
    head: Any,
    chains: _ChainRows,
    part: slice,
    newest: tuple[Tensor, Tensor],  # ids [n] and hidden states [n, H] of the newest rows
    caches: list[Tensor],
    k: int,
) -> Iterator[StepStates]:
    """States of P-EAGLE's K steps: the newest row and K - 1 mask rows in one pass."""
    ids, hidden = newest
    n = len(ids)
    masks = torch.full((n, k - 1), head.spec.mask_token_id, device=ids.device)
    states = hidden[:, None].repeat(1, k, 1)
    states[:, 1:] = head.mask_hidden
    rows = chains.several(torch.cat((ids[:, None], masks), 1), k, len(head.groups))
    found, _ = head.forward(rows, states.view(n * k, -1), caches, step=0)
    for step, each in enumerate(found.view(n, k, -1).unbind(1)):
        yield StepStates(step, part, each)


def _over_blocks(trial: Trial, texts: Texts, k: int) -> Iterator[StepStates]:
    """States of a block drafter's K drafts: a block at p + 1 over the features of rows 0..p."""
    head = copy(trial.head)
    specs = head.kv_groups(BLOCK, 0)
    groups, num_rows = len(specs), k + (not head.config.samples_anchor)
    own = -(-(BLOCK + num_rows) // BLOCK)  # blocks of a chain that are not shared with its text
    num_chains = min(CHAINS_AT_ONCE, texts.chains.count)
    caches = _new_caches(specs, texts.num_blocks + num_chains * own, texts.final)
    context = replace(
        texts.rows,
        slot_mapping=texts.rows.slot_mapping[:1] * groups,
        block_tables=texts.rows.block_tables[:1] * groups,
        encoded=None,
    )
    head.write_context(context, head.context_features(_target_step(trial, texts)), caches)
    tokens = _tokens(trial, texts)
    for part in _parts(texts.chains.count):
        chains = _ChainRows.of(texts, part, own)
        chains.copy_blocks(caches)
        newest = tokens[chains.row]
        ids = newest[:, None].repeat(1, num_rows)
        ids[:, 1:] = head.spec.mask_token_id
        rows = chains.several(ids, num_rows, groups, first=1, gap=trial.step_gap)
        states = head.draft_block(rows, caches).view(len(newest), num_rows, -1)
        if head.markov is None and head.selector is None:
            for step, each in enumerate(states[:, -k:].unbind(1)):
                yield StepStates(step, part, each)
            continue
        truth = texts.chains.truth[part]
        found = _given_tokens(head, states, newest, truth)
        for step, (each, logits) in enumerate(zip(states[:, -k:].unbind(1), found, strict=True)):
            yield StepStates(step, part, each, logits)


def _given_tokens(head: Any, states: Tensor, newest: Tensor, truth: Tensor) -> list[Tensor]:
    """Logits [n, V_draft] of each draft that is chosen in view of the one before it, after the
    target's own tokens [n, K]."""
    found: list[Tensor] = []
    if head.selector is not None:
        candidates = head.candidates(states[:, -truth.shape[1] :])
        before = torch.cat((newest[:, None], truth[:, :-1].clamp(min=0)), 1)
        return [head.candidate_logits(candidates, i, b) for i, b in enumerate(before.unbind(1))]

    def follow(columns: Tensor, index: int) -> tuple[Tensor, None]:
        found.append(head.vocabulary.whole(columns))
        return truth[:, index].clamp(min=0), None

    for _ in head.in_turn(states, newest, truth.shape[1], follow):
        pass
    return found


def _over_target_cache(trial: Trial, texts: Texts, k: int) -> Iterator[StepStates]:
    """States of the K steps of Gemma 4's assistant, each of which reads the target's KV of 0..p."""
    head = copy(trial.head)
    back = trial.kv_layers_back
    head.read_from([replace(s, layers=s.layers[: len(s.layers) - back]) for s in texts.specs])
    final, tokens = _final_states(trial, texts), texts.rows.input_ids
    for part in _parts(texts.chains.count):
        position, row = texts.chains.position[part], texts.chains.row[part]
        table = texts.table[texts.chains.text[part]]
        context = head.begin(
            (position + trial.step_gap).clamp(min=0),
            position + 1,
            [table] * len(texts.specs),
            int(position.max()) + 1,
            texts.caches,
        )
        states, fed = head.step(context, tokens[row + trial.token_shift], final, row)
        yield StepStates(0, part, states)
        for step in range(1, k):
            states, fed = head.step(context, tokens[row + step + trial.token_shift], fed)
            yield StepStates(step, part, states)

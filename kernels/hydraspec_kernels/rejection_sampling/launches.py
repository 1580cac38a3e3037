"""The launches of `kernel.py` in their order, and the numbers they pass on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hydraspec_kernels.launch.kernel import dependent_launch
from hydraspec_kernels.rejection_sampling import Rule
from hydraspec_kernels.rejection_sampling.kernel import (
    accept,
    chunk_statistics,
    chunk_surplus,
    emit,
    race_of_chunks,
    row_statistics,
)
from hydraspec_kernels.verification import Verified

MAX_BLOCK = 4096  # numbers of a row that one program reads
MAX_RACE_BLOCK = 2048  # fewer where it draws in float64


@dataclass(slots=True, frozen=True)
class Given:
    """What is verified, for all launches; the fields are those of `verify_sampled`."""

    logits: Tensor
    verify_rows: Tensor
    drafts: Tensor
    num_drafts: Tensor
    samples: Tensor  # [B] int8
    seq_lens: Tensor
    slots: Tensor
    temperature: Tensor
    seed: Tensor
    draft_probs: Tensor | None
    draft_index: Tensor | None  # [V] int32 the target's tokens in the drafter's vocabulary

    @property
    def draft_width(self) -> int:
        """V', the drafter's vocabulary."""
        return self.logits.shape[1] if self.draft_probs is None else self.draft_probs.shape[2]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """B, K, V."""
        return (*self.drafts.shape, self.logits.shape[1])

    def floats(self, *shape: int) -> Tensor:
        return self.logits.new_empty(shape, dtype=torch.float32)

    def ints(self, *shape: int) -> Tensor:
        return self.logits.new_empty(shape, dtype=torch.int32)

    def chunks(self, most: int) -> tuple[int, int]:
        """Numbers of a row in one program, and programs a row."""
        vocab_size = self.logits.shape[1]
        block = min(_power_of_two(vocab_size), most)
        return block, -(-vocab_size // block)


@dataclass(slots=True, frozen=True)
class Statistics:
    """Rows of logits in brief; nothing stands where no request needs the row."""

    peak: Tensor  # [B, K+1] float32
    mass: Tensor  # [B, K+1] float32 relative to the peak
    best: Tensor  # [B, K+1] int32
    target: Tensor  # [B, K] float32 p of each draft
    draft: Tensor | None  # [B, K] float32 q of each draft; None: 1


@dataclass(slots=True, frozen=True)
class Accepted:
    """How far drafts are accepted and what the next token comes from."""

    count: Tensor  # [B] int32
    is_recovery: Tensor  # [B] int32
    scale: Tensor  # [B] float32


def verify_sampled_launches(
    logits: Tensor,
    verify_rows: Tensor,
    draft_tokens: Tensor,
    num_drafts: Tensor,
    samples: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    temperature: Tensor,
    seed: Tensor,
    draft_probs: Tensor | None,
    rule: Rule,
    acceptance_length: float,
    draft_vocab_map: Tensor | None,
    is_truncated: bool,
) -> Verified:
    """See `rejection_sampling.verify_sampled`."""
    if draft_tokens.shape[1] == 0:
        draft_probs = None
    draft_index = None
    if draft_probs is not None and draft_vocab_map is not None:
        draft_index = _places(draft_vocab_map, logits.shape[1])
    given = Given(
        logits, verify_rows, draft_tokens, num_drafts, samples.view(torch.int8), seq_lens, slots,
        temperature, seed, draft_probs, draft_index,
    )  # fmt: skip
    _check(given)
    statistics = _statistics(given)
    accepted = _accept(given, statistics, rule, acceptance_length - 1)
    return _emit(given, statistics, accepted, is_truncated)


def _places(draft_vocab_map: Tensor, vocab_size: int) -> Tensor:
    """[V] int32: where the map [V'] names each id, -1 where it does not."""
    places = draft_vocab_map.new_full((vocab_size,), -1, dtype=torch.int32)
    every = torch.arange(len(draft_vocab_map), dtype=torch.int32, device=places.device)
    return places.index_copy_(0, draft_vocab_map, every)


def _check(given: Given) -> None:
    """Rows of logits may be apart; all else is contiguous, and drafts have the target's width, or
    places there."""
    g = given
    assert g.logits.stride(1) == 1, g.logits.stride()
    tensors = (g.verify_rows, g.drafts, g.num_drafts, g.seq_lens, g.slots, g.temperature, g.seed)
    for tensor in tensors:
        assert tensor.is_contiguous(), tensor.stride()
    if g.draft_probs is not None:
        assert g.draft_probs.is_contiguous()
        assert g.draft_probs.shape[1] == g.drafts.shape[1], "other drafts"
        is_whole = g.draft_width == g.logits.shape[1]
        assert is_whole or g.draft_index is not None, "draft and target vocabularies differ"


def _statistics(g: Given) -> Statistics:
    b, k, v = g.sizes
    block, chunks = g.chunks(MAX_BLOCK)
    launch, stride = dependent_launch(g.logits), g.logits.stride(0)
    about = (g.verify_rows, g.num_drafts, g.samples, g.slots, g.temperature)
    peaks, masses = g.floats(b, k + 1, chunks), g.floats(b, k + 1, chunks)
    ids = g.ints(b, k + 1, chunks)
    chunk_statistics[(chunks, b * (k + 1))](
        peaks, masses, ids, g.logits, *about, stride, v, chunks,
        K=k, BLOCK=block, num_warps=8, **launch,
    )  # fmt: skip
    draft = None if g.draft_probs is None else g.floats(b, k)
    out = Statistics(
        g.floats(b, k + 1), g.floats(b, k + 1), g.ints(b, k + 1), g.floats(b, k), draft
    )
    row_statistics[(b * (k + 1),)](
        out.peak, out.mass, out.best, out.target, draft, peaks, masses, ids, g.logits,
        g.draft_probs, g.draft_index, g.drafts, *about, stride, v, g.draft_width, chunks,
        K=k, CHUNKS=_power_of_two(chunks), num_warps=2, **launch,
    )  # fmt: skip
    return out


def _accept(g: Given, s: Statistics, rule: Rule, mean_accepted: float) -> Accepted:
    b, k, v = g.sizes
    block, chunks = g.chunks(MAX_BLOCK)
    launch, surplus = dependent_launch(g.logits), s.target  # not read unless it is written
    if rule is Rule.BLOCK and g.draft_probs is not None and k > 1:
        surplus = g.floats(b, k, chunks)
        chunk_surplus[(chunks, b * (k - 1))](
            surplus, s.target, s.draft, s.peak, s.mass, g.logits, g.draft_probs, g.draft_index,
            g.drafts, g.verify_rows, g.samples, g.slots, g.temperature, g.logits.stride(0), v,
            g.draft_width, chunks, K=k, BLOCK=block, num_warps=8, **launch,
        )  # fmt: skip
    out = Accepted(g.ints(b), g.ints(b), g.floats(b))
    accept[(b,)](
        out.count, out.is_recovery, out.scale, s.target, s.draft, surplus, g.drafts,
        g.num_drafts, g.samples, g.seq_lens, g.slots, g.seed, chunks,
        RULE=int(rule), MEAN_ACCEPTED=mean_accepted if rule is Rule.AT_RATE else None, K=k,
        CHUNKS=_power_of_two(chunks), num_warps=2, **launch,
    )  # fmt: skip
    return out


def _emit(g: Given, s: Statistics, a: Accepted, is_truncated: bool) -> Verified:
    b, k, v = g.sizes
    block, chunks = g.chunks(MAX_RACE_BLOCK)
    launch = dependent_launch(g.logits)
    ratios = g.logits.new_empty(2, b, chunks, dtype=torch.float64)
    ids = g.ints(2, b, chunks)
    race_of_chunks[(chunks, b)](
        ratios, ids, a.count, a.is_recovery, a.scale, s.peak, s.mass, g.logits, g.draft_probs,
        g.draft_index, g.drafts, g.verify_rows, g.num_drafts, g.samples, g.seq_lens, g.slots,
        g.temperature, g.seed, g.logits.stride(0), v, g.draft_width, chunks,
        K=k, BLOCK=block, TRUNCATED=is_truncated, num_warps=8, **launch,
    )  # fmt: skip
    out = Verified(
        tokens=g.num_drafts.new_empty(b, k + 1),
        num_sampled=torch.empty_like(g.num_drafts),
        num_rejected=torch.empty_like(g.num_drafts),
    )
    emit[(b,)](
        out.tokens, out.num_sampled, out.num_rejected, ratios, ids, a.count, s.best, g.drafts,
        g.num_drafts, g.samples, g.slots, g.temperature, chunks,
        K=k, WIDTH=_power_of_two(k + 1), CHUNKS=_power_of_two(chunks), num_warps=2, **launch,
    )  # fmt: skip
    return out


def _power_of_two(n: int) -> int:
    """The least power of two from n on."""
    return 1 << (n - 1).bit_length()

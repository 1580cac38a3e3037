"""The launches of `kernel.py` in their order, and the numbers they pass on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hydraspec_kernels.runtime.launch_kernel import dependent_launch
from hydraspec_kernels.sampling.rejection import Rule
from hydraspec_kernels.sampling.rejection.kernel import (
    accept,
    chunk_statistics,
    emit,
    residual_of_chunks,
    row_statistics,
)
from hydraspec_kernels.sampling.token_choice.reference import CHUNK, FIRST_CHUNK
from hydraspec_kernels.sampling.verification import Verified

CHUNKS_EACH = 2  # chunks of a row that one program reads


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

    @property
    def num_chunks(self) -> int:
        """Of a row."""
        return -(-self.logits.shape[1] // CHUNK)


@dataclass(slots=True, frozen=True)
class Statistics:
    """Rows of logits in brief; nothing stands where no request needs the row."""

    peaks: Tensor  # [B, K+1, C] float32
    masses: Tensor  # [B, K+1, C] float32 relative to the chunk's peak; not of greedy rows
    peak: Tensor  # [B, K+1] float32
    mass: Tensor  # [B, K+1] float32 relative to the peak; not of greedy rows
    best: Tensor  # [B, K+1] int32; of greedy rows only
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
    if draft_tokens.shape[1] == 0 or rule is Rule.AT_RATE:
        draft_probs = None  # is not asked
    draft_index = None
    if draft_probs is not None and draft_vocab_map is not None:
        draft_index = _places(draft_vocab_map, logits.shape[1])
    given = Given(
        logits, verify_rows, draft_tokens, num_drafts, samples.view(torch.int8), seq_lens, slots,
        temperature, seed, draft_probs, draft_index,
    )  # fmt: skip
    _check(given)
    statistics, residuals = _statistics(given), None
    if draft_probs is not None and rule is Rule.BLOCK:
        residuals = _residuals(given, statistics, None, is_truncated)
    accepted = _accept(given, statistics, residuals, rule, acceptance_length - 1)
    if draft_probs is not None and rule is Rule.STANDARD:
        residuals = _residuals(given, statistics, accepted, is_truncated)
    return _emit(given, statistics, accepted, residuals)


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
    chunks, launch, stride = g.num_chunks, dependent_launch(g.logits), g.logits.stride(0)
    about = (g.verify_rows, g.num_drafts, g.samples, g.slots, g.temperature)
    peaks, masses = g.floats(b, k + 1, chunks), g.floats(b, k + 1, chunks)
    ids = g.ints(b, k + 1, chunks)
    chunk_statistics[(-(-chunks // CHUNKS_EACH), b * (k + 1))](
        peaks, masses, ids, g.logits, *about, stride, v, chunks,
        K=k, CHUNKS=CHUNKS_EACH, CHUNK=CHUNK, num_warps=2, **launch,
    )  # fmt: skip
    draft = None if g.draft_probs is None else g.floats(b, k)
    out = Statistics(
        peaks, masses, g.floats(b, k + 1), g.floats(b, k + 1), g.ints(b, k + 1), g.floats(b, k),
        draft,
    )  # fmt: skip
    row_statistics[(b * (k + 1),)](
        out.peak, out.mass, out.best, out.target, draft, peaks, masses, ids, g.logits,
        g.draft_probs, g.draft_index, g.drafts, *about, stride, v, g.draft_width, chunks,
        K=k, CHUNKS=_power_of_two(chunks), num_warps=2, **launch,
    )  # fmt: skip
    return out


def _residuals(g: Given, s: Statistics, a: Accepted | None, is_truncated: bool) -> Tensor:
    """[B, K, C] of the row that each request draws from, or of all that acceptance looks at."""
    (b, k, v), chunks = g.sizes, g.num_chunks
    residuals = g.floats(b, k, chunks)
    accepted, is_recovery, rows = (None, None, k) if a is None else (a.count, a.is_recovery, 1)
    residual_of_chunks[(-(-chunks // CHUNKS_EACH), b * rows)](
        residuals, accepted, is_recovery, s.target, s.draft, s.peak, s.mass, g.logits,
        g.draft_probs, g.draft_index, g.drafts, g.verify_rows, g.samples, g.slots, g.temperature,
        g.logits.stride(0), v, g.draft_width, chunks,
        K=k, CHUNKS=CHUNKS_EACH, CHUNK=CHUNK, TRUNCATED=is_truncated, num_warps=4,
        **dependent_launch(g.logits),
    )  # fmt: skip
    return residuals


def _accept(
    g: Given, s: Statistics, residuals: Tensor | None, rule: Rule, mean_accepted: float
) -> Accepted:
    b, k, _ = g.sizes
    out = Accepted(g.ints(b), g.ints(b), g.floats(b))
    accept[(b,)](
        out.count, out.is_recovery, out.scale, s.target, s.draft, s.peak, residuals,
        g.drafts, g.num_drafts, g.samples, g.seq_lens, g.slots, g.seed, g.num_chunks,
        RULE=int(rule), MEAN_ACCEPTED=mean_accepted if rule is Rule.AT_RATE else None, K=k,
        CHUNKS=_power_of_two(g.num_chunks), num_warps=2, **dependent_launch(g.logits),
    )  # fmt: skip
    return out


def _emit(g: Given, s: Statistics, a: Accepted, residuals: Tensor | None) -> Verified:
    (b, k, v), chunks = g.sizes, g.num_chunks
    out = Verified(
        tokens=g.num_drafts.new_empty(b, k + 1),
        num_sampled=torch.empty_like(g.num_drafts),
        num_rejected=torch.empty_like(g.num_drafts),
        not_finite=torch.empty_like(g.num_drafts),
    )
    emit[(b,)](
        out.tokens, out.num_sampled, out.num_rejected, out.not_finite, residuals, s.peaks,
        s.masses, a.count, a.is_recovery, a.scale, s.peak, s.mass, s.best, g.logits,
        g.draft_probs, g.draft_index, g.drafts, g.verify_rows, g.num_drafts, g.samples,
        g.seq_lens, g.slots, g.temperature, g.seed, g.logits.stride(0), v, g.draft_width, chunks,
        K=k, WIDTH=_power_of_two(k + 1), CHUNKS=_power_of_two(chunks),
        CHUNK=CHUNK, FIRST_CHUNK=FIRST_CHUNK, num_warps=8, **dependent_launch(g.logits),
    )  # fmt: skip
    return out


def _power_of_two(n: int) -> int:
    """The least power of two from n on."""
    return 1 << (n - 1).bit_length()

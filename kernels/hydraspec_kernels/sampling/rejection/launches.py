"""The launches of speculative sampling in their order, and the tensors between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hydraspec_kernels.runtime.launch import check_contiguous
from hydraspec_kernels.runtime.launch_kernel import dependent_launch
from hydraspec_kernels.sampling.records import SlotSampling, Verdict, VerifiedBatch
from hydraspec_kernels.sampling.rejection.kernel import accept, emit, residual_of_chunks
from hydraspec_kernels.sampling.rejection.reference import Rule
from hydraspec_kernels.sampling.rejection.statistics_kernel import chunk_statistics, row_statistics
from hydraspec_kernels.sampling.token_choice.reference import CHUNK, FIRST_CHUNK

CHUNKS_EACH = 2  # chunks of a row that one program reads


@dataclass(slots=True, frozen=True)
class Given:
    """The arguments of `verify_sampled`, as all launches read them."""

    logits: Tensor
    batch: VerifiedBatch
    state: SlotSampling
    samples: Tensor  # [B] int8
    draft_probs: Tensor | None  # None: drafts are certain, or the rule does not read q
    draft_index: Tensor | None  # [V] int32 the target's tokens in the drafter's vocabulary

    @property
    def draft_width(self) -> int:
        """Size V' of the drafter's vocabulary; V without draft_probs."""
        return self.logits.shape[1] if self.draft_probs is None else self.draft_probs.shape[2]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Sizes (B, K, V) of the batch."""
        return (*self.batch.draft_tokens.shape, self.logits.shape[1])

    def floats(self, *shape: int) -> Tensor:
        """A float32 tensor of this shape on the device of the logits."""
        return self.logits.new_empty(shape, dtype=torch.float32)

    def ints(self, *shape: int) -> Tensor:
        """An int32 tensor of this shape on the device of the logits."""
        return self.logits.new_empty(shape, dtype=torch.int32)

    @property
    def num_chunks(self) -> int:
        """Number C of chunks of a row."""
        return -(-self.logits.shape[1] // CHUNK)


@dataclass(slots=True, frozen=True)
class Statistics:
    """Peaks and masses of rows of logits; unwritten where no request needs the row."""

    peaks: Tensor  # [B, K+1, C] float32
    masses: Tensor  # [B, K+1, C] float32 relative to the chunk's peak; not of greedy rows
    peak: Tensor  # [B, K+1] float32
    mass: Tensor  # [B, K+1] float32 relative to the peak; not of greedy rows
    best: Tensor  # [B, K+1] int32; of greedy rows only
    p_of_draft: Tensor  # [B, K] float32
    q_of_draft: Tensor | None  # [B, K] float32; None: 1


@dataclass(slots=True, frozen=True)
class Accepted:
    """Number of accepted drafts, and the distribution that the next token is drawn from."""

    count: Tensor  # [B] int32
    is_recovery: Tensor  # [B] int32
    scale: Tensor  # [B] float32


def verify_sampled_launches(
    logits: Tensor,
    batch: VerifiedBatch,
    state: SlotSampling,
    rule: Rule,
    acceptance_length: float = 1.0,
    *,
    is_truncated: bool = False,
) -> Verdict:
    """See `rejection.verify_sampled`; rows are truncated already. `is_truncated` (known on the
    host) saves work, since most chunks of a truncated row may have no mass.
    """
    draft_probs, draft_index = state.draft_probs, None
    if batch.draft_tokens.shape[1] == 0 or rule is Rule.SYNTHETIC:
        draft_probs = None
    if draft_probs is not None and state.draft_vocab_map is not None:
        draft_index = _places(state.draft_vocab_map, logits.shape[1])
    samples = batch.samples.view(torch.int8)
    given = Given(logits, batch, state, samples, draft_probs, draft_index)
    _check(given)
    statistics, residuals = _statistics(given), None
    if draft_probs is not None and rule is Rule.BLOCK:
        residuals = _residuals(given, statistics, None, is_truncated)
    accepted = _accept(given, statistics, residuals, rule, acceptance_length - 1)
    if draft_probs is not None and rule is Rule.STANDARD:
        residuals = _residuals(given, statistics, accepted, is_truncated)
    return _emit(given, statistics, accepted, residuals)


def _places(draft_vocab_map: Tensor, vocab_size: int) -> Tensor:
    """Place [V] int32 of each target id in the map [V']; -1 for ids that are not in the map."""
    places = draft_vocab_map.new_full((vocab_size,), -1, dtype=torch.int32)
    every = torch.arange(len(draft_vocab_map), dtype=torch.int32, device=places.device)
    return places.index_copy_(0, draft_vocab_map, every)


def _check(g: Given) -> None:
    """Asserts that all but rows of logits is contiguous, and that q has the target's width or an
    index."""
    assert g.logits.stride(1) == 1, g.logits.stride()
    b, s = g.batch, g.state
    check_contiguous(b.verify_rows, b.draft_tokens, b.num_drafts, b.seq_lens, b.slots)
    check_contiguous(s.temperature, s.seed)
    if g.draft_probs is not None:
        check_contiguous(g.draft_probs)
        assert g.draft_probs.shape[1] == b.draft_tokens.shape[1], "draft_probs are of another K"
        is_whole = g.draft_width == g.logits.shape[1]
        assert is_whole or g.draft_index is not None, "draft and target vocabularies differ"


def _statistics(g: Given) -> Statistics:
    (b, k, v), batch, temperature = g.sizes, g.batch, g.state.temperature
    chunks, launch, stride = g.num_chunks, dependent_launch(g.logits), g.logits.stride(0)
    about = (batch.verify_rows, batch.num_drafts, g.samples, batch.slots, temperature)
    peaks, masses = g.floats(b, k + 1, chunks), g.floats(b, k + 1, chunks)
    ids = g.ints(b, k + 1, chunks)
    chunk_statistics[(-(-chunks // CHUNKS_EACH), b * (k + 1))](
        peaks, masses, ids, g.logits, *about, stride, v, chunks,
        K=k, CHUNKS=CHUNKS_EACH, CHUNK=CHUNK, num_warps=2, **launch,
    )  # fmt: skip
    q_of_draft = None if g.draft_probs is None else g.floats(b, k)
    out = Statistics(
        peaks, masses, g.floats(b, k + 1), g.floats(b, k + 1), g.ints(b, k + 1), g.floats(b, k),
        q_of_draft,
    )  # fmt: skip
    row_statistics[(b * (k + 1),)](
        out.peak, out.mass, out.best, out.p_of_draft, q_of_draft, peaks, masses, ids, g.logits,
        g.draft_probs, g.draft_index, batch.draft_tokens, *about, stride, v, g.draft_width, chunks,
        K=k, CHUNKS=_power_of_two(chunks), num_warps=2, **launch,
    )  # fmt: skip
    return out


def _residuals(g: Given, s: Statistics, a: Accepted | None, is_truncated: bool) -> Tensor:
    """Residual masses [B, K, C] of the row that each request draws from; before acceptance, of all
    offered rows.
    """
    (b, k, v), chunks, batch = g.sizes, g.num_chunks, g.batch
    residuals = g.floats(b, k, chunks)
    accepted, is_recovery, rows = (None, None, k) if a is None else (a.count, a.is_recovery, 1)
    residual_of_chunks[(-(-chunks // CHUNKS_EACH), b * rows)](
        residuals, accepted, is_recovery, s.p_of_draft, s.q_of_draft, s.peak, s.mass, g.logits,
        g.draft_probs, g.draft_index, batch.draft_tokens, batch.verify_rows, g.samples,
        batch.slots, g.state.temperature, g.logits.stride(0), v, g.draft_width, chunks,
        K=k, CHUNKS=CHUNKS_EACH, CHUNK=CHUNK, TRUNCATED=is_truncated, num_warps=4,
        **dependent_launch(g.logits),
    )  # fmt: skip
    return residuals


def _accept(
    g: Given, s: Statistics, residuals: Tensor | None, rule: Rule, mean_accepted: float
) -> Accepted:
    (b, k, _), batch = g.sizes, g.batch
    out = Accepted(g.ints(b), g.ints(b), g.floats(b))
    accepts = g.state.accepts if rule is Rule.SYNTHETIC else None
    accept[(b,)](
        out.count, out.is_recovery, out.scale, s.p_of_draft, s.q_of_draft, s.peak, residuals,
        batch.draft_tokens, batch.num_drafts, g.samples, batch.seq_lens, batch.slots, g.state.seed,
        accepts, 0 if accepts is None else accepts.shape[1], g.num_chunks,
        RULE=int(rule), MEAN_ACCEPTED=mean_accepted if rule is Rule.SYNTHETIC else None, K=k,
        CHUNKS=_power_of_two(g.num_chunks), num_warps=2, **dependent_launch(g.logits),
    )  # fmt: skip
    return out


def _emit(g: Given, s: Statistics, a: Accepted, residuals: Tensor | None) -> Verdict:
    (b, k, v), chunks, batch, state = g.sizes, g.num_chunks, g.batch, g.state
    out = Verdict.empty_like(batch)
    emit[(b,)](
        out.tokens, out.num_sampled, out.num_rejected, out.not_finite, residuals, s.peaks,
        s.masses, a.count, a.is_recovery, a.scale, s.peak, s.mass, s.best, g.logits,
        g.draft_probs, g.draft_index, batch.draft_tokens, batch.verify_rows, batch.num_drafts,
        g.samples, batch.seq_lens, batch.slots, state.temperature, state.seed,
        g.logits.stride(0), v, g.draft_width, chunks,
        K=k, WIDTH=_power_of_two(k + 1), CHUNKS=_power_of_two(chunks),
        CHUNK=CHUNK, FIRST_CHUNK=FIRST_CHUNK, num_warps=8, **dependent_launch(g.logits),
    )  # fmt: skip
    return out


def _power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()

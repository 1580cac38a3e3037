"""The launches of `kernel.py` in their order, and the numbers they pass on."""

from __future__ import annotations

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
) -> Verified:
    """See `rejection_sampling.verify_sampled`."""
    (b, k), v = draft_tokens.shape, logits.shape[1]
    _check(logits, verify_rows, draft_tokens, num_drafts, samples, seq_lens, slots, draft_probs, v)
    is_rate, probs = rule is Rule.AT_RATE, draft_probs if k else None
    block, race_block = (min(_power_of_two(v), most) for most in (MAX_BLOCK, MAX_RACE_BLOCK))
    wide, narrow = -(-v // block), -(-v // race_block)
    launch, stride, samples = dependent_launch(logits), logits.stride(0), samples.view(torch.int8)

    def floats(*shape: int) -> Tensor:
        return logits.new_empty(shape, dtype=torch.float32)

    def ints(*shape: int) -> Tensor:
        return logits.new_empty(shape, dtype=torch.int32)

    peaks, masses, ids = floats(b, k + 1, wide), floats(b, k + 1, wide), ints(b, k + 1, wide)
    chunk_statistics[(wide, b * (k + 1))](
        peaks, masses, ids, logits, verify_rows, num_drafts, samples, slots, temperature,
        stride, v, wide, K=k, BLOCK=block, num_warps=8, **launch,
    )  # fmt: skip
    peak, mass, best = floats(b, k + 1), floats(b, k + 1), ints(b, k + 1)
    target, draft = floats(b, k), None if probs is None else floats(b, k)
    row_statistics[(b * (k + 1),)](
        peak, mass, best, target, draft, peaks, masses, ids, logits, probs, draft_tokens,
        verify_rows, num_drafts, samples, slots, temperature, stride, v, wide,
        K=k, CHUNKS=_power_of_two(wide), num_warps=2, **launch,
    )  # fmt: skip
    surplus = peaks  # not read unless it is written
    if rule is Rule.BLOCK and probs is not None and k > 1:
        surplus = floats(b, k, wide)
        chunk_surplus[(wide, b * (k - 1))](
            surplus, target, draft, peak, mass, logits, probs, draft_tokens, verify_rows, samples,
            slots, temperature, stride, v, wide, K=k, BLOCK=block, num_warps=8, **launch,
        )  # fmt: skip
    num_accepted, is_recovery, scale = ints(b), ints(b), floats(b)
    accept[(b,)](
        num_accepted, is_recovery, scale, target, draft, surplus, draft_tokens, num_drafts,
        samples, seq_lens, slots, seed, wide,
        RULE=int(rule), MEAN_ACCEPTED=acceptance_length - 1 if is_rate else None, K=k,
        CHUNKS=_power_of_two(wide), num_warps=2, **launch,
    )  # fmt: skip
    ratios, found = logits.new_empty(2, b, narrow, dtype=torch.float64), ints(2, b, narrow)
    race_of_chunks[(narrow, b)](
        ratios, found, num_accepted, is_recovery, scale, peak, mass, logits, probs, draft_tokens,
        verify_rows, num_drafts, samples, seq_lens, slots, temperature, seed, stride, v, narrow,
        K=k, BLOCK=race_block, num_warps=8, **launch,
    )  # fmt: skip
    out = Verified(
        tokens=num_drafts.new_empty(b, k + 1),
        num_sampled=torch.empty_like(num_drafts),
        num_rejected=torch.empty_like(num_drafts),
    )
    emit[(b,)](
        out.tokens, out.num_sampled, out.num_rejected, ratios, found, num_accepted, best,
        draft_tokens, num_drafts, samples, slots, temperature, narrow,
        K=k, WIDTH=_power_of_two(k + 1), CHUNKS=_power_of_two(narrow), num_warps=2, **launch,
    )  # fmt: skip
    return out


def _power_of_two(n: int) -> int:
    """The least power of two from n on."""
    return 1 << (n - 1).bit_length()


def _check(logits: Tensor, *rest: Tensor | int | None) -> None:
    """Rows of logits may be apart; all else is contiguous, and drafts have the target's width."""
    *tensors, draft_probs, vocab_size = rest
    assert logits.stride(1) == 1, logits.stride()
    for tensor in tensors:
        assert isinstance(tensor, Tensor)
        assert tensor.is_contiguous()
    if isinstance(draft_probs, Tensor):
        assert draft_probs.is_contiguous()
        assert draft_probs.shape[-1] == vocab_size, "draft and target vocabularies differ"

"""Speculative sampling in plain torch: the specification of the kernels, which runs on a CPU.

A step gives each request K drafts x_1..x_K, the target's distributions p_1..p_{K+1} (p_j at the row
that predicts draft j, the last after all drafts) and the drafter's q_1..q_K. A draft of -1 is
missing: it counts as rejected, and so do all drafts after it.

Letters: B requests, K drafts, N rows of logits, V vocabulary, V' the drafter's vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from hydraspec_kernels.sampling.random_streams import DrawKey, Purpose, uniform
from hydraspec_kernels.sampling.records import (
    SamplingFlags,
    SamplingTensors,
    SlotSampling,
    Verdict,
    VerifiedBatch,
)
from hydraspec_kernels.sampling.token_choice import draw_tokens
from hydraspec_kernels.sampling.truncation.reference import target_probs
from hydraspec_kernels.sampling.verification.reference import mean_accepted


class Rule(IntEnum):
    """Rule by which drafts are accepted."""

    STANDARD = 0  # token by token
    BLOCK = 1  # the longest prefix that passes
    SYNTHETIC = 2  # by a fixed mean length, whatever the drafts


@dataclass(slots=True, frozen=True, kw_only=True)
class Trial:
    """The drafts under verification, and the distributions and draws that decide on them."""

    p: Tensor  # [B, K+1, V] target distributions, after all truncations
    q: Tensor | None  # [B, K, V] draft distributions; None: drafts are certain, q(x) = 1
    x: Tensor  # [B, K] drafts, 0 where there is none
    u: Tensor  # [B, K] float64 uniform draws for acceptance
    is_offered: Tensor  # [B, K] bool, false from the first missing draft on
    is_greedy: Tensor  # [B] bool: temperature 0
    seed: Tensor  # [B]
    first_position: Tensor  # [B] position that row 0 predicts
    num_finite: Tensor  # [B] rows before the first whose logits have no finite maximum

    @property
    def num_offered(self) -> Tensor:
        """Number of drafts [B] before the first missing one."""
        return self.is_offered.sum(1)

    def p_and_q_of_drafts(self) -> tuple[Tensor, Tensor]:
        """Probabilities p_j(x_j) and q_j(x_j) of the drafts, [B, K] each.

        Drafts of greedy requests are argmaxes with q = 1: steps with greedy requests alone do not
        write `q`. Since p of greedy requests is one-hot, no value of `q` spoils the residual.
        """
        at = self.x.unsqueeze(-1)
        p = self.p[:, :-1].gather(-1, at).squeeze(-1)
        if self.q is None:
            return p, torch.ones_like(p)
        q = self.q.gather(-1, at).squeeze(-1)
        return p, q.masked_fill_(self.is_greedy.unsqueeze(1), 1.0)


@dataclass(slots=True, frozen=True, kw_only=True)
class Acceptance:
    """Number of accepted drafts, and the distribution that the next token is drawn from."""

    num_accepted: Tensor  # [B]
    is_recovery: Tensor  # [B] bool: drawn from the residual norm(max(scale * p - q, 0)); else p
    scale: Tensor | None = None  # [B]; None: 1


def verify_sampled_reference(
    logits: Tensor,
    batch: VerifiedBatch,
    state: SlotSampling,
    rule: Rule,
    acceptance_length: float,
    flags: SamplingFlags,
) -> Verdict:
    """See `rejection.verify_sampled`."""
    trial = _trial(logits, batch, state, flags)
    if rule is Rule.SYNTHETIC:
        acceptance = accept_synthetic(trial, mean_accepted(batch, acceptance_length, state.accepts))
    else:
        acceptance = (accept_standard if rule is Rule.STANDARD else accept_block)(trial)
    # Logits without a finite maximum accept no draft: the next token is emitted from them.
    num_accepted = torch.minimum(acceptance.num_accepted, trial.num_finite)
    token = _next_token(trial, acceptance, num_accepted)
    return _verdict(trial, num_accepted, token, batch)


def accept_standard(trial: Trial) -> Acceptance:
    """Acceptance token by token: draft x passes with probability min(1, p(x) / q(x)).

    Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2.
    """
    p, q = trial.p_and_q_of_drafts()
    is_accepted = (trial.u * q < p) & (q > 0) & trial.is_offered
    num_accepted = is_accepted.cumprod(1).sum(1)
    return Acceptance(num_accepted=num_accepted, is_recovery=num_accepted < trial.num_offered)


def accept_block(trial: Trial) -> Acceptance:
    """Acceptance of the longest prefix that passes.

    Sun et al. 2024, "Block Verification Accelerates Speculative Decoding", algorithm 2. With the
    running ratio r_i = min(r_{i-1} * p_i(x_i) / q_i(x_i), 1), prefix i passes with probability
    S_i / (S_i + 1 - r_i), S_i = sum_v max(r_i * p_{i+1}(v) - q_{i+1}(v), 0); the prefix of all
    drafts passes with r_i. The residual has scale r_i.
    """
    p, q = trial.p_and_q_of_drafts()
    ratio = torch.where(q > 0, p / q, 0.0)
    running = [torch.ones_like(trial.seed, dtype=ratio.dtype)]
    for column in ratio.unbind(1):
        running.append((running[-1] * column).clamp_(max=1.0))
    r = torch.stack(running, 1)
    num_offered = trial.num_offered
    passed = (trial.u < _pass_probability(trial, r, num_offered)) & trial.is_offered
    length = torch.arange(1, r.shape[1], device=r.device)
    num_accepted = (passed * length).amax(1) if length.numel() else num_offered
    return Acceptance(
        num_accepted=num_accepted,
        is_recovery=num_accepted < num_offered,
        scale=r.gather(1, num_accepted.unsqueeze(1)).squeeze(1),
    )


def _pass_probability(trial: Trial, r: Tensor, num_offered: Tensor) -> Tensor:
    """Probability [B, K] that the prefix of length 1..K passes; r [B, K+1] are r_0..r_K."""
    ends = r[:, 1:]
    surplus = torch.zeros_like(ends)
    if ends.shape[1] > 1:
        inner = ends[:, :-1]
        if trial.q is None:
            surplus[:, :-1] = inner * (1 - trial.p_and_q_of_drafts()[0][:, 1:])
        else:
            excess = trial.p[:, 1:-1] * inner.unsqueeze(-1) - trial.q[:, 1:]
            surplus[:, :-1] = excess.clamp_(min=0).sum(-1)
    total = surplus + (1 - ends)
    # 0 / 0 is r_i = 1 with p = q next: a longer prefix is then certain to pass, so this one may.
    # NaN, which a broken drafter gives, passes nothing; a prefix before a broken row passes.
    inside = torch.where(total > 0, surplus / total, (total == 0).to(total.dtype))
    length = torch.arange(1, r.shape[1], device=r.device)
    inside = torch.where(length >= trial.num_finite.unsqueeze(1), 1.0, inside)
    return torch.where(length == num_offered.unsqueeze(1), ends, inside)


def accept_synthetic(trial: Trial, mean_accepted: Tensor | float) -> Acceptance:
    """Acceptance of `mean_accepted` drafts on average, one number or [B, 1], whatever the drafts
    are: for benchmarks. The next token is a sample of the target.
    """
    index = torch.arange(trial.x.shape[1], device=trial.x.device)
    rate = mean_accepted - index.to(torch.float64)
    num_accepted = ((trial.u < rate) & trial.is_offered).cumprod(1).sum(1)
    return Acceptance(
        num_accepted=num_accepted, is_recovery=torch.zeros_like(num_accepted, dtype=torch.bool)
    )


def _trial(
    logits: Tensor, batch: VerifiedBatch, state: SlotSampling, flags: SamplingFlags
) -> Trial:
    """Gathers each request's rows and turns them into distributions."""
    slots, (num_requests, num_rows) = batch.slots, batch.verify_rows.shape
    rows = logits.index_select(0, batch.verify_rows.flatten())

    def by_row(values: Tensor) -> Tensor:
        return values.index_select(0, slots).repeat_interleave(num_rows)

    sampling = SamplingTensors(
        temperature=by_row(state.temperature),
        top_k=by_row(state.top_k),
        top_p=by_row(state.top_p),
        min_p=by_row(state.min_p),
    )
    seed = state.seed.index_select(0, slots)
    first_position = batch.seq_lens - batch.num_drafts
    index = torch.arange(num_rows - 1, device=slots.device)
    position = first_position.unsqueeze(1) + index
    is_finite = rows.amax(-1).isfinite().view(num_requests, num_rows)
    return Trial(
        p=target_probs(rows, sampling, flags).view(num_requests, num_rows, -1),
        q=_draft_probs(batch, state, logits.shape[-1]),
        x=batch.draft_tokens.clamp(min=0),
        u=uniform(seed.unsqueeze(1), position, Purpose.ACCEPT, index),
        is_offered=(batch.draft_tokens >= 0).cumprod(1) > 0,
        is_greedy=state.temperature.index_select(0, slots) <= 0,
        seed=seed,
        first_position=first_position,
        num_finite=is_finite.cumprod(1).sum(1),
    )


def _draft_probs(batch: VerifiedBatch, state: SlotSampling, vocab_size: int) -> Tensor | None:
    """Distributions [B, K, V] that drafts were sampled from; None if drafts are certain."""
    num_drafts = batch.draft_tokens.shape[1]
    if state.draft_probs is None or num_drafts == 0:
        return None
    probs = state.draft_probs.index_select(0, batch.slots)[:, :num_drafts]
    if state.draft_vocab_map is None:
        assert probs.shape[-1] == vocab_size, "draft and target vocabularies differ"
        return probs
    # Tokens outside the drafter's vocabulary are proposed with probability 0.
    whole = probs.new_zeros(*probs.shape[:2], vocab_size)
    return whole.index_copy_(2, state.draft_vocab_map, probs)


def _next_token(trial: Trial, acceptance: Acceptance, num_accepted: Tensor) -> Tensor:
    """The token [B] after the accepted drafts, drawn from the residual or from p."""
    recovery = acceptance.is_recovery.unsqueeze(1)
    request = torch.arange(num_accepted.shape[0], device=num_accepted.device)
    p = trial.p[request, num_accepted]
    num_drafts = trial.x.shape[1]
    weights = p
    if num_drafts:
        at = num_accepted.clamp(max=num_drafts - 1)
        if trial.q is None:
            rejected = trial.x.gather(1, at.unsqueeze(1))
            kept = p.gather(1, rejected).masked_fill_(recovery, 0.0)
            residual = p.scatter(1, rejected, kept)
        else:
            scaled = p if acceptance.scale is None else p * acceptance.scale.unsqueeze(1)
            residual = (scaled - trial.q[request, at]).clamp_(min=0)
            residual = torch.where(recovery, residual, p)
        # An empty residual is p = q up to rounding, where exact numbers would never reject.
        weights = torch.where(residual.amax(1, keepdim=True) > 0, residual, p)
    purpose = torch.where(acceptance.is_recovery, int(Purpose.RESIDUAL), int(Purpose.BONUS))
    position = trial.first_position + num_accepted
    return draw_tokens(weights, DrawKey(trial.seed, position, purpose, num_accepted))


def _verdict(trial: Trial, num_accepted: Tensor, token: Tensor, batch: VerifiedBatch) -> Verdict:
    """The verdict: its tokens are the accepted drafts, then the next token, then -1."""
    last = num_accepted.unsqueeze(1)
    column = torch.arange(trial.p.shape[1], device=last.device)
    tokens = torch.nn.functional.pad(trial.x, (0, 1)).scatter(1, last, token.unsqueeze(1))
    is_emitted = (column <= last) & batch.samples.unsqueeze(1)
    return Verdict(
        tokens=torch.where(is_emitted, tokens, -1),
        num_sampled=(num_accepted + 1).mul_(batch.samples),
        num_rejected=(batch.num_drafts - num_accepted).mul_(batch.samples),
        not_finite=(num_accepted == trial.num_finite).to(torch.int64) * batch.samples,
    )

"""Which drafts are kept and what is emitted behind them, wherever drafts and logits come from.

All verifiers treat a draft of -1 as rejected, and nothing behind it is accepted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from hydraspec_kernels.runtime.launch import runs_kernels
from hydraspec_kernels.sampling.rejection import Rule, verify_sampled
from hydraspec_kernels.sampling.token_choice import greedy_tokens
from hydraspec_kernels.sampling.truncation import truncate_
from hydraspec_kernels.sampling.verification import Verified, verify_at_rate, verify_prefix
from torch import Tensor

from hydraspec.sampling.sampler import EVERYTHING, process_logits, sample
from hydraspec.sampling.streams import Purpose, uniform
from hydraspec.types import Batch, ConfigurationError, RequestState, SamplingFlags, Verdict


@dataclass(slots=True, frozen=True, kw_only=True)
class Trial:
    """The drafts under verification beside what the target says of them."""

    target_probs: Tensor  # [B, K+1, V] what row j samples from, after all truncations
    draft_probs: Tensor | None  # [B, K, V] what draft j was sampled from; None: chosen outright
    drafts: Tensor  # [B, K] int64, 0 where there is no draft
    offered: Tensor  # [B, K] bool, false from the first missing draft on
    greedy: Tensor  # [B] bool: temperature 0
    seed: Tensor  # [B] int64
    first_position: Tensor  # [B] int64, position that row 0 predicts
    num_finite: Tensor  # [B] int64, rows before the first whose logits have no finite maximum

    @property
    def num_offered(self) -> Tensor:
        """[B] int64: drafts before the first missing one."""
        return self.offered.sum(1)

    def of_drafts(self) -> tuple[Tensor, Tensor]:
        """Target and draft probability [B, K] of each draft; 1 if it was chosen outright.

        Greedy requests always choose outright: a batch of them alone leaves `draft_probs` stale.
        Their target being one-hot, the residual is right whatever stands there.
        """
        at = self.drafts.unsqueeze(-1)
        target = self.target_probs[:, :-1].gather(-1, at).squeeze(-1)
        if self.draft_probs is None:
            return target, torch.ones_like(target)
        draft = self.draft_probs.gather(-1, at).squeeze(-1)
        return target, draft.masked_fill_(self.greedy.unsqueeze(1), 1.0)

    def acceptance_draws(self) -> Tensor:
        """[B, K] float64 uniforms, one per draft."""
        index = torch.arange(self.drafts.shape[1], device=self.drafts.device)
        position = self.first_position.unsqueeze(1) + index
        return uniform(self.seed.unsqueeze(1), position, Purpose.ACCEPT, index)


@dataclass(slots=True, frozen=True, kw_only=True)
class Acceptance:
    """How far a rule accepts, and which distribution the next token comes from."""

    num_accepted: Tensor  # [B] int64
    is_recovery: Tensor  # [B] bool: the next token comes from the residual, not from the target
    target_scale: Tensor | None = None  # [B] factor of the target in the residual; None: 1


class Verifier(ABC):
    """Decides one step's drafts; one object serves all steps and keeps no state between them."""

    rule: ClassVar[Rule]  # what kernels do in place of `accept`
    acceptance_length = 1.0  # of a rule that has one

    def __call__(
        self, logits: Tensor, batch: Batch, state: RequestState, flags: SamplingFlags = EVERYTHING
    ) -> Verdict:
        """The verdict on `batch.draft_tokens`.

        logits [N, V] of the rows that `batch.verify_rows` counts in; `state` as before the step.
        With `state.draft_probs` drafts are taken as sampled from it, else as chosen outright.
        `flags` are host facts that save work. The first token of a request, and every token without
        a drafter, is the case of no drafts. Nobody may read `logits` afterwards: kernels truncate
        in place.
        """
        if logits.shape[0] == 0:
            return _nothing_sampled(batch)
        if batch.all_greedy:
            choices = greedy_tokens(logits, marks_not_finite=True)
            return _verdict(self.verify_choices(choices, batch, state))
        if runs_kernels(logits) and logits.dtype is not torch.float64:
            truncates = flags.any_top_k or flags.any_top_p or flags.any_min_p
            if truncates:
                truncate_(
                    logits, batch.verify_rows, batch.num_drafts, batch.samples, batch.slots,
                    state.temperature, state.top_k, state.top_p, state.min_p,
                )  # fmt: skip
            return _verdict(
                verify_sampled(
                    logits, batch.verify_rows, batch.draft_tokens, batch.num_drafts, batch.samples,
                    batch.seq_lens, batch.slots, state.temperature, state.seed, state.draft_probs,
                    self.rule, self.acceptance_length, state.draft_vocab_map,
                    truncates,
                )
            )  # fmt: skip
        trial = _prepare(logits, batch, state, flags)
        acceptance = _up_to_finite(self.accept(trial), trial)
        return _emit(trial, acceptance, _next_token(trial, acceptance), batch)

    def verify_choices(self, choices: Tensor, batch: Batch, state: RequestState) -> Verified:
        """The rule for requests of temperature 0 alone, from the target's argmax [N], or ~argmax
        where its logits are not finite.

        Lossless rules accept while the draft is the argmax, and need no random numbers.
        """
        return verify_prefix(
            choices, batch.verify_rows, batch.draft_tokens, batch.num_drafts, batch.samples
        )

    @abstractmethod
    def accept(self, trial: Trial) -> Acceptance:
        """Apply the rule to every request; K may be 0."""


def _verdict(verified: Verified) -> Verdict:
    return Verdict(
        tokens=verified.tokens,
        num_sampled=verified.num_sampled,
        num_rejected=verified.num_rejected,
        not_finite=verified.not_finite,
    )


class StandardVerifier(Verifier):
    """Token by token: accept draft x with probability min(1, p(x) / q(x)).

    Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2. Behind the first rejection
    the token comes from norm(max(p - q, 0)), behind the last draft from p.
    """

    rule = Rule.STANDARD

    def accept(self, trial: Trial) -> Acceptance:
        target, draft = trial.of_drafts()
        accepted = (trial.acceptance_draws() * draft < target) & (draft > 0) & trial.offered
        num_accepted = accepted.cumprod(1).sum(1)
        return Acceptance(num_accepted=num_accepted, is_recovery=num_accepted < trial.num_offered)


class BlockVerifier(Verifier):
    """Whole prefixes at a time: keep the longest prefix that passes.

    Sun et al. 2024, "Block Verification Accelerates Speculative Decoding", algorithm 2. With the
    running ratio p_i = min(p_{i-1} * p(x_i) / q(x_i), 1), prefix i passes with probability
    S_i / (S_i + 1 - p_i), S_i = sum_v max(p_i * p(v) - q(v), 0) at the next row; the prefix of
    all drafts passes with p_n. The next token comes from norm(max(p_i * p - q, 0)).
    """

    rule = Rule.BLOCK

    def accept(self, trial: Trial) -> Acceptance:
        target, draft = trial.of_drafts()
        ratio = torch.where(draft > 0, target / draft, 0.0)
        running = [torch.ones_like(trial.seed, dtype=ratio.dtype)]
        for column in ratio.unbind(1):
            running.append((running[-1] * column).clamp_(max=1.0))
        joint = torch.stack(running, 1)
        num_offered = trial.num_offered
        passed = trial.acceptance_draws() < _pass_probability(trial, joint, num_offered)
        passed &= trial.offered
        length = torch.arange(1, joint.shape[1], device=joint.device)
        num_accepted = (passed * length).amax(1) if length.numel() else num_offered
        return Acceptance(
            num_accepted=num_accepted,
            is_recovery=num_accepted < num_offered,
            target_scale=joint.gather(1, num_accepted.unsqueeze(1)).squeeze(1),
        )


def _pass_probability(trial: Trial, joint: Tensor, num_offered: Tensor) -> Tensor:
    """[B, K]: probability that the prefix of length 1..K passes. joint [B, K+1] are p_0..p_K."""
    running = joint[:, 1:]
    surplus = torch.zeros_like(running)
    if running.shape[1] > 1:
        inner = running[:, :-1]
        if trial.draft_probs is None:
            surplus[:, :-1] = inner * (1 - trial.of_drafts()[0][:, 1:])
        else:
            excess = trial.target_probs[:, 1:-1] * inner.unsqueeze(-1) - trial.draft_probs[:, 1:]
            surplus[:, :-1] = excess.clamp_(min=0).sum(-1)
    total = surplus + (1 - running)
    # 0 / 0 is p_i = 1 with p = q next: a longer prefix is then certain to pass, so this one may.
    # NaN, which a broken drafter gives, passes nothing; what a broken row follows passes.
    inside = torch.where(total > 0, surplus / total, (total == 0).to(total.dtype))
    length = torch.arange(1, joint.shape[1], device=joint.device)
    inside = torch.where(length >= trial.num_finite.unsqueeze(1), 1.0, inside)
    return torch.where(length == num_offered.unsqueeze(1), running, inside)


class SyntheticVerifier(Verifier):
    """Accepts by a fixed mean length whatever the drafts are: for benchmarks, not for text.

    A mean acceptance length L (bonus included) is L - 1 split over positions as ones, one fraction
    and zeros. Emitted behind the drafts: a sample of the target.
    """

    rule = Rule.AT_RATE

    def __init__(self, acceptance_length: float, num_speculative_tokens: int) -> None:
        if not 1 <= acceptance_length <= num_speculative_tokens + 1:
            raise ConfigurationError(
                f"method.synthetic_acceptance_length={acceptance_length} is outside 1 to "
                f"{num_speculative_tokens + 1} (method.num_speculative_tokens + 1); "
                "lower it or raise method.num_speculative_tokens."
            )
        self.acceptance_length = acceptance_length

    def verify_choices(self, choices: Tensor, batch: Batch, state: RequestState) -> Verified:
        return verify_at_rate(
            choices, batch.verify_rows, batch.draft_tokens, batch.num_drafts, batch.samples,
            batch.seq_lens, batch.slots, state.seed, self.acceptance_length,
        )  # fmt: skip

    def accept(self, trial: Trial) -> Acceptance:
        index = torch.arange(trial.drafts.shape[1], device=trial.drafts.device)
        rate = (self.acceptance_length - 1 - index.to(torch.float64)).clamp_(0, 1)
        accepted = (trial.acceptance_draws() < rate) & trial.offered
        num_accepted = accepted.cumprod(1).sum(1)
        return Acceptance(
            num_accepted=num_accepted, is_recovery=torch.zeros_like(num_accepted, dtype=torch.bool)
        )


def _nothing_sampled(batch: Batch) -> Verdict:
    """The verdict of a step of prefill chunks only, which has no logits."""
    none = torch.zeros_like(batch.num_drafts)
    tokens = torch.full_like(batch.verify_rows, -1)
    return Verdict(
        tokens=tokens, num_sampled=none, num_rejected=none.clone(), not_finite=none.clone()
    )


def _prepare(logits: Tensor, batch: Batch, state: RequestState, flags: SamplingFlags) -> Trial:
    """Gather each request's rows and turn them into distributions."""
    slots, (num_requests, num_rows) = batch.slots, batch.verify_rows.shape
    rows = logits.index_select(0, batch.verify_rows.flatten())
    temperature, top_k, top_p, min_p = (
        values.index_select(0, slots).repeat_interleave(num_rows)
        for values in (state.temperature, state.top_k, state.top_p, state.min_p)
    )
    probs = process_logits(rows, temperature, top_k, top_p, min_p, flags)
    real = batch.draft_tokens >= 0
    finite = rows.amax(-1).isfinite().view(num_requests, num_rows)
    return Trial(
        target_probs=probs.view(num_requests, num_rows, -1),
        draft_probs=_draft_distribution(batch, state, logits.shape[-1]),
        drafts=batch.draft_tokens.clamp(min=0),
        offered=real.cumprod(1) > 0,
        greedy=state.temperature.index_select(0, slots) <= 0,
        seed=state.seed.index_select(0, slots),
        first_position=batch.seq_lens - batch.num_drafts,
        num_finite=finite.cumprod(1).sum(1),
    )


def _draft_distribution(batch: Batch, state: RequestState, vocab_size: int) -> Tensor | None:
    """[B, K, V] the drafts were sampled from, or None for drafts chosen outright."""
    num_drafts = batch.draft_tokens.shape[1]
    if state.draft_probs is None or num_drafts == 0:
        return None
    probs = state.draft_probs.index_select(0, batch.slots)[:, :num_drafts]
    if state.draft_vocab_map is None:
        assert probs.shape[-1] == vocab_size, "draft and target vocabularies differ"
        return probs
    # What the drafter's vocabulary lacks it proposes with probability 0.
    whole = probs.new_zeros(*probs.shape[:2], vocab_size)
    return whole.index_copy_(2, state.draft_vocab_map, probs)


def _up_to_finite(acceptance: Acceptance, trial: Trial) -> Acceptance:
    """The same, but nothing is accepted by logits that are not finite: the next token comes from
    them."""
    return replace(
        acceptance, num_accepted=torch.minimum(acceptance.num_accepted, trial.num_finite)
    )


def _next_token(trial: Trial, acceptance: Acceptance) -> Tensor:
    """[B] the token behind the accepted drafts: recovered from the residual, or the bonus."""
    num_accepted, recovery = acceptance.num_accepted, acceptance.is_recovery.unsqueeze(1)
    request = torch.arange(num_accepted.shape[0], device=num_accepted.device)
    target = trial.target_probs[request, num_accepted]
    num_drafts = trial.drafts.shape[1]
    weights = target
    if num_drafts:
        at = num_accepted.clamp(max=num_drafts - 1)
        if trial.draft_probs is None:
            rejected = trial.drafts.gather(1, at.unsqueeze(1))
            kept = target.gather(1, rejected).masked_fill_(recovery, 0.0)
            residual = target.scatter(1, rejected, kept)
        else:
            scale = acceptance.target_scale
            scaled = target if scale is None else target * scale.unsqueeze(1)
            residual = (scaled - trial.draft_probs[request, at]).clamp_(min=0)
            residual = torch.where(recovery, residual, target)
        # An empty residual is p = q up to rounding, where exact numbers would never reject.
        weights = torch.where(residual.amax(1, keepdim=True) > 0, residual, target)
    purpose = torch.where(acceptance.is_recovery, int(Purpose.RESIDUAL), int(Purpose.BONUS))
    position = trial.first_position + num_accepted
    return sample(weights, trial.seed, position, purpose, num_accepted)


def _emit(trial: Trial, acceptance: Acceptance, next_token: Tensor, batch: Batch) -> Verdict:
    """Accepted drafts, then the next token, then -1."""
    last = acceptance.num_accepted.unsqueeze(1)
    column = torch.arange(trial.target_probs.shape[1], device=last.device)
    tokens = torch.nn.functional.pad(trial.drafts, (0, 1)).scatter(1, last, next_token.unsqueeze(1))
    emitted = (column <= last) & batch.samples.unsqueeze(1)
    return Verdict(
        tokens=torch.where(emitted, tokens, -1),
        num_sampled=(acceptance.num_accepted + 1).mul_(batch.samples),
        num_rejected=(batch.num_drafts - acceptance.num_accepted).mul_(batch.samples),
        not_finite=(acceptance.num_accepted == trial.num_finite).to(torch.int64) * batch.samples,
    )


def build_verifier(
    verification: str, *, synthetic_acceptance_length: float | None, num_speculative_tokens: int
) -> Verifier:
    """The verifier of `method.verification`.

    Raises:
        ConfigurationError: unknown name, or a synthetic length that is missing, out of 1..K+1 or
        not asked for.
    """
    if verification == "synthetic":
        if synthetic_acceptance_length is None:
            raise ConfigurationError(
                "method.verification=synthetic needs method.synthetic_acceptance_length, "
                f"from 1 to {num_speculative_tokens + 1}."
            )
        return SyntheticVerifier(synthetic_acceptance_length, num_speculative_tokens)
    if synthetic_acceptance_length is not None:
        raise ConfigurationError(
            f"method.synthetic_acceptance_length={synthetic_acceptance_length} only applies to "
            f"method.verification=synthetic, not {verification}; remove one of the two."
        )
    verifiers: dict[str, type[Verifier]] = {"standard": StandardVerifier, "block": BlockVerifier}
    if verification not in verifiers:
        raise ConfigurationError(
            f"method.verification={verification} is unknown; choose standard, block or synthetic."
        )
    return verifiers[verification]()

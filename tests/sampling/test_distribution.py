"""Speculative sampling keeps the target's distribution: chi-squared tests at stated power.

A Markov chain over VOCAB tokens plays the target, an unrelated one the draft. Every request decodes
several steps from the same first token, so that positions are drafted again after rejections. The
joint distribution of its first HORIZON tokens is compared with the chain's, over so many requests
that any distribution at total-variation distance DISTANCE is found with probability POWER at
false-alarm rate ALPHA. Seeds are fixed, so a pass stays a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydraspec_kernels.sampling import rejection
from hydraspec_kernels.sampling.random_streams import DrawKey, Purpose
from hydraspec_kernels.sampling.records import SamplingTensors
from hydraspec_kernels.sampling.rejection import reference
from hydraspec_kernels.sampling.token_choice import sample_with_probs
from hydraspec_kernels.sampling.truncation import target_probs
from scipy import optimize, stats
from torch import Tensor

from hydraspec.sampling.verifier import build_verifier

ALPHA = 1e-4
POWER = 0.99
DISTANCE = 0.03
NEAR = 0.02  # the distance of the slow tests
VOCAB = 5
HORIZON = 3
NUM_DRAFTS = 3
SPREAD = 1.5  # standard deviation of the logits

TRUNCATIONS = {
    "untruncated": {},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "top_k_top_p": {"top_k": 4, "top_p": 0.85},
    "min_p": {"min_p": 0.25},
}


@dataclass(slots=True, kw_only=True)
class Setup:
    """One way of decoding."""

    verification: str = "standard"
    probabilistic: bool = True
    temperature: float = 1.0
    truncation: dict[str, float] = field(default_factory=dict)
    ragged: bool = False  # requests have 0..K drafts, some with a missing draft (-1) in the middle
    softmax_for_argmax: bool = False  # the mutation: argmax drafts, verified as if sampled
    index_drafts: bool = True  # false is the mutation: the draft index left out of the noise's key
    table_seed: int = 0

    def tables(self) -> tuple[Tensor, Tensor]:
        """Logits [V, V] of the next token after each token, of target and draft."""
        generator = torch.Generator().manual_seed(self.table_seed)
        target, draft = torch.randn(2, VOCAB, VOCAB, generator=generator) * SPREAD
        return target, draft


def chain_distribution(setup: Setup) -> Tensor:
    """[V**HORIZON] float64: what the first tokens after token 0 are distributed as."""
    target, _ = setup.tables()
    given = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": setup.temperature}
    given |= setup.truncation
    rows = {name: torch.full((VOCAB,), value) for name, value in given.items()}
    step = target_probs(target.double(), SamplingTensors(**rows))
    joint = step[0]
    for _ in range(HORIZON - 1):
        joint = (joint.view(-1, VOCAB, 1) * step).flatten()
    return joint


def num_requests_needed(degrees: int) -> int:
    """Sample size of a chi-squared test with POWER against any alternative DISTANCE away.

    By Cauchy-Schwarz the noncentrality n * sum((p' - p)**2 / p) is at least n * (2 * DISTANCE)**2.
    """
    critical = stats.chi2.isf(ALPHA, degrees)
    noncentrality = optimize.brentq(
        lambda value: stats.ncx2.sf(critical, degrees, value) - POWER, 1.0, 1e4
    )
    return int(noncentrality / (2 * DISTANCE) ** 2) + 1


def propose(setup: Setup, last: Tensor, seed: Tensor, computed: Tensor) -> tuple[Tensor, Any]:
    """Drafts [B, K] and, for probabilistic ones, their distributions [B, K, V]."""
    _, table = setup.tables()
    temperature = torch.full_like(last, setup.temperature, dtype=torch.float32)
    tokens, probs = [last], []
    for index in range(NUM_DRAFTS):
        place = index if setup.index_drafts else 0
        key = DrawKey(seed, computed + 1 + index, Purpose.DRAFT, place)
        drafted, distribution = sample_with_probs(table[tokens[-1]], temperature, key)
        if not setup.probabilistic or setup.softmax_for_argmax:
            drafted = table[tokens[-1]].argmax(-1)
        tokens.append(drafted)
        probs.append(distribution)
    return torch.stack(tokens[1:], 1), torch.stack(probs, 1) if setup.probabilistic else None


@dataclass(slots=True, kw_only=True)
class Decoded:
    """What `decode` saw."""

    sequences: Tensor  # [B, HORIZON] first tokens emitted after token 0
    num_accepted: Tensor  # [B, HORIZON] drafts accepted per step


def decode(setup: Setup, make_step: Callable[..., Any], num_requests: int) -> Decoded:
    """HORIZON steps of all requests."""
    verify = build_verifier(setup.verification, synthetic_acceptance_length=None)
    target, _ = setup.tables()
    request = torch.arange(num_requests)
    seed, last, computed = request + 1, torch.zeros_like(request), torch.full_like(request, 4)
    num_accepted = []
    emitted = torch.zeros(num_requests, HORIZON + 1, dtype=torch.long)  # the last column is a dump
    for step_index in range(HORIZON):
        drafts, probs = propose(setup, last, seed, computed)
        logits = target[torch.cat([last[:, None], drafts], 1)]
        num_drafts = torch.full_like(request, NUM_DRAFTS)
        if setup.ragged:
            num_drafts = (request + step_index) % (NUM_DRAFTS + 1)
            drafts[:, 1] = torch.where(request % 8 < 4, drafts[:, 1], -1)
        step = make_step(
            logits, drafts, draft_probs=probs, num_drafts=num_drafts, seed=seed,
            num_computed=computed, temperature=setup.temperature, **setup.truncation,
        )  # fmt: skip
        verdict = step.verdict(verify)
        place = computed[:, None] - 4 + torch.arange(NUM_DRAFTS + 1)
        place = torch.where(verdict.tokens >= 0, place, HORIZON).clamp(max=HORIZON)
        emitted.scatter_(1, place, verdict.tokens)
        last = verdict.tokens.gather(1, verdict.num_sampled[:, None] - 1).squeeze(1)
        computed = computed + verdict.num_sampled
        num_accepted.append(verdict.num_sampled - 1)
    return Decoded(sequences=emitted[:, :HORIZON], num_accepted=torch.stack(num_accepted, 1))


def goodness_of_fit(setup: Setup, make_step: Callable[..., Any]) -> float:
    """P-value of the emitted sequences under the chain; 0 if one is impossible under it."""
    distribution = chain_distribution(setup)
    possible = distribution > 0
    num_requests = num_requests_needed(int(possible.sum()) - 1)
    sequences = decode(setup, make_step, num_requests).sequences
    cell = (sequences * VOCAB ** torch.arange(HORIZON - 1, -1, -1)).sum(1)
    counts = torch.bincount(cell, minlength=VOCAB**HORIZON).double()
    if counts[~possible].sum() > 0:
        return 0.0
    expected, order = (distribution[possible] * num_requests).sort()
    counts = counts[possible][order]
    # The statistic needs five expected counts a cell: the rarest cells are pooled.
    pooled = int((expected < 5).sum()) + 1
    expected = torch.cat([expected[:pooled].sum(0, keepdim=True), expected[pooled:]])
    counts = torch.cat([counts[:pooled].sum(0, keepdim=True), counts[pooled:]])
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(float(statistic), len(expected) - 1))


@pytest.mark.parametrize(
    ("truncation", "temperature"),
    [
        ("untruncated", 0.7),
        ("untruncated", 1.3),
        ("top_k", 1.3),
        ("top_p", 0.7),
        ("top_k_top_p", 0.7),
        ("top_k_top_p", 1.3),
        ("min_p", 1.3),
    ],
)
@pytest.mark.parametrize("drafts", ["one_hot", "probabilistic"])
@pytest.mark.parametrize("verification", ["standard", "block"])
@pytest.mark.parametrize("distance", [DISTANCE, pytest.param(NEAR, marks=pytest.mark.slow)])
def test_emitted_sequences_follow_the_target(
    verification: str,
    drafts: str,
    truncation: str,
    temperature: float,
    distance: float,
    make_step: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches any bias of `distance` with POWER 0.99 at ALPHA 1e-4 (up to 36 000 requests for 0.03,
    80 000 for 0.02).

    Among them, as the tests below prove: noise shared between draft and residual, argmax drafts
    verified with a softmax, and noise that comes back when a position is drafted again.
    """
    monkeypatch.setitem(globals(), "DISTANCE", distance)
    setup = Setup(
        verification=verification,
        probabilistic=drafts == "probabilistic",
        temperature=temperature,
        truncation=TRUNCATIONS[truncation],
    )
    assert goodness_of_fit(setup, make_step) > ALPHA


class OnDevice:
    """A step that kernels verify."""

    def __init__(self, step: Any) -> None:
        self.step = step.to("cuda")

    def verdict(self, verify: Any) -> Any:
        verdict = self.step.verdict(verify)
        values = (verdict.tokens, verdict.num_sampled, verdict.num_rejected)
        tokens, num_sampled, num_rejected = (x.cpu() for x in values)
        return replace(verdict, tokens=tokens, num_sampled=num_sampled, num_rejected=num_rejected)


@pytest.mark.gpu
@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize("drafts", ["one_hot", "probabilistic"])
@pytest.mark.parametrize("verification", ["standard", "block"])
def test_kernels_emit_sequences_that_follow_the_target(
    verification: str,
    drafts: str,
    truncation: str,
    make_step: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same at DISTANCE 0.05, which is as many rows as one launch takes."""
    monkeypatch.setitem(globals(), "DISTANCE", 0.05)
    setup = Setup(
        verification=verification,
        probabilistic=drafts == "probabilistic",
        truncation=TRUNCATIONS[truncation],
        ragged=True,
    )

    def step(*args: Any, **kwargs: Any) -> OnDevice:
        return OnDevice(make_step(*args, **kwargs))

    assert goodness_of_fit(setup, step) > ALPHA
    if truncation != "untruncated":
        monkeypatch.setattr(rejection, "truncate_", lambda *_: None)
        assert goodness_of_fit(setup, step) < ALPHA


@pytest.mark.parametrize("drafts", ["one_hot", "probabilistic"])
@pytest.mark.parametrize("verification", ["standard", "block"])
def test_missing_drafts_do_not_bias(verification: str, drafts: str, make_step: Any) -> None:
    """Catches a residual taken where nothing was offered, and a bonus row that is off by one."""
    setup = Setup(verification=verification, probabilistic=drafts == "probabilistic", ragged=True)
    assert goodness_of_fit(setup, make_step) > ALPHA


@pytest.mark.parametrize("verification", ["standard", "block"])
def test_mutation_noise_shared_by_draft_and_residual_is_caught(
    verification: str, make_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a rejection the draft's noise is not fresh: a residual drawn with it is biased."""
    setup = Setup(verification=verification)
    assert goodness_of_fit(setup, make_step) > ALPHA
    shared = SimpleNamespace(ACCEPT=Purpose.ACCEPT, RESIDUAL=Purpose.DRAFT, BONUS=Purpose.BONUS)
    monkeypatch.setattr(reference, "Purpose", shared)
    assert goodness_of_fit(setup, make_step) < ALPHA


@pytest.mark.parametrize("verification", ["standard", "block"])
def test_mutation_softmax_for_argmax_drafts_is_caught(verification: str, make_step: Any) -> None:
    """An argmax draft was not sampled from the softmax it is the argmax of."""
    setup = Setup(verification=verification)
    assert goodness_of_fit(setup, make_step) > ALPHA
    assert goodness_of_fit(replace(setup, softmax_for_argmax=True), make_step) < ALPHA


def test_mutation_draft_noise_without_the_draft_index_is_caught(make_step: Any) -> None:
    """Block verification looks past the rejection: re-drafting with old noise is biased."""
    setup = Setup(verification="block", table_seed=3)
    assert goodness_of_fit(setup, make_step) > ALPHA
    assert goodness_of_fit(replace(setup, index_drafts=False), make_step) < ALPHA


def test_block_verification_accepts_more_and_all_lengths_occur(make_step: Any) -> None:
    """Sun et al. 2024 prove that block accepts no fewer; and the chains above are not trivial."""
    means = {}
    for verification in ("standard", "block"):
        accepted = decode(Setup(verification=verification), make_step, 20_000).num_accepted
        assert torch.bincount(accepted.flatten(), minlength=NUM_DRAFTS + 1).min() > 200
        means[verification] = accepted[:, 0].double().mean()
    assert means["block"] > means["standard"]

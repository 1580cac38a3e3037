"""Tokens that a drafter cannot say have draft probability 0, not a small one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hydraspec_kernels.sampling.rejection import reference

from hydraspec.sampling.verifier import build_verifier

RARE, COMMON, OTHER = 5, 2, 0


@pytest.mark.parametrize("verification", ["standard", "block"])
def test_a_rare_token_outside_is_what_a_rejection_recovers(
    verification: str, make_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target says `COMMON`, and once in ten thousand `RARE`, which the drafter lacks. Of what
    the drafter says too nothing is left over, so a rejection can only give `RARE`.
    """
    target = torch.zeros(40, 2, 6).double()
    target[..., COMMON], target[..., RARE] = 1 - 1e-4, 1e-4
    drafts = torch.full((40, 1), COMMON)
    step = make_step(target.log(), drafts, seed=torch.arange(40))
    step.state.draft_vocab_map = torch.tensor([OTHER, COMMON])
    step.state.draft_probs = torch.tensor([0.0, 1.0]).expand(80, 1, 2).contiguous()
    verify = build_verifier(verification, synthetic_acceptance_length=None)
    assert step.verdict(verify).num_rejected.sum() < 40
    monkeypatch.setattr(
        reference,
        "uniform",
        lambda seed, position, purpose, index: torch.ones_like(position, dtype=torch.double),
    )
    verdict = step.verdict(verify)
    assert verdict.num_rejected.tolist() == [1] * 40
    assert verdict.tokens[:, 0].tolist() == [RARE] * 40

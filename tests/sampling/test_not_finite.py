"""Tokens from logits that are NaN or infinite are marked by every rule on a CPU; kernels are held
to that in test_device_verification.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hydraspec.sampling.verifier import build_verifier

VOCAB = 6


@pytest.mark.parametrize("truncation", [{}, {"top_k": 2, "top_p": 0.9, "min_p": 0.1}])
@pytest.mark.parametrize("temperature", ["all_greedy", "temperature_0", "certain_target"])
@pytest.mark.parametrize("verification", ["standard", "block", "synthetic"])
def test_no_draft_is_accepted_by_logits_that_are_not_finite(
    verification: str, temperature: str, truncation: dict[str, Any], make_step: Any
) -> None:
    """Catches NaN, +inf and rows without a finite value that pass as good tokens. One -inf is no
    such row: banned tokens are at -inf."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 4, VOCAB, generator=generator).double()
    logits[:, range(4), [1, 2, 3, 4]] = 5.0
    logits[0, :, 5] = -torch.inf
    logits[1, 0, 0] = torch.nan
    logits[2, 1, :] = -torch.inf
    logits[3, 2, 3] = torch.inf
    logits[4, 3, :] = torch.nan
    logits[5, 0, :] = torch.inf
    logits[6, 3, :] = torch.nan  # of a request that does not sample
    step = make_step(
        logits,
        torch.tensor([[1, 2, 3]] * 7),
        temperature=1e-3 if temperature == "certain_target" else 0.0,
        all_greedy=temperature == "all_greedy",
        samples=torch.arange(7) < 6,
        **truncation,
    )
    verify = build_verifier(
        verification,
        synthetic_acceptance_length=4.0 if verification == "synthetic" else None,
    )
    verdict = step.verdict(verify)
    assert verdict.not_finite.tolist() == [0, 1, 1, 1, 1, 1, 0]
    assert verdict.num_sampled.tolist() == [4, 1, 2, 3, 4, 1, 0]
    assert verdict.num_rejected.tolist() == [0, 3, 2, 1, 0, 3, 0]
    emitted = torch.arange(4) < verdict.num_sampled[:, None]
    assert ((verdict.tokens >= 0) & (verdict.tokens < VOCAB)).equal(emitted)

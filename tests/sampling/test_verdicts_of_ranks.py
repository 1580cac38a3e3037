"""Ranks that each hold some columns of the logits come to the verdict of one that holds all."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from thread_ranks import as_ranks

from hydraspec.parallel.layout import Layout
from hydraspec.parallel.ranks import Ranks
from hydraspec.parallel.vocabulary import Vocabulary
from hydraspec.sampling.verifier import build_verifier
from hydraspec.types import Verdict

VOCAB, K = 37, 3  # uneven over 2 and 4 ranks
TRUNCATIONS = {"none": {}, "all": {"top_k": 5, "top_p": 0.8, "min_p": 0.05}}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("drafts", ["certain", "probabilistic"])
@pytest.mark.parametrize("truncation", [*TRUNCATIONS, "greedy"])
@pytest.mark.parametrize("verification", ["standard", "block", "synthetic"])
def test_every_rank_has_the_verdict_of_one_process(
    make_step: Any, verification: str, truncation: str, drafts: str, ranks: int
) -> None:
    """Mixed temperatures, missing drafts, rows of NaN and of nothing but minus infinity."""
    generator = torch.Generator().manual_seed(ranks)
    count = 12
    logits = torch.randn(count, K + 1, VOCAB, generator=generator, dtype=torch.float64) * 2
    logits = logits.round(decimals=1)  # so that some are equal
    logits[4, 0, VOCAB - 1] = math.nan
    logits[7, 0] = -math.inf
    probs = (logits[:, :K].nan_to_num(neginf=0.0) / 2).softmax(-1)
    probs[..., -3:] = 0.0
    tokens = torch.multinomial(probs.flatten(0, 1), 1, generator=generator).view(count, K)
    tokens = torch.where(torch.arange(count)[:, None] % 2 == 0, logits[:, :K].argmax(-1), tokens)
    tokens[5, 1] = -1
    request = torch.arange(count)
    is_greedy = truncation == "greedy"
    step = make_step(
        logits,
        tokens,
        draft_probs=probs.float() if drafts == "probabilistic" else None,
        num_drafts=request % (K + 1),
        samples=request != 9,
        temperature=0.0 if is_greedy else torch.tensor([0.0, 0.6, 1.0])[request % 3],
        seed=request * 31,
        all_greedy=is_greedy,
        **TRUNCATIONS.get(truncation, {}),
    )
    rule = {
        "verification": verification,
        "synthetic_acceptance_length": 2.5 if verification == "synthetic" else None,
    }
    wanted = step.verdict(build_verifier(**rule))
    assert wanted.num_rejected.any()
    assert wanted.not_finite.any()

    def work(rank: Ranks) -> Verdict:
        vocabulary = Vocabulary(VOCAB, rank.group)
        stop = vocabulary.first + vocabulary.num_tokens
        columns = step.logits[:, vocabulary.first : stop]
        padding = vocabulary.num_rows - vocabulary.num_tokens
        own = torch.nn.functional.pad(columns, (0, padding), value=math.nan)
        verdict: Verdict = replace(step, logits=own).verdict(
            build_verifier(**rule, vocabulary=vocabulary)
        )
        return verdict

    for found in as_ranks(Layout(tensor=ranks), work):
        for field in fields(found):
            assert torch.equal(getattr(found, field.name), getattr(wanted, field.name)), field.name

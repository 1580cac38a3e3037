"""Sampled drafts in a narrower vocabulary leave the target's distribution as it is.

Many requests with the same prompt and different seeds decode two tokens. The first comes straight
from the target, the second from verification against a drafter that can propose only part of the
vocabulary: what it lacks has to come from the residual. A chi-squared test compares the second with
the target's own distribution, summed over the first.

Power: each test finds a distribution at the total variation distance DISTANCES of its number of
requests with probability above POWER at level ALPHA, which `p_value` asserts for its cells.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import block_worlds
import numpy as np
import pytest
import torch
from block_worlds import BlockWorld
from eagle_worlds import EagleWorld, make_world
from records import request
from sampled_cells import power
from scenarios import make_engine
from scipy import stats
from tiny_targets import run_config

from hydraspec.config.options import DSparkOptions
from hydraspec.config.schema import DraftSampling, PerStep, Verification, Weights
from hydraspec.engine import slots
from hydraspec.engine.costs import CostTable
from hydraspec.engine.schedule import draft_lengths
from hydraspec.speculators import dspark
from hydraspec.speculators.dflash2 import DFlash2Speculator
from hydraspec.speculators.none import NoSpeculator
from hydraspec.speculators.registry import build_speculator
from hydraspec.types import Completion, Draft, StepRecord

ALPHA, POWER = 1e-4, 0.99
NUM_REQUESTS, MANY_REQUESTS = 1250, 2000
DISTANCES = {NUM_REQUESTS: 0.15, MANY_REQUESTS: 0.12}
TEMPERATURE = 0.7
LEAST = 0.81  # the median of the first drafts' estimated survival


def truth(world: EagleWorld | BlockWorld, prompt: tuple[int, ...]) -> np.ndarray:
    """[V] how the second token after `prompt` is distributed, from fresh prefills."""
    config = run_config("unused", max_num_batched_tokens=4096, max_num_seqs=1)
    engine = make_engine(config, world.target, NoSpeculator(config))

    def after(tokens: tuple[int, ...]) -> np.ndarray:
        logits = torch.from_numpy(engine.next_token_logits(tokens))
        return (logits / TEMPERATURE).softmax(-1).numpy()

    return sum(weight * after((*prompt, token)) for token, weight in enumerate(after(prompt)))  # type: ignore[return-value]


def second_tokens(
    world: EagleWorld | BlockWorld,
    prompt: tuple[int, ...],
    verification: Verification,
    broken: bool,
    *,
    least: float | None = None,
    costs: Path | None = None,
    num_requests: int = NUM_REQUESTS,
) -> tuple[np.ndarray, list[int]]:
    """[V] counts of the second token, and how many drafts each verify step accepted; `least` is
    DSpark's min_survival, `costs` a table by which the engine chooses drafts."""
    config = run_config(
        world.folder,
        method=world.plain.method,
        drafter=world.drafter,
        k=2,
        max_model_len=32,
        max_num_seqs=250,
        max_num_batched_tokens=4096,
        draft_sampling=DraftSampling.probabilistic,
        verification=verification,
    )
    config.method.weights = Weights.checkpoint
    config.method.options = None if least is None else DSparkOptions(min_survival=least)
    if costs is not None:
        config.method.num_speculative_tokens, config.method.max_speculative_tokens = PerStep.auto, 2
        config.method.costs = str(costs)
    speculator = build_speculator(config)
    speculator.load(world.target)
    engine = make_engine(config, world.target, speculator)
    if broken:
        ids = engine.parts.runner.state.draft_vocab_map
        assert ids is not None
        engine.parts.runner.state.draft_vocab_map = ids.roll(1)
    requests = [
        request(
            index,
            prompt_token_ids=list(prompt),
            temperature=TEMPERATURE,
            seed=index,
            max_tokens=2,
            ignore_eos=True,
        )
        for index in range(num_requests)
    ]
    counts, accepted = np.zeros(world.vocab_size), []
    for event in engine.run(requests, concurrency=None):
        if isinstance(event, Completion):
            counts[event.output_token_ids[1]] += 1
        elif isinstance(event, StepRecord):
            accepted += [part.num_accepted for part in event.requests if part.draft_token_ids]
    return counts, accepted


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Of a chi-squared test, cells of fewer than five expected counts pooled, which hides no more
    of a distance than their share."""
    num_requests, order = round(expected.sum()), expected.argsort()
    counts, expected = counts[order], expected[order]
    pooled = int((expected.cumsum() < 5).sum()) + 1
    counts = np.concatenate([[counts[:pooled].sum()], counts[pooled:]])
    expected = np.concatenate([[expected[:pooled].sum()], expected[pooled:]])
    seen = DISTANCES[num_requests] - expected[0] / num_requests
    assert power(num_requests, len(expected) - 1, seen, ALPHA) > POWER
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(statistic, len(expected) - 1))


@pytest.mark.parametrize(
    ("name", "verification"),
    [
        ("eagle3 on gemma4", Verification.standard),
        pytest.param("eagle3 on gemma4", Verification.block, marks=pytest.mark.slow),
        pytest.param("peagle on gemma4", Verification.standard, marks=pytest.mark.slow),
        ("dspark on qwen3", Verification.standard),
        pytest.param("dflash on qwen3", Verification.standard, marks=pytest.mark.slow),
    ],
)
def test_sampled_drafts_of_a_narrow_vocabulary_do_not_bias(
    tmp_path: Path, name: str, verification: Verification
) -> None:
    """Catches probabilities under the wrong ids: a map turned by one place fails the same test."""
    if name in block_worlds.WORLDS:
        # At 1 probabilities of DFlash's drafts are so even that their ids hardly matter.
        sharpness = 3.0 if name.startswith("dflash") else 1.0
        world = block_worlds.make_world(tmp_path, name, num_prompts=3, sharpness=sharpness)
    else:
        world = make_world(tmp_path, name, num_prompts=3)
    assert world.plain.ids is not None
    prompt = min(world.continuations, key=len)
    expected = truth(world, prompt) * NUM_REQUESTS
    counts, accepted = second_tokens(world, prompt, verification, broken=False)
    assert p_value(counts, expected) > ALPHA
    shares = np.bincount(accepted, minlength=3) / len(accepted)
    assert shares.min() > 0.01, shares  # 0, 1 and 2 of the drafts are accepted
    lacking = np.setdiff1d(np.arange(world.vocab_size), world.plain.ids.numpy())
    assert counts[lacking].sum() > 20, "the residual has nothing to add"
    if verification is Verification.standard:
        broken, _ = second_tokens(world, prompt, verification, broken=True)
        assert p_value(broken, expected) < ALPHA


def test_drafts_drawn_from_candidates_do_not_bias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DFlash2 draws from a few tokens alone. Catches drafts that carry other probabilities than
    those they were drawn from: with those of even candidates the same test fails."""
    world = block_worlds.make_world(tmp_path, "dflash2 on qwen3", num_prompts=3, sharpness=6.0)
    prompt = min(world.continuations, key=len)
    expected = truth(world, prompt) * NUM_REQUESTS
    counts, accepted = second_tokens(world, prompt, Verification.standard, broken=False)
    assert p_value(counts, expected) > ALPHA
    shares = np.bincount(accepted, minlength=3) / len(accepted)
    assert shares.min() > 0.01, shares
    drawn = DFlash2Speculator.draw_draft

    def even(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, probs = drawn(*args)
        return tokens, (probs > 0).to(probs.dtype) / (probs > 0).sum(1, keepdim=True)

    monkeypatch.setattr(DFlash2Speculator, "draw_draft", even)
    broken, _ = second_tokens(world, prompt, Verification.standard, broken=False)
    assert p_value(broken, expected) < ALPHA


def leave_out_odd_tokens(draft: Draft, survivals: torch.Tensor, least: float | None) -> Draft:
    """As a rule that looks at the draft itself."""
    tokens = draft.tokens.masked_fill(draft.tokens % 2 == 1, -1)
    return replace(draft, tokens=tokens, survivals=survivals)


@pytest.mark.slow
@pytest.mark.parametrize(
    "verification",
    [Verification.standard, Verification.block],
    ids=lambda found: found.value,
)
def test_leaving_unlikely_drafts_out_does_not_bias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verification: Verification
) -> None:
    """Catches a choice of drafts that depends on the drafts' own tokens: such a rule fails the same
    test."""
    world = block_worlds.make_world(tmp_path, "dspark on qwen3", num_prompts=3, sharpness=3.0)
    prompt = min(world.continuations, key=len)
    expected = truth(world, prompt) * MANY_REQUESTS
    decoded = partial(
        second_tokens,
        *(world, prompt, verification, False),
        least=LEAST,
        num_requests=MANY_REQUESTS,
    )
    counts, accepted = decoded()
    share = len(accepted) / MANY_REQUESTS
    assert 0.2 < share < 0.8, share  # the first draft is often left out, and often verified
    assert p_value(counts, expected) > ALPHA
    monkeypatch.setattr(dspark, "trimmed", leave_out_odd_tokens)
    biased, _ = decoded()
    assert p_value(biased, expected) < ALPHA


def by_their_last_estimate(survivals: Sequence[Sequence[float]], least: float) -> list[int]:
    """A rule that looks at an estimate which reads the first draft: all drafts or none."""
    first, both = np.array(survivals).T
    of_second = both / first
    found: list[int] = np.where(of_second >= np.median(of_second), 2, 0).tolist()
    return found


@pytest.mark.slow
def test_choosing_drafts_by_estimates_does_not_bias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of a step verify as many drafts as are worth their rows by DSpark's estimates.
    Catches a choice that depends on the drafts' own tokens: such a rule fails the same test."""
    world = block_worlds.make_world(tmp_path, "dspark on qwen3", num_prompts=3, sharpness=3.0)
    prompt = min(world.continuations, key=len)
    expected = truth(world, prompt) * MANY_REQUESTS
    steps, rates = ((1.0, 1.3, 1.6),), (0.9, 0.9)
    table = CostTable(batches=(1,), drafts=(0, 1, 2), step_ms=steps, rates=rates)
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(table.as_json()))
    monkeypatch.setattr(draft_lengths, "least_survivals", lambda *args: (LEAST, LEAST))
    monkeypatch.setattr(slots, "RAGGED_SHARE", 0.0)  # steps of two lengths cost no more
    decoded = partial(second_tokens, *(world, prompt, Verification.standard, False), costs=path)
    counts, accepted = decoded(num_requests=MANY_REQUESTS)
    share = len(accepted) / MANY_REQUESTS
    assert 0.2 < share < 0.9, share
    assert p_value(counts, expected) > ALPHA
    monkeypatch.setattr(draft_lengths, "leading", by_their_last_estimate)
    biased, _ = decoded(num_requests=MANY_REQUESTS)
    assert p_value(biased, expected) < ALPHA

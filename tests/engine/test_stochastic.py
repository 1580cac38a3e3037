"""Sampled output of whole engine runs follows the target's distribution.

The verifiers are tested by themselves in tests/sampling; here drafts, their probabilities, slots,
commits and resumed requests are on trial together. The joint distribution of the first three tokens
is known exactly: vocabulary 5, so 125 cells, each the product of three fresh prefills.

Power: a total variation distance of 0.05 has a noncentrality of at least 4 n 0.05^2 = 140 at
n = 14,000, which a chi-squared test with 124 degrees of freedom at alpha 1e-4 finds with
probability above 0.99. So does one of 0.1 at n = 3,500, the number of every suite's run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from graph_runs import lengths_at_random
from scenarios import make_engine
from scipy.stats import chi2
from tiny_targets import assistant_config, gemma4_config, load, run_config, write_folder

from hydraspec.config.schema import DraftSampling, Dtype, PerStep, Verification
from hydraspec.engine.run import state
from hydraspec.models.base import TargetModel
from hydraspec.speculators.gemma4 import Gemma4Speculator
from hydraspec.speculators.none import NoSpeculator
from hydraspec.types import Request, RequestState, SamplingParams, StepRecord

VOCABULARY, LENGTH, ALPHA = 5, 3, 1e-4
FEW_REQUESTS, NUM_REQUESTS = 3_500, 14_000
PROMPT = [2, 3, 4, 2, 2, 3]
TEMPERATURE = 1 / 3
AS_USUAL = Verification.standard, DraftSampling.probabilistic


@dataclass
class World:
    target: TargetModel
    folder: Path
    drafter: Path
    expected: np.ndarray  # [V, V, V]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    torch.set_num_threads(1)
    fields = {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY}
    config = gemma4_config(tie_word_embeddings=False, **fields)
    tmp_path = tmp_path_factory.mktemp("stochastic")
    folder = write_folder(tmp_path / "target", config)
    drafter = write_folder(tmp_path / "assistant", assistant_config(config))
    target = load(folder, weights="random", seed=7)
    return World(target, folder, drafter, exact_distribution(target, folder))


def exact_distribution(target: TargetModel, folder: Path) -> np.ndarray:
    settings = run_config(folder, max_num_seqs=1)
    engine = make_engine(settings, target, NoSpeculator(settings))

    def after(tokens: list[int]) -> np.ndarray:
        logits = engine.next_token_logits(PROMPT + tokens) / TEMPERATURE
        return np.exp(logits - np.logaddexp.reduce(logits))

    joint = np.zeros((VOCABULARY,) * LENGTH)
    first = after([])
    for a in range(VOCABULARY):
        second = after([a])
        for b in range(VOCABULARY):
            joint[a, b] = first[a] * second[b] * after([a, b])
    return joint


def p_value(
    world: World,
    verification: Verification,
    draft_sampling: DraftSampling,
    *,
    disturbed: bool,
    num_requests: int,
    by_request: bool = False,
) -> float:
    """Of the hypothesis that the sampled requests follow the target.

    Disturbed: a small cache (preemptions), chunked prefill, and every fifth request greedy.
    By request: numbers of drafts change from step to step, and differ between requests.
    """
    slots = 24 if disturbed else 64
    settings = run_config(
        world.folder,
        method="gemma4_mtp",
        drafter=world.drafter,
        k=3,
        dtype=Dtype.float32,
        draft_sampling=draft_sampling,
        verification=verification,
        max_num_seqs=slots,
        max_num_batched_tokens=slots * 4 if not disturbed else 40,
    )
    if by_request:
        settings.method.num_speculative_tokens = PerStep.auto
        settings.method.max_speculative_tokens = 3
    speculator = Gemma4Speculator(settings)
    speculator.load(world.target)
    engine = make_engine(settings, world.target, speculator, 0.05 if disturbed else 1.0)
    if by_request:
        lengths = engine.parts.scheduler.draft_lengths
        assert lengths is not None
        lengths.follow(lengths_at_random(3))
    requests = [sampled_request(index, disturbed) for index in range(num_requests)]
    counts, num_preempted = np.zeros_like(world.expected), 0
    for event in engine.run(requests, concurrency=None):
        if isinstance(event, StepRecord):
            num_preempted += event.num_preempted
        elif requests[event.index].sampling.temperature:
            counts[tuple(event.output_token_ids[:LENGTH])] += 1
    assert (num_preempted > 0) == disturbed
    expected = world.expected * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(chi2.sf(statistic, counts.size - 1))


def sampled_request(index: int, disturbed: bool) -> Request:
    greedy = disturbed and index % 5 == 0
    sampling = SamplingParams(
        temperature=0.0 if greedy else TEMPERATURE,
        seed=index,
        max_tokens=LENGTH + (index % 4 if disturbed else 0),
        ignore_eos=True,
    )
    return Request(index=index, id=str(index), prompt_token_ids=PROMPT, sampling=sampling)


def test_a_few_sampled_runs_follow_the_target(world: World) -> None:
    """Catches probabilities of another slot, stale drafts, noise used twice."""
    assert p_value(world, *AS_USUAL, disturbed=False, num_requests=FEW_REQUESTS) > ALPHA


@pytest.mark.parametrize("disturbed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_drafts_by_request_follow_the_target(world: World, disturbed: bool) -> None:
    """Catches probabilities of drafts that a request does not verify, or of an earlier step."""
    found = p_value(
        *(world, *AS_USUAL), disturbed=disturbed, num_requests=FEW_REQUESTS, by_request=True
    )
    assert found > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("verification", [Verification.standard, Verification.block])
@pytest.mark.parametrize(
    ("draft_sampling", "disturbed"),
    [
        pytest.param(DraftSampling.probabilistic, False, id="probabilistic"),
        pytest.param(DraftSampling.greedy, False, id="one_hot"),
        pytest.param(DraftSampling.greedy, True, id="one_hot_disturbed"),
        pytest.param(DraftSampling.probabilistic, True, id="probabilistic_disturbed"),
    ],
)
def test_sampled_runs_follow_the_target(
    world: World, verification: Verification, draft_sampling: DraftSampling, disturbed: bool
) -> None:
    """Catches a biased resume, too."""
    given = verification, draft_sampling
    assert p_value(world, *given, disturbed=disturbed, num_requests=NUM_REQUESTS) > ALPHA


@pytest.mark.slow
def test_probabilities_of_another_slot_are_caught(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above fails if drafts are verified against another request's probabilities."""
    true_store = state.store_draft

    def store(into: RequestState, batch: object, draft: object) -> None:
        true_store(into, batch, draft)  # type: ignore[arg-type]
        if into.draft_probs is not None:
            into.draft_probs.copy_(into.draft_probs.roll(1, 0))

    monkeypatch.setattr("hydraspec.engine.run.runner.store_draft", store)
    assert p_value(world, *AS_USUAL, disturbed=False, num_requests=FEW_REQUESTS) < ALPHA

"""Greedy output with drafts equals greedy output without, whatever disturbs the batch.

The continuations come from uncached prefills of the target, so the cache, the scheduler and the
verifier are all on trial. Each scenario draws batch mix, prompt lengths across window and block
borders, chunk sizes, cache pressure, stop tokens and strings, and max_model_len edges. `make
test-slow` runs the whole set.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from fuzz_stages import RANDOM_GEMMAS
from grids import in_turn
from scenarios import (
    KNOWN_TOKENS,
    Outcome,
    World,
    draw_scenario,
    oracle_for,
    random_prompt,
    run_scenario,
    seeded,
    uncached_continuations,
)
from tiny_targets import assistant_config, gemma4_config, load, write_folder
from torch import Tensor

from hydraspec.engine import native as engine
from hydraspec.engine.cache.kv_cache import KVCache
from hydraspec.engine.run import runner
from hydraspec.engine.schedule.scheduler import Scheduler
from hydraspec.engine.schedule.sequence import Sequence
from hydraspec.sampling import verifier
from hydraspec.speculators.gemma4 import Gemma4Speculator
from hydraspec.types import Batch, RequestState, SamplingParams, Verdict

FLAVOURS = {
    "dense": RANDOM_GEMMAS["sliding"],
    "shared_kv": RANDOM_GEMMAS["sharing"],
    "experts": RANDOM_GEMMAS["experts"],
}


def make_world(tmp_path: Path, flavour: str, dtype: torch.dtype, num_prompts: int) -> World:
    # Untied: with a tied head a random target mostly repeats its last token, whatever it reads.
    config = gemma4_config(**FLAVOURS[flavour], tie_word_embeddings=False)
    folder = write_folder(tmp_path / flavour, config)
    target = load(folder, dtype, weights="random", seed=7)
    world = World(folder=str(folder), target=target)
    rng = seeded(11)
    # Lengths around the window and around multiples of block sizes, and one-token prompts.
    lengths = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 47]
    lengths = rng.permutation(lengths)[:num_prompts]
    prompts = [random_prompt(rng, int(length), target.vocab_size) for length in lengths]
    world.continuations = uncached_continuations(target, prompts, KNOWN_TOKENS)
    return world


@pytest.fixture(scope="module")
def world_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, torch.dtype], World]:
    """Worlds by flavour and dtype, each made once: no run changes a target."""
    return cache(
        lambda flavour, dtype: make_world(tmp_path_factory.mktemp("world"), flavour, dtype, 7)
    )


def run_oracle_scenarios(world: World, num_scenarios: int, seed: int) -> Outcome:
    outcome = Outcome()
    for number in range(num_scenarios):
        rng = np.random.default_rng([seed, number])
        scenario = draw_scenario(world, rng, k=1 + number % 8)
        run_scenario(scenario, world.target, oracle_for(world, scenario), outcome)
    return outcome


@pytest.mark.parametrize(("flavour", "dtype"), in_turn(FLAVOURS, (torch.float64, torch.float32)))
def test_oracle_drafts_are_lossless(
    world_of: Callable[[str, torch.dtype], World], flavour: str, dtype: torch.dtype
) -> None:
    """Catches wrong slots, stale drafts, off-by-one commits, early frees: any changes a token.

    Float32 outputs may part at a near tie of the target (`assert_near_tie`), nowhere else.
    """
    outcome = run_oracle_scenarios(world_of(flavour, dtype), 24, seed=1)
    assert outcome.num_preempted > 0, "no scenario met cache pressure"
    assert {accepted for _, accepted in outcome.accepted} >= set(range(7))


@pytest.mark.slow
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_oracle_drafts_are_lossless_everywhere(tmp_path: Path, flavour: str) -> None:
    """480 scenarios a flavour; every accepted length 0..K occurs at least 20 times at every K."""
    world = make_world(tmp_path, flavour, torch.float64, num_prompts=14)
    outcome = run_oracle_scenarios(world, 480, seed=2)
    assert outcome.num_preempted > 20
    for k in range(1, 9):
        for accepted in range(k + 1):
            assert outcome.accepted[k, accepted] >= 20, (k, accepted)


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_random_assistant_is_lossless(
    tmp_path: Path,
    world_of: Callable[[str, torch.dtype], World],
    flavour: str,
    dtype: torch.dtype,
) -> None:
    """The real drafter: it reads the target's cache and must not disturb it."""
    world = world_of(flavour, dtype)
    config = gemma4_config(**FLAVOURS[flavour])
    drafter = write_folder(tmp_path / "assistant", assistant_config(config))
    outcome = Outcome()
    for number in range(8):
        rng = np.random.default_rng([3, number])
        scenario = draw_scenario(world, rng, k=1 + number % 8)
        scenario.config.method.checkpoint = str(drafter)
        speculator = Gemma4Speculator(scenario.config)
        speculator.load(world.target)
        run_scenario(scenario, world.target, speculator, outcome)
    assert outcome.num_scenarios == 8


def keep_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device forgets that drafts were rejected: positions drift."""
    true_commit = runner.commit_tokens

    def commit(state: RequestState, batch: Batch, verdict: Verdict) -> None:
        verdict.num_rejected = torch.zeros_like(verdict.num_rejected)
        true_commit(state, batch, verdict)

    monkeypatch.setattr(runner, "commit_tokens", commit)


def slide_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliding blocks are freed while the window still needs their newest position."""
    true_slide = KVCache.slide
    monkeypatch.setattr(
        KVCache, "slide", lambda self, slot, n: true_slide(self, slot, n + self.specs[0].block_size)
    )


def accept_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verifier lets the first wrong draft pass."""
    true_verify = verifier.verify_prefix

    def verify(choices: Tensor, batch: Batch) -> Verdict:
        verdict = true_verify(choices, batch)
        more = (verdict.num_rejected > 0).long()
        width = torch.arange(verdict.tokens.shape[1])
        wrong = (width == verdict.num_sampled[:, None] - 1) & (more[:, None] > 0)
        padded = torch.nn.functional.pad(batch.draft_tokens, (0, 1), value=0)
        verdict.tokens = torch.where(wrong, padded, verdict.tokens)
        return verdict

    monkeypatch.setattr(verifier, "verify_prefix", verify)


def forget_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preempted request comes back without the token it sampled last."""
    true_preempt, true_write = Scheduler._preempt, engine.write_request
    preempted: list[list[int]] = []

    def preempt(self: Scheduler, sequence: Sequence) -> None:
        preempted.append(sequence.token_ids)
        true_preempt(self, sequence)

    def write(
        state: RequestState,
        slot: int,
        tokens: list[int],
        sampling: SamplingParams,
        num_computed: int,
    ) -> None:
        is_resumed = any(tokens is known for known in preempted)
        true_write(state, slot, tokens[:-1] if is_resumed else tokens, sampling, num_computed)

    monkeypatch.setattr(Scheduler, "_preempt", preempt)
    monkeypatch.setattr(engine, "write_request", write)


@pytest.mark.parametrize(
    "plant", [keep_rejected, slide_too_far, accept_one_more, forget_the_newest]
)
def test_planted_bugs_are_caught(
    monkeypatch: pytest.MonkeyPatch,
    world_of: Callable[[str, torch.dtype], World],
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """The scenarios above prove something only if they fail when the engine is wrong."""
    world = world_of("dense", torch.float64)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run_oracle_scenarios(world, 24, seed=1)

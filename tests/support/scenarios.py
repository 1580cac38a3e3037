"""Random engine scenarios: a target with known greedy continuations, and everything that may
disturb a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from oracle import OracleSpeculator
from tiny_targets import run_config

from hydraspec.config.schema import RunConfig
from hydraspec.engine.cache.kv_budget import CacheSize, plan_num_blocks
from hydraspec.engine.cache.kv_cache import KVCache
from hydraspec.engine.native import NativeEngine
from hydraspec.engine.run.loading import assemble
from hydraspec.models.base import TargetModel
from hydraspec.speculators.base import BaseSpeculator
from hydraspec.speculators.none import NoSpeculator
from hydraspec.types import Completion, Request, RequestStep, SamplingParams, StepRecord

LONGEST_OUTPUT = 24
# A verify step may run past the end of a request: K more tokens and the drafts behind them must be
# known.
KNOWN_TOKENS = LONGEST_OUTPUT + 10


class LetterTokenizer:
    """Token i is one letter; enough for stop strings."""

    def encode(self, prompt: str) -> list[int]:
        return [ord(letter) - 48 for letter in prompt]

    def encode_chat(self, messages: object, *, after: str | None = None) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(48 + token) for token in ids)


@dataclass
class World:
    """A target, prompts, and what the target greedily says after each (from uncached prefills)."""

    folder: str
    target: TargetModel
    continuations: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size


def make_engine(
    config: RunConfig, target: TargetModel, speculator: BaseSpeculator, cache_share: float = 1.0
) -> NativeEngine:
    """An engine over a loaded target; `cache_share` below 1 shrinks every pool."""
    max_len = config.target.max_model_len or target.max_position_embeddings
    block_size = config.engine.kv_cache.block_size
    specs = target.kv_groups(block_size) + speculator.kv_groups(block_size, target.num_layers)
    size = CacheSize(
        max_num_seqs=config.engine.max_num_seqs,
        max_model_len=max_len,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        num_speculative_tokens=speculator.num_speculative_tokens,
        num_lookahead_tokens=speculator.num_lookahead_tokens,
    )
    wanted = plan_num_blocks(specs, size, target.dtype, 1 << 40)
    floor = [
        -(-(min(max_len, spec.window or max_len) + 20) // spec.block_size) + 2 for spec in specs
    ]
    kv = KVCache(
        specs,
        [max(low, int(count * cache_share)) for low, count in zip(floor, wanted, strict=True)],
        num_layers=max([target.num_layers, *(n + 1 for spec in specs for n in spec.layers)]),
        num_slots=config.engine.max_num_seqs,
        max_tokens=size.max_tokens,
        dtype=target.dtype,
        device=target.device,
    )
    return NativeEngine(config, assemble(config, target, LetterTokenizer(), speculator, kv))


def uncached_continuations(
    target: TargetModel, prompts: Sequence[tuple[int, ...]], length: int
) -> dict[tuple[int, ...], list[int]]:
    """Greedy tokens by prompt, each from a fresh prefill of everything before it."""
    config = run_config("unused", max_num_batched_tokens=4096, max_num_seqs=len(prompts))
    engine = make_engine(config, target, NoSpeculator(config))
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    texts = [list(prompt) for prompt in prompts]
    for _ in range(length):
        requests = [
            Request(index=index, id=str(index), sampling=one, prompt_token_ids=list(text))
            for index, text in enumerate(texts)
        ]
        for event in engine.run(requests, concurrency=None):
            if isinstance(event, Completion):
                texts[event.index] += event.output_token_ids
    return {prompt: text[len(prompt) :] for prompt, text in zip(prompts, texts, strict=True)}


@dataclass
class Scenario:
    """One drawn combination; `expected` is worked out from the continuation by plain rules."""

    config: RunConfig
    requests: list[Request]
    expected: list[tuple[list[int], str]]
    concurrency: int | None
    cache_share: float


def draw_scenario(world: World, rng: np.random.Generator, k: int) -> Scenario:
    """Mixed prompt lengths, chunk sizes, cache sizes, stops, limits."""
    prompts = list(world.continuations)
    chosen = [prompts[i] for i in rng.integers(0, len(prompts), rng.integers(1, 7))]
    max_len = None
    if rng.random() < 0.3:  # the edges of max_model_len
        max_len = int(max(len(prompt) for prompt in chosen) + rng.integers(1, 12))
    limit = max_len or world.target.max_position_embeddings
    requests, expected = [], []
    for index, prompt in enumerate(chosen):
        sampling = _draw_sampling(world, rng, prompt)
        requests.append(
            Request(index=index, id=str(index), sampling=sampling, prompt_token_ids=list(prompt))
        )
        expected.append(_expect(world.continuations[prompt], sampling, limit - len(prompt)))
    config = run_config(
        world.folder,
        k=k,
        method="gemma4_mtp",
        max_model_len=max_len,
        max_num_seqs=int(rng.integers(1, 7)),
        max_num_batched_tokens=int(rng.choice([k + 1, 2 * (k + 1), 13 + k, 64, 256])),
        block_size=int(rng.choice([1, 2, 4, 8, 16])),
        seed=int(rng.integers(0, 1 << 30)),
    )
    return Scenario(
        config=config,
        requests=requests,
        expected=expected,
        concurrency=int(rng.integers(1, 5)) if rng.random() < 0.3 else None,
        cache_share=float(rng.choice([0.05, 0.2, 0.4, 1.0])),
    )


def _draw_sampling(
    world: World, rng: np.random.Generator, prompt: tuple[int, ...]
) -> SamplingParams:
    continuation = world.continuations[prompt]
    max_tokens = int(rng.integers(1, LONGEST_OUTPUT + 1))
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    if rng.random() < 0.3:
        stop_token_ids = (continuation[int(rng.integers(0, LONGEST_OUTPUT))],)
    if rng.random() < 0.3:
        start = int(rng.integers(0, LONGEST_OUTPUT))
        letters = continuation[start : start + int(rng.integers(1, 4))]
        stop = (LetterTokenizer().decode(letters),)
    return SamplingParams(
        max_tokens=max_tokens,
        stop=stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(rng.random() < 0.5),
    )


def _expect(continuation: list[int], sampling: SamplingParams, room: int) -> tuple[list[int], str]:
    """Output and finish reason by definition: the shortest prefix that ends the request."""
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {1})
    for length in range(1, len(continuation) + 1):
        output = continuation[:length]
        text = LetterTokenizer().decode(output)
        if output[-1] in ends or any(stop in text for stop in sampling.stop):
            return output, "stop"
        if length >= min(sampling.max_tokens, room):
            return output, "length"
    raise AssertionError("the known continuation is too short for this scenario")


@dataclass
class Outcome:
    """What happened over many scenarios."""

    num_scenarios: int = 0
    num_preempted: int = 0
    accepted: Counter[tuple[int, int]] = field(
        default_factory=Counter
    )  # (K, accepted) of full offers


def run_scenario(
    scenario: Scenario, target: TargetModel, speculator: BaseSpeculator, outcome: Outcome
) -> dict[int, Completion]:
    """Run it and assert token ids and finish reasons."""
    engine = make_engine(scenario.config, target, speculator, scenario.cache_share)
    k = scenario.config.method.num_speculative_tokens
    done: dict[int, Completion] = {}
    for event in engine.run(scenario.requests, concurrency=scenario.concurrency):
        if isinstance(event, StepRecord):
            outcome.num_preempted += event.num_preempted
            for part in event.requests:
                assert_every_draft_is_offered(scenario, part)
                if len(part.draft_token_ids) == k:
                    outcome.accepted[k, part.num_accepted] += 1
        else:
            done[event.index] = event
    outcome.num_scenarios += 1
    assert sorted(done) == list(range(len(scenario.requests)))
    for index, (tokens, reason) in enumerate(scenario.expected):
        got = done[index]
        if got.output_token_ids != tokens and target.dtype == torch.float32:
            assert_near_tie(engine, got, tokens)
            continue
        assert got.output_token_ids == tokens, (index, scenario, got.error)
        assert got.finish_reason == reason, (index, scenario)
    assert engine.parts.runner.kv.usage == 0.0, "blocks leaked"
    return done


def assert_every_draft_is_offered(scenario: Scenario, part: RequestStep) -> None:
    """In a roomy cache a decoding step verifies K drafts, and fewer only at max_model_len."""
    if part.is_prefill or scenario.cache_share < 1.0:
        return
    num_offered = scenario.config.method.num_speculative_tokens
    if scenario.config.target.max_model_len is not None:
        room = scenario.config.target.max_model_len - part.num_computed_tokens - 2
        num_offered = min(num_offered, room)
    assert len(part.draft_token_ids) == num_offered, part


def assert_near_tie(engine: NativeEngine, got: Completion, expected: list[int]) -> None:
    """The margin rule: outputs may part only where the two best logits are within 8 eps max|logit|.

    In float32 another order of summation can turn such a tie.
    """
    pairs = zip(got.output_token_ids, expected, strict=False)
    common = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
    assert common is not None, "one output is the beginning of the other: no tie ends a request"
    logits = np.sort(engine.next_token_logits(got.prompt_token_ids + expected[:common]))
    assert logits[-1] - logits[-2] <= 8 * np.finfo(np.float32).eps * np.abs(logits).max()


def oracle_for(world: World, scenario: Scenario) -> OracleSpeculator:
    return OracleSpeculator(scenario.config, world.continuations, world.vocab_size)


def random_prompt(rng: np.random.Generator, length: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(int(token) for token in rng.integers(2, vocab_size, length))


def seeded(seed: int) -> np.random.Generator:
    torch.manual_seed(seed)
    return np.random.default_rng(seed)

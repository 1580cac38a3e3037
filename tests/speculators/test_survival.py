"""DSpark's estimates of survival in the engine: which drafts are verified, in how many rows."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from block_folders import write_block
from block_worlds import BlockWorld, make_world
from records import request
from scenarios import make_engine
from tiny_targets import run_config

from hydraspec.config.options import DSparkOptions
from hydraspec.config.schema import RunConfig, Weights
from hydraspec.speculators.registry import build_speculator
from hydraspec.types import Completion, ConfigurationError, StepRecord

K, LEAST = 6, 0.2
Run = tuple[dict[int, list[int]], list[StepRecord]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> BlockWorld:
    with torch.inference_mode():
        return make_world(tmp_path_factory.mktemp("world"), "dspark on qwen3", num_prompts=3)


def config_of(world: BlockWorld, least: float | None, *, ahead: bool) -> RunConfig:
    config = run_config(world.folder, method="dspark", drafter=world.drafter, k=K)
    config.method.weights = Weights.checkpoint
    config.method.options = DSparkOptions(min_survival=least)
    config.engine.async_scheduling = ahead
    return config


def decode(world: BlockWorld, least: float | None, *, ahead: bool = False) -> Run:
    """Outputs by request, and the steps, of all prompts together."""
    config = config_of(world, least, ahead=ahead)
    speculator = build_speculator(config)
    speculator.load(world.target)
    engine = make_engine(config, world.target, speculator)
    requests = [
        request(i, prompt_token_ids=list(prompt), max_tokens=24, ignore_eos=True)
        for i, prompt in enumerate(world.continuations)
    ]
    events = list(engine.run(requests, concurrency=None))
    outputs = {e.index: e.output_token_ids for e in events if isinstance(e, Completion)}
    return outputs, [e for e in events if isinstance(e, StepRecord)]


def by_definition(world: BlockWorld, text: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """The K drafts after a text, and the product of their estimates up to each."""
    plain, aux = world.plain, world.aux(text, len(text))
    drafts, before, rows = plain.in_turn(torch.tensor(text), aux, K)
    each = [plain.confidence(t, h).item() for t, h in zip(before, rows, strict=True)]
    return drafts.tolist(), list(itertools.accumulate(each, lambda a, b: a * b))


@torch.inference_mode()
@pytest.mark.parametrize("ahead", [False, True])
def test_unlikely_drafts_are_not_verified(world: BlockWorld, ahead: bool) -> None:
    """Tokens are the target's; each step verifies exactly the drafts above the threshold, and
    where results are in before it is scheduled it has rows for the request with the most of them.
    Catches an estimate of another draft or request, and estimates that are a step old."""
    outputs, steps = decode(world, LEAST, ahead=ahead)
    prompts = list(world.continuations)
    assert all(outputs[i] == world.continuations[p][:24] for i, p in enumerate(prompts))
    seen, widths = set[int](), set[int]()
    for record in steps:
        decoding = [part for part in record.requests if not part.is_prefill]
        offered = [len(part.draft_token_ids) for part in decoding]
        for part, count in zip(decoding, offered, strict=True):
            prompt = prompts[part.index]
            text = (*prompt, *outputs[part.index])[: part.num_computed_tokens + 1]
            drafts, survivals = by_definition(world, text)
            kept = sum(each >= LEAST for each in survivals)
            assert part.draft_token_ids == drafts[:kept]
            assert part.draft_survivals == pytest.approx(survivals[:kept], rel=1e-5)
            seen.add(count)
        if decoding and not ahead:
            assert {part.num_rows for part in decoding} == {1 + max(offered)}
        widths |= {part.num_rows for part in decoding}
    assert len(seen) > 2, seen  # drafts are cut in different places
    assert (widths == {1 + K}) == ahead, widths


@torch.inference_mode()
def test_estimates_alone_change_no_draft(world: BlockWorld) -> None:
    """Without a threshold, or with one that every draft passes, all K drafts are verified."""
    runs = [decode(world, least) for least in (None, 0.0)]
    verified = [[part for record in steps for part in record.requests] for _, steps in runs]
    assert verified[0] == verified[1]
    counts = {len(part.draft_token_ids) for part in verified[0] if not part.is_prefill}
    assert counts == {K}
    assert all(len(p.draft_survivals or []) == len(p.draft_token_ids) for p in verified[0])


def test_a_head_without_estimates_is_refused(world: BlockWorld, tmp_path: Path) -> None:
    plain, flags = world.plain, world.plain.flags
    bare = BlockWorld(folder=world.folder, target=world.target, plain=plain)
    plain.flags = {**flags, "enable_confidence_head": False}
    kept = {name: plain.weights[name] for name in plain.weights if "confidence" not in name}
    weights, plain.weights = plain.weights, kept
    try:
        bare.drafter = str(write_block(tmp_path / "bare", plain, world.target, "speculators"))
    finally:
        plain.flags, plain.weights = flags, weights
    with pytest.raises(ConfigurationError, match=r"min_survival=0\.2 needs a confidence head"):
        build_speculator(config_of(bare, LEAST, ahead=False)).load(world.target)
    build_speculator(config_of(bare, None, ahead=False)).load(world.target)

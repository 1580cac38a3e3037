"""Prompts with images in the engine: tokens are transformers', and the same with every drafter,
however prompts are chunked, preempted and found in the cache; each image is encoded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from image_worlds import (
    FLAVOURS,
    draw_prompts,
    make_target,
    make_world,
    request_of,
    uncached,
    with_other_image,
    wrapper_config,
)
from scenarios import seeded
from side_by_side import run_alone
from step_ahead import Watch
from tiny_targets import assistant_config, run_config, write_folder
from vision_oracle import (
    IMAGE,
    ImagePrompt,
    image_prompt,
    make_wrapper,
    oracle_image_logits,
    random_image,
    random_image_prompt,
    random_wrapper,
)

from hydraspec.config.schema import Dtype, RunConfig, Weights
from hydraspec.engine.cache.prefix import PrefixKeys
from hydraspec.engine.native import NativeEngine
from hydraspec.engine.run import images as image_store
from hydraspec.engine.schedule import prompt_rows, scheduler
from hydraspec.types import Request, SamplingParams

LONGEST = 10  # output tokens


def requests_of(prompts: Sequence[ImagePrompt], max_tokens: int = LONGEST) -> list[Request]:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [request_of(prompt, i, sampling) for i, prompt in enumerate(prompts)]


def tokens_of(seen: Watch) -> list[list[int]]:
    return [seen.completions[i].output_token_ids for i in sorted(seen.completions)]


def twice(items: Sequence[Any]) -> list[Any]:
    """Each item twice in a row."""
    return [item for item in items for _ in range(2)]


def num_cached(seen: Watch) -> int:
    return sum(done.num_cached_tokens for done in seen.completions.values())


@pytest.mark.parametrize("seed", range(24))
def test_greedy_tokens_are_transformers(seed: int, tmp_path: Path) -> None:
    """None to three images a prompt, of several sizes, read in chunks beside each other. The image
    token is never sampled: transformers would take it for an image's."""
    config = random_wrapper(seed)
    oracle = make_wrapper(config, seed)
    oracle.generation_config.suppress_tokens = [IMAGE]
    oracle.save_pretrained(tmp_path)
    settings = run_config(
        tmp_path,
        dtype=Dtype.float32,
        weights=Weights.checkpoint,
        max_num_batched_tokens=(9, 16, 64)[seed % 3],
        max_num_seqs=3,
    )
    prompts = [random_image_prompt(config, 10 * seed + i, i) for i in range(4)]
    for n, prompt in enumerate(prompts):
        named = (replace(span, digest=f"{n}-{span.digest}") for span in prompt.spans)
        prompts[n] = ImagePrompt(prompt.token_ids, tuple(named), prompt.images)
    found = tokens_of(run_alone(NativeEngine(settings), requests_of(prompts, 5)))
    for prompt, tokens in zip(prompts, found, strict=True):
        ids = list(prompt.token_ids)
        for token in tokens:
            read = ImagePrompt(ids, prompt.spans, prompt.images)
            logits = oracle_image_logits(oracle, read)[-1]
            logits[IMAGE] = -torch.inf
            assert token == int(logits.argmax())
            ids.append(token)


# ------------------------------------------------------------------ one world a flavour


@pytest.fixture(scope="module")
def flavour(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, ...]]:
    """Folder, prompts and their uncached continuations, of each flavour."""

    @cache
    def made(name: str) -> tuple[Any, ...]:
        folder = tmp_path_factory.mktemp("target")
        target = make_target(folder, name)
        prompts = draw_prompts(seeded(3), wrapper_config(name), 6)
        return folder, prompts, uncached(target, prompts, LONGEST)

    return made


def settings_of(folder: Path, **changes: Any) -> RunConfig:
    given = {"max_num_seqs": 3, "max_num_batched_tokens": 14, "max_model_len": 90, "seed": 7}
    return run_config(folder, **(given | changes))


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("name", FLAVOURS)
def test_an_image_is_encoded_once(name: str, ahead: bool, flavour: Any) -> None:
    """Chunked, shared by prompts and asked again, with the same tokens each time."""
    folder, prompts, expected = flavour(name)
    settings = settings_of(folder)
    settings.engine.async_scheduling = ahead
    engine = NativeEngine(settings)
    digests = {span.digest for prompt in prompts for span in prompt.spans}
    for runs in (1, 2):  # a run begins without what the one before has encoded
        seen = run_alone(engine, requests_of(twice(prompts)), 2)
        assert tokens_of(seen) == twice(expected)
        assert num_cached(seen) > 0
        assert engine.parts.runner.images.num_encoded == runs * len(digests)


@pytest.mark.parametrize("name", FLAVOURS)
def test_preemption_changes_no_token(name: str, flavour: Any) -> None:
    folder, prompts, expected = flavour(name)
    settings = settings_of(folder, block_size=2, max_num_seqs=6)
    ample = NativeEngine(settings).parts.runner.kv.num_bytes
    settings.engine.kv_cache.memory_gib = 0.16 * ample / (1 << 30)
    engine = NativeEngine(settings)
    seen = run_alone(engine, requests_of(prompts))
    assert sum(record.num_preempted for record in seen.records) > 0
    assert tokens_of(seen) == expected
    digests = {span.digest for prompt in prompts for span in prompt.spans}
    assert engine.parts.runner.images.num_encoded == len(digests)


def test_what_is_not_kept_is_encoded_again(flavour: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is bounded; a step's own images are never dropped under it."""
    monkeypatch.setattr(image_store, "MOST_ROWS", 5)
    folder, prompts, expected = flavour("E4B")
    engine = NativeEngine(settings_of(folder))
    assert tokens_of(run_alone(engine, requests_of(prompts))) == expected
    store = engine.parts.runner.images
    digests = {span.digest for prompt in prompts for span in prompt.spans}
    assert store.num_encoded > len(digests)
    assert sum(len(rows) for rows in store._kept.values()) <= 5


# ------------------------------------------------------------------ prefix hits

HIT_TEXT = [*range(3, 12)]


def hits(name: str, folder: Path) -> tuple[int, int, list[list[int]], list[list[int]]]:
    """Cached tokens of a prompt asked again, and of the same text with another image; and tokens of
    the three runs, beside those of uncached ones."""
    config = wrapper_config(name)
    target = make_target(folder, name)
    image, other = (random_image((3, 3), config, seed) for seed in (1, 2))
    parts: list[Any] = [HIT_TEXT, image, [*range(20, 29)]]
    first = image_prompt(parts, config, ["aa"])
    second = with_other_image(first, other, "bb")
    engine = NativeEngine(settings_of(folder, max_num_batched_tokens=64, max_num_seqs=1))
    seen = run_alone(engine, requests_of([first, first, second]), 1)
    cached = [seen.completions[i].num_cached_tokens for i in range(3)]
    assert cached[0] == 0
    return cached[1], cached[2], tokens_of(seen), uncached(target, [first, first, second], LONGEST)


@pytest.mark.parametrize("name", FLAVOURS)
def test_the_same_image_hits_and_another_does_not(name: str, tmp_path: Path) -> None:
    same, other, tokens, expected = hits(name, tmp_path)
    start = len(HIT_TEXT) + 1  # of the image
    assert same > start + 9
    assert 0 < other <= start
    assert tokens == expected
    assert expected[0] != expected[2]


def test_a_key_without_the_digest_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = PrefixKeys.__init__

    def without_digests(self: PrefixKeys, ids: Any, unit: int, root: bytes, *rest: Any) -> None:
        true(self, ids, unit, root)

    monkeypatch.setattr(PrefixKeys, "__init__", without_digests)
    _, other, tokens, expected = hits("E4B", tmp_path)
    assert other > len(HIT_TEXT) + 9
    assert tokens != expected


def test_an_image_that_is_cut_shows(flavour: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, prompts, expected = flavour("31B")
    settings = settings_of(folder, max_num_batched_tokens=10)
    assert tokens_of(run_alone(NativeEngine(settings), requests_of(prompts))) == expected
    for module in (prompt_rows, scheduler):
        monkeypatch.setattr(module, "cut_span", lambda spans, border: None)
    assert tokens_of(run_alone(NativeEngine(settings), requests_of(prompts))) != expected


# ------------------------------------------------------------------ drafters

ON_HOST = ("ngram", "suffix")
OF_WORLDS = ("eagle3 reads images", "peagle reads images", "dflash")


@pytest.mark.parametrize("name", FLAVOURS)
def test_the_assistant_is_lossless(name: str, flavour: Any, tmp_path: Path) -> None:
    folder, prompts, expected = flavour(name)
    text = wrapper_config(name)["text_config"]
    own = {"model_type": "gemma4_unified_assistant"} if name == "12B" else {}
    drafter = write_folder(tmp_path / "assistant", assistant_config(text, **own))
    settings = settings_of(folder, method="gemma4_mtp", drafter=drafter, k=3)
    seen = run_alone(NativeEngine(settings), requests_of(twice(prompts)), 2)
    assert tokens_of(seen) == twice(expected)
    assert num_cached(seen) > 0


@pytest.mark.parametrize("method", ON_HOST)
def test_drafters_on_the_host_are_lossless(method: str, flavour: Any) -> None:
    folder, prompts, expected = flavour("31B")
    engine = NativeEngine(settings_of(folder, method=method, k=3))
    seen = run_alone(engine, requests_of(twice(prompts)), 2)
    assert tokens_of(seen) == twice(expected)


@pytest.mark.parametrize("name", OF_WORLDS)
def test_drafters_with_kv_of_their_own_are_lossless(name: str, tmp_path: Path) -> None:
    """Prompts found in the cache have draft KV that depends on the image: asked again, they get the
    same drafts."""
    world: Any = make_world(tmp_path, name, num_prompts=4)
    settings = settings_of(
        *(Path(world.folder),),
        **{"method": world.method, "drafter": world.drafter, "k": 3, "block_size": 4},
    )
    settings.method.weights = Weights.checkpoint
    prompts = list(world.prompts.values())
    expected = [world.continuations[tuple(p.token_ids)][:LONGEST] for p in prompts]
    seen = run_alone(NativeEngine(settings), requests_of(twice(prompts)), 2)
    assert tokens_of(seen) == twice(expected)
    assert num_cached(seen) > 0
    for index in range(0, len(seen.completions), 2):
        assert seen.decodes[index] == seen.decodes[index + 1]


# ------------------------------------------------------------------ what cannot be read

FAULTS: dict[str, tuple[Callable[[Request], Request], str]] = {
    "no image": (lambda r: replace(r, images=()), "Request.images has no image of it"),
    "another length": (
        lambda r: replace(r, images=(replace(r.images[0], num_tokens=3), *r.images[1:])),
        "tokens, and its image 3",
    ),
    "may be cut": (
        lambda r: replace(r, spans=tuple(replace(s, may_be_cut=True) for s in r.spans)),
        "may_be_cut is true, and rows of an image see each other",
    ),
    "another kind": (
        lambda r: replace(r, spans=tuple(replace(s, kind="sound") for s in r.spans)),
        "spans[0] of kind 'sound' cannot be read: the target has no encoder for it",
    ),
    "patches of another size": (
        lambda r: replace(r, images=(replace(r.images[0], patches=r.images[0].patches[:, :3]),)),
        "patches have the shape",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_faulty_image_is_its_requests_error(case: str, flavour: Any) -> None:
    folder, prompts, expected = flavour("31B")
    change, message = FAULTS[case]
    requests = requests_of(prompts[1:4])
    taken = {span.digest for request in requests[1:] for span in request.spans}
    spans = tuple(replace(s, digest=f"{s.digest}-own") for s in requests[0].spans)
    assert taken.isdisjoint(span.digest for span in spans)
    requests[0] = change(replace(requests[0], spans=spans))
    seen = run_alone(NativeEngine(settings_of(folder)), requests)
    assert seen.completions[0].finish_reason == "error"
    assert message in (seen.completions[0].error or "")
    assert [seen.completions[i].output_token_ids for i in (1, 2)] == expected[2:4]


def test_an_image_longer_than_a_step_is_its_requests_error(flavour: Any) -> None:
    folder, prompts, _ = flavour("31B")
    longest = max(span.length for prompt in prompts for span in prompt.spans)
    seen = run_alone(
        NativeEngine(settings_of(folder, max_num_batched_tokens=longest - 1)), requests_of(prompts)
    )
    errors = [done.error for done in seen.completions.values() if done.error]
    assert errors
    assert all(f"raise it to {longest} or more" in error for error in errors)


def test_logits_after_a_prompt_that_was_run(flavour: Any) -> None:
    """The lab asks for them by token ids and spans; images are known by their digests."""
    folder, prompts, expected = flavour("31B")
    engine = NativeEngine(settings_of(folder, max_num_batched_tokens=64))
    run_alone(engine, requests_of(prompts))
    for prompt, tokens in zip(prompts, expected, strict=True):
        logits = torch.from_numpy(engine.next_token_logits(prompt.token_ids, prompt.spans))
        assert int(logits.argmax()) == tokens[0]


@pytest.mark.parametrize("name", ["eagle3 reads images", "eagle3 reads placeholders", "dflash"])
def test_drafts_from_every_place_are_those_of_steps(name: str, tmp_path: Path) -> None:
    """Teacher forcing reads the images of prompts as steps do."""
    world: Any = make_world(tmp_path, name, num_prompts=3)
    settings = settings_of(Path(world.folder), method=world.method, drafter=world.drafter, k=3)
    settings.method.weights = Weights.checkpoint
    engine = NativeEngine(settings)
    requests = requests_of(list(world.prompts.values()))
    seen = run_alone(engine, requests)
    scores = engine.position_scores(requests, seen.completions)
    assert scores is not None
    found = {each.index: each for each in scores}
    num_compared = 0
    for index, steps in seen.decodes.items():
        for num_computed, drafts, num_accepted, _ in steps:
            place = num_computed - found[index].first
            if place < len(found[index].draft_token_ids) and drafts:
                forced = found[index].draft_token_ids[place].tolist()
                right = min(num_accepted + 1, len(drafts))  # drafts that read the target's tokens
                assert forced[:right] == drafts[:right]
                num_compared += 1
    assert num_compared > 5

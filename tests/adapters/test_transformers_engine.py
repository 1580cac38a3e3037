"""engine=transformers: the native engine's tokens and ends, honest counts, refusals."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from records import request as asked
from tiny_targets import assistant_config, gemma4_config, run_config, write_folder

from hydraspec.adapters.transformers.engine import TransformersEngine
from hydraspec.cli.compose import plan
from hydraspec.config.schema import Dtype, RunConfig, Weights
from hydraspec.engine.base import Engine
from hydraspec.engine.native import NativeEngine
from hydraspec.models.checkpoint.reader import resolve_folder
from hydraspec.types import (
    CheckpointError,
    Completion,
    ConfigurationError,
    Request,
    StepRecord,
)
from hydraspec.zoo.recipe.evaluate import read_workload

NUM_PROMPTS = 5


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def zoo_config(target: str, method: str = "none", k: int = 3, **changes: object) -> RunConfig:
    drafter = None if method == "none" else f"zoo:{target}-assistant"
    return run_config(
        f"zoo:{target}",
        method=method,
        drafter=drafter,
        k=k,
        dtype=Dtype.float32,
        weights=Weights.checkpoint,
        **changes,
    )


@pytest.fixture(scope="module")
def assisted() -> TransformersEngine:
    return TransformersEngine(zoo_config("tiny_gemma4", "gemma4_mtp"))


@pytest.fixture(scope="module")
def plain() -> TransformersEngine:
    return TransformersEngine(zoo_config("tiny_gemma4"))


@pytest.fixture(scope="module")
def native() -> NativeEngine:
    return NativeEngine(zoo_config("tiny_gemma4"))


def requests_of(count: int = NUM_PROMPTS, **sampling: object) -> list[Request]:
    settings = {"max_tokens": 12, "ignore_eos": True, **sampling}
    return [
        asked(i, id=f"r{i}", seed=11 + i, messages=line["messages"], **settings)
        for i, line in enumerate(read_workload()[:count])
    ]


def decode(
    engine: Engine, requests: list[Request], concurrency: int | None = None
) -> tuple[list[StepRecord], dict[int, Completion]]:
    engine.tokenize(requests)
    events = list(engine.run(requests, concurrency=concurrency))
    records = [event for event in events if isinstance(event, StepRecord)]
    completions = [event for event in events if isinstance(event, Completion)]
    assert [record.step - records[0].step for record in records] == list(range(len(records)))
    assert len(completions) == len(requests)
    assert_counts_agree(records, completions)
    return records, {completion.index: completion for completion in completions}


def assert_counts_agree(records: list[StepRecord], completions: list[Completion]) -> None:
    """What the steps of a request emitted is its output, and rows follow one another."""
    emitted: dict[int, list[int]] = {}
    computed = Counter({done.index: done.num_cached_tokens for done in completions})
    for record in records:
        assert record.total_ms > 0
        for step in record.requests:
            assert step.num_computed_tokens == computed[step.index]
            computed[step.index] += step.num_rows - len(step.draft_token_ids) + step.num_accepted
            assert 0 <= step.num_accepted <= len(step.draft_token_ids)
            assert len(step.output_token_ids) <= step.num_accepted + 1
            emitted.setdefault(step.index, []).extend(step.output_token_ids)
            accepted = step.draft_token_ids[: step.num_accepted]
            kept = step.output_token_ids
            assert kept[: step.num_accepted] == accepted[: len(kept)]
    for completion in completions:
        assert emitted.get(completion.index, []) == completion.output_token_ids


def outputs(completions: dict[int, Completion]) -> dict[int, tuple[list[int], str, str | None]]:
    return {
        index: (done.output_token_ids, done.finish_reason, done.text)
        for index, done in sorted(completions.items())
    }


# ------------------------------------------------------------------ the same tokens


@pytest.mark.parametrize(
    "target",
    [
        *("tiny_gemma4_e", "tiny_gemma4_moe", "tiny_gemma4_images", "tiny_mistral"),
        *(
            pytest.param(target, marks=pytest.mark.slow)
            for target in ("tiny_gemma4", "tiny_gemma4_unified", "tiny_qwen3")
        ),
    ],
)
def test_plain_tokens_equal_the_native_engines(target: str) -> None:
    """Catches padding that leaks into rows, dtypes converted late, and lost layers or scales."""
    config = zoo_config(target)
    _, expected = decode(NativeEngine(config), requests_of())
    _, found = decode(TransformersEngine(config), requests_of(), concurrency=3)
    assert outputs(found) == outputs(expected)


@pytest.mark.parametrize(
    "target",
    [
        *("tiny_gemma4", "tiny_gemma4_e", "tiny_gemma4_moe", "tiny_gemma4_unified"),
        "tiny_gemma4_images",
    ],
)
def test_assisted_tokens_equal_the_native_engines(target: str) -> None:
    _, expected = decode(NativeEngine(zoo_config(target)), requests_of(3))
    engine = TransformersEngine(zoo_config(target, "gemma4_mtp"))
    records, found = decode(engine, requests_of(3))
    assert outputs(found) == outputs(expected)
    assert all(len(record.requests) == 1 for record in records), "assisted batches are of 1"
    steps = [record.requests[0] for record in records]
    assert {len(step.draft_token_ids) for step in steps} == {0, 3}
    assert all(step.is_prefill == (not step.draft_token_ids) for step in steps)
    assert sum(step.num_accepted for step in steps) > len(steps), "the trained assistant is good"


def later_acceptance_length(engine: Engine) -> float:
    """1 + accepted / drafts over the rounds after each request's first."""
    records, _ = decode(engine, requests_of(8, max_tokens=24), concurrency=1)
    rounds: dict[int, list[int]] = {}
    for record in records:
        for step in record.requests:
            if step.draft_token_ids:
                rounds.setdefault(step.index, []).append(step.num_accepted)
    later = [count for counts in rounds.values() for count in counts[1:]]
    return 1 + sum(later) / len(later)


def test_acceptance_is_the_native_engines_after_the_first_round(
    assisted: TransformersEngine,
) -> None:
    """transformers' first round reads the hidden row of the prompt's first token and is mostly
    rejected; then only its position (one further) differs. Catches miscounted drafts."""
    native = NativeEngine(zoo_config("tiny_gemma4", "gemma4_mtp"))
    assert abs(later_acceptance_length(assisted) - later_acceptance_length(native)) < 0.2


def test_baseline_shares_the_model_and_its_tokens(assisted: TransformersEngine) -> None:
    baseline = assisted.baseline()
    assert baseline.parts.model is assisted.parts.model
    assert (baseline.info.method, baseline.info.num_speculative_tokens) == ("none", 0)
    records, found = decode(baseline, requests_of(3), concurrency=3)
    assert outputs(found) == outputs(decode(assisted, requests_of(3))[1])
    assert all(len(record.requests) == 1 for record in records), "the same batch as with drafts"


# Hot: the trained target is so sure of itself that a temperature of 2 changes nothing.
SAMPLED = {"temperature": 6.0, "top_k": 40, "top_p": 0.98, "min_p": 0.01}


def test_sampled_tokens_follow_the_requests_streams(
    assisted: TransformersEngine, plain: TransformersEngine, native: NativeEngine
) -> None:
    """A draw depends on seed and position: batches, drafts and the engine leave it the same."""
    expected = outputs(decode(native, requests_of(**SAMPLED))[1])
    assert outputs(decode(plain, requests_of(**SAMPLED), concurrency=4)[1]) == expected
    assert outputs(decode(assisted, requests_of(**SAMPLED))[1]) == expected
    others = [replace(r, sampling=replace(r.sampling, seed=99)) for r in requests_of(**SAMPLED)]
    assert outputs(decode(plain, others)[1]) != expected


def test_greedy_and_sampled_requests_share_a_batch(
    plain: TransformersEngine, native: NativeEngine
) -> None:
    mixed = requests_of()
    for request in mixed[::2]:
        request.sampling = replace(request.sampling, **SAMPLED)
    assert outputs(decode(plain, mixed)[1]) == outputs(decode(native, mixed)[1])


def test_logits_are_the_native_engines(assisted: TransformersEngine, native: NativeEngine) -> None:
    ids = [2, 17, 40, 9, 33, 5, 80]
    ours, theirs = native.next_token_logits(ids), assisted.next_token_logits(ids)
    assert theirs.dtype == np.float64
    np.testing.assert_allclose(theirs, ours, atol=2e-4)


# ------------------------------------------------------------------ where requests end


def stop_inside_drafts(engine: TransformersEngine) -> tuple[int, list[int], int]:
    """A request, its output, and a place in it that is an accepted draft but not the first token
    of its kind's earlier occurrences."""
    records, done = decode(engine, requests_of())
    for record in records:
        (step,) = record.requests
        output = done[step.index].output_token_ids
        start = step.num_computed_tokens + 1 - len(done[step.index].prompt_token_ids)
        if step.num_accepted == 3 and output.index(output[start]) == start:
            return step.index, output, start
    raise AssertionError("no verify step accepted all drafts at a new token")


def test_stop_token_inside_accepted_drafts(
    assisted: TransformersEngine, native: NativeEngine
) -> None:
    """The drafts after the stop are cut from the output and counted as accepted."""
    index, output, place = stop_inside_drafts(assisted)
    ending = requests_of(stop_token_ids=(output[place],))[index : index + 1]
    records, done = decode(assisted, ending)
    assert done[index].output_token_ids == output[: place + 1]
    assert done[index].finish_reason == "stop"
    last = records[-1].requests[0]
    assert (last.num_accepted, last.output_token_ids) == (3, [output[place]])
    assert outputs(decode(native, ending)[1]) == outputs(done)


def test_max_tokens(assisted: TransformersEngine, native: NativeEngine) -> None:
    """At the prompt's own step, within the drafts of the next one, and later."""
    requests, limits = requests_of(), (1, 2, 3, 4, 7)
    for request, limit in zip(requests, limits, strict=True):
        request.sampling.max_tokens = limit
    expected = outputs(decode(native, requests)[1])
    ends = [(len(tokens), why) for tokens, why, _ in expected.values()]
    assert ends == [(limit, "length") for limit in limits]
    assert outputs(decode(assisted, requests)[1]) == expected
    assert outputs(decode(assisted.baseline(), requests)[1]) == expected


def test_requests_of_a_batch_end_each_by_its_own_rule(
    plain: TransformersEngine, native: NativeEngine
) -> None:
    requests = requests_of(ignore_eos=False, max_tokens=40)
    for request, count in zip(requests, (40, 1, 9, 40, 4), strict=True):
        request.sampling = replace(request.sampling, max_tokens=count)
    expected = outputs(decode(native, requests)[1])
    assert "stop" in {why for _, why, _ in expected.values()}, "no end of sequence among them"
    records, found = decode(plain, requests)
    assert outputs(found) == expected
    running = [record.num_running for record in records]
    assert running == sorted(running, reverse=True)


def test_stop_string(assisted: TransformersEngine, native: NativeEngine) -> None:
    text = decode(native, requests_of(1))[1][0].text
    assert text is not None
    stop = text[len(text) // 2 :][:3]
    requests = requests_of(1, stop=(stop,))
    _, done = decode(assisted, requests)
    assert done[0].text == text[: text.find(stop)]
    assert done[0].finish_reason == "stop"
    assert outputs(decode(native, requests)[1]) == outputs(done)


def test_max_model_len_ends_requests_and_refuses_long_prompts() -> None:
    """Drafts stop short of it, as in the native engine; the long prompt is that request's error."""
    native_drafts, own_drafts = [], []
    results = []
    for kind, drafts in ((NativeEngine, native_drafts), (TransformersEngine, own_drafts)):
        config = zoo_config("tiny_gemma4", "gemma4_mtp", max_model_len=24)
        requests = [
            asked(i, prompt_token_ids=[2, *range(10, 9 + length)], max_tokens=50, ignore_eos=True)
            for i, length in enumerate((20, 24, 23, 12))
        ]
        records, done = decode(kind(config), requests, concurrency=1)
        for record in records:
            drafts.extend(len(step.draft_token_ids) for step in record.requests if step.index == 0)
        results.append((outputs(done), done[1].error))
    assert results[0] == results[1]
    assert "24 tokens" in str(results[1][1])
    assert max(own_drafts[1:]) <= 2
    assert own_drafts[0] == native_drafts[0] == 0


# ------------------------------------------------------------------ facts and refusals


def test_info_says_what_it_is(assisted: TransformersEngine) -> None:
    info = assisted.info
    assert (info.engine, info.greedy_is_exact) == ("transformers", False)
    assert info.cudagraph["target"] == "none"
    assert "one request at a time" in info.warnings[0]
    assert assisted.baseline().info.warnings == []
    alone = replace(assisted.parts, config=zoo_config("tiny_gemma4", "gemma4_mtp"))
    alone.config.workload.concurrency = 1
    assert TransformersEngine(alone.config, alone).info.warnings == []
    config = zoo_config("tiny_gemma4")
    config.cudagraph.name = "full"
    assert "eagerly" in str(TransformersEngine(config).info.cudagraph["reason"])


def test_random_weights_come_from_the_seed(tmp_path: Path) -> None:
    target = gemma4_config()
    folder = write_folder(tmp_path / "target", target)
    drafter = write_folder(tmp_path / "assistant", assistant_config(target))
    logits = [
        TransformersEngine(
            run_config(folder, method="gemma4_mtp", drafter=drafter, dtype=Dtype.float32, seed=seed)
        ).next_token_logits([3, 4, 5])
        for seed in (1, 1, 2)
    ]
    np.testing.assert_array_equal(logits[0], logits[1])
    assert np.abs(logits[0] - logits[2]).max() > 1e-3


@pytest.mark.parametrize(
    ("overrides", "key", "allowed"),
    [
        (["method=eagle3"], "method=eagle3", "gemma4_mtp, none"),
        (["method=peagle"], "method=peagle", "gemma4_mtp, none"),
        (["method.verification=block"], "method.verification=block", "standard"),
        (
            ["method.verification=synthetic", "method.synthetic_acceptance_length=2"],
            "method.verification=synthetic",
            "standard",
        ),
        (["method.draft_sampling=probabilistic"], "method.draft_sampling=probabilistic", "greedy"),
        (["+engine.max_num_batched_tokens=64"], "engine.max_num_batched_tokens=64", "num_threads"),
        (["+engine.kv_cache.block_size=32"], "engine.kv_cache.block_size=32", "num_threads"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_it_does_not_offer_is_refused(overrides: list[str], key: str, allowed: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        plan(["engine=transformers", *overrides])
    message = str(caught.value)
    assert message.startswith(key)
    assert allowed in message
    assert "engine=native" in message


def test_wide_batches_need_no_step_budget() -> None:
    config = plan(["engine=transformers", "engine.max_num_seqs=4000"]).jobs[0].config
    assert config.engine.max_num_seqs == 4000


def test_folders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def refused(config: RunConfig) -> str:
        with pytest.raises(CheckpointError) as caught:
            TransformersEngine(config)
        return str(caught.value)

    config = zoo_config("tiny_qwen3", "gemma4_mtp")
    config.method.checkpoint = "zoo:tiny_gemma4-assistant"
    assert "'qwen3'" in refused(config)
    config = zoo_config("tiny_gemma4", "gemma4_mtp")
    config.method.checkpoint = "zoo:tiny_gemma4"
    assert "It is a target" in refused(config)
    other = write_folder(tmp_path / "other", assistant_config(gemma4_config()))
    config.method.checkpoint = str(other)
    assert "was not made for this target" in refused(config)
    assert "has no config.json" in refused(run_config(tmp_path, weights=Weights.checkpoint))
    unknown = write_folder(tmp_path / "unknown", {"model_type": "no_such_model"})
    assert "transformers cannot load" in refused(run_config(unknown))
    deeper = tmp_path / "deeper"
    shutil.copytree(resolve_folder("zoo:tiny_qwen3"), deeper)
    raw = json.loads((deeper / "config.json").read_text())
    raw["num_hidden_layers"] += 1
    raw.pop("layer_types", None)
    raw.pop("max_window_layers", None)
    (deeper / "config.json").write_text(json.dumps(raw))
    message = refused(run_config(deeper, weights=Weights.checkpoint))
    assert message.startswith("checkpoint ")
    assert "missing: model.layers" in message

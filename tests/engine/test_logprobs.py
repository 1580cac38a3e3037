"""Log probabilities of outputs and prompts are transformers' teacher-forced ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hydraspec.adapters.transformers.rules import processors
from hydraspec.cli.compose import plan
from hydraspec.engine.native import NativeEngine
from hydraspec.models.checkpoint.reader import resolve_folder
from hydraspec.types import Completion, Request, SamplingParams, TokenLogprob

ACCURACY = 1e-4  # float32
COUNT = 5
PAIRS = {
    "eagle3": "tiny_qwen3",
    "eagle": "tiny_mistral",
    "none": "tiny_qwen3",
    "suffix": "tiny_qwen3",
}
PROMPTS = ([5, 6, 7, 5, 6, 7, 5, 6], [9, 9, 10, 11, 9, 9] * 9, [40, 41, 42, 43, 44])
SETTINGS = (
    SamplingParams(max_tokens=12, logprobs=COUNT, prompt_logprobs=COUNT),
    SamplingParams(max_tokens=12, logprobs=0, temperature=1.5, seed=3, ignore_eos=True),
    SamplingParams(
        max_tokens=12,
        logprobs=COUNT,
        temperature=0.7,
        top_p=0.9,
        seed=4,
        ignore_eos=True,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
    ),
    SamplingParams(max_tokens=12, presence_penalty=1.0, prompt_logprobs=0, logprobs=20),
    SamplingParams(max_tokens=12),
)


@cache
def model_of(target: str) -> Callable[[Tensor], Tensor]:
    torch.set_num_threads(1)
    folder = resolve_folder(f"zoo:{target}")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return lambda ids: model(ids, use_cache=False).logits


@torch.inference_mode()
def teacher_forced(target: str, token_ids: list[int]) -> Tensor:
    """Logits [T, V] after each token."""
    return model_of(target)(torch.tensor([token_ids]))[0]


def completions(method: str, *typed: str) -> list[tuple[Request, Completion]]:
    target = PAIRS[method]
    given = [f"target={target}", f"method={method}", "target.dtype=float32", "cudagraph=none"]
    given += ["engine.max_num_seqs=4", "engine.max_num_batched_tokens=64", *typed]
    engine = NativeEngine(plan(given).jobs[0].config)
    pairs = [(prompt, sampling) for sampling in SETTINGS for prompt in PROMPTS]
    requests = [
        Request(index=i, id=str(i), sampling=sampling, prompt_token_ids=list(prompt))
        for i, (prompt, sampling) in enumerate(pairs)
    ]
    found = {
        e.index: e for e in engine.run(requests, concurrency=None) if isinstance(e, Completion)
    }
    return [(request, found[request.index]) for request in requests]


def check(found: list[TokenLogprob] | None, rows: Tensor, tokens: list[int], count: int) -> None:
    """rows [N, V] are the log probabilities that the N records must have."""
    assert found is not None
    assert [each.token_id for each in found] == tokens
    for each, row in zip(found, rows, strict=True):
        assert each.logprob == pytest.approx(float(row[each.token_id]), abs=ACCURACY)
        possible = int(row.isfinite().sum())
        best = row.topk(min(count, possible)).values.tolist()
        assert [value for _, value in each.top] == pytest.approx(best, abs=ACCURACY)
        assert [float(row[t]) for t, _ in each.top] == pytest.approx(best, abs=ACCURACY)


@pytest.mark.parametrize(
    ("method", "typed"),
    [
        ("eagle3", ()),
        ("eagle3", ("engine.async_scheduling=true",)),
        ("none", ()),
        pytest.param("eagle", (), marks=pytest.mark.slow),
        pytest.param("suffix", (), marks=pytest.mark.slow),
    ],
)
def test_raw_ones_are_of_the_target_itself(method: str, typed: tuple[str, ...]) -> None:
    """Chunks of prompts, prefixes that are cached for others, slots that change owners. Fails if a
    row is taken for another, or if rules or temperature change what is raw."""
    for request, ended in completions(method, *typed):
        sampling, prompt = request.sampling, ended.prompt_token_ids
        text = [*prompt, *ended.output_token_ids]
        rows = teacher_forced(PAIRS[method], text).log_softmax(-1)
        if sampling.logprobs is None:
            assert ended.logprobs is None
        else:
            first = len(prompt) - 1
            check(ended.logprobs, rows[first:-1], ended.output_token_ids, sampling.logprobs)
        if sampling.prompt_logprobs is None:
            assert ended.prompt_logprobs is None
        else:
            before = rows[: len(prompt) - 1]
            check(ended.prompt_logprobs, before, prompt[1:], sampling.prompt_logprobs)


@pytest.mark.parametrize("method", ["eagle3", pytest.param("none", marks=pytest.mark.slow)])
def test_processed_ones_are_of_the_distribution_sampled_from(method: str) -> None:
    """After rules, then temperature and truncation of requests that sample."""
    for request, ended in completions(method, "sampling.logprobs_mode=processed"):
        sampling, prompt = request.sampling, ended.prompt_token_ids
        if sampling.logprobs is None:
            continue
        text = [*prompt, *ended.output_token_ids]
        rows = teacher_forced(PAIRS[method], text)[len(prompt) - 1 : -1]
        change = processors(replace(sampling, min_tokens=0), len(prompt), [])
        expected = []
        for i, row in enumerate(rows):
            scores = change(torch.tensor([text[: len(prompt) + i]]), row[None].clone())[0]
            expected.append(truncated(scores / (sampling.temperature or 1.0), sampling))
        check(ended.logprobs, torch.stack(expected), ended.output_token_ids, sampling.logprobs)


def truncated(scores: Tensor, sampling: SamplingParams) -> Tensor:
    """Log probabilities of the smallest set of likely tokens with mass top_p, if it samples."""
    ordered, order = scores.softmax(-1).sort(descending=True)
    is_cut = ordered.cumsum(-1) - ordered >= sampling.top_p
    if sampling.temperature == 0 or sampling.top_p == 1:
        return scores.log_softmax(-1)
    return scores.index_fill(0, order[is_cut], -torch.inf).log_softmax(-1)

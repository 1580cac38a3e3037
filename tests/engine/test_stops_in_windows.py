"""Ends inside a draft window: end of sequence among drafts, stop strings over token borders.

The definition is `FinishCheck`'s, and the same on every path: an output ends at its first token
that is an ending one, or after which the text holds a stop string. Accepted tokens after it are
dropped.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from hydraspec import factory
from hydraspec.cli.compose import plan
from hydraspec.engine.base import Engine
from hydraspec.types import Completion, Request, SamplingParams, StepRecord

PATHS = {  # overrides of each path
    "none": ["target=tiny_qwen3", "method=none"],
    "one step ahead": ["target=tiny_qwen3", "method=eagle3", "engine.async_scheduling=true"],
    "few blocks": ["target=tiny_qwen3", "method=eagle3", "engine.kv_cache.memory_gib=0.0012"],
    "block verification": ["target=tiny_qwen3", "method=eagle3", "method.verification=block"],
    "eagle": ["target=tiny_mistral", "method=eagle"],
    "gemma4_mtp": ["target=tiny_gemma4", "method=gemma4_mtp"],
    "mtp": ["target=tiny_deepseek", "method=mtp"],
    "peagle": ["target=tiny_qwen3", "method=peagle"],
    "dflash": ["target=tiny_qwen3", "method=dflash"],
    "dflash2": ["target=tiny_qwen3", "method=dflash2"],
    "dspark": ["target=tiny_qwen3", "method=dspark"],
    "ngram": ["target=tiny_qwen3", "method=ngram"],
    "suffix": ["target=tiny_qwen3", "method=suffix"],
    "transformers": ["engine=transformers", "target=tiny_qwen3", "method=none"],
    "assisted": ["engine=transformers", "target=tiny_gemma4", "method=gemma4_mtp"],
}
TEXT = (
    "Write a function sum_tiles that goes over tiles, adds 5 for each tile above 13 and sums them."
)
LENGTH = 20


def engine_of(*typed: str) -> Engine:
    torch.set_num_threads(1)
    given = ["target.dtype=float32", "cudagraph=none", "engine.max_num_seqs=6", *typed]
    return factory.build_engine(plan(given).jobs[0].config)


def asked(settings: list[SamplingParams]) -> list[Request]:
    messages = [{"role": "user", "content": TEXT}]
    return [
        Request(index=i, id=str(i), sampling=sampling, messages=messages)
        for i, sampling in enumerate(settings)
    ]


def decoded(engine: Engine, settings: list[SamplingParams]) -> tuple[list[Completion], int]:
    """Completions, and the tokens that were accepted and then cut off."""
    requests, found, num_cut = asked(settings), dict[int, Completion](), 0
    engine.tokenize(requests)
    for event in engine.run(requests, concurrency=None):
        if isinstance(event, Completion):
            found[event.index] = event
        elif isinstance(event, StepRecord):
            for part in event.requests:
                num_cut += max(0, part.num_accepted + 1 - len(part.output_token_ids))
    return [found[i] for i in range(len(settings))], num_cut


@cache
def whole(target: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The target's tokens without any end, and the text after each number of them."""
    engine = engine_of(f"target={target}", "method=none")
    ((ended,), _) = decoded(engine, [SamplingParams(max_tokens=LENGTH, ignore_eos=True)])
    texts = [
        decoded(engine, [SamplingParams(max_tokens=n, ignore_eos=True)])[0][0].text
        for n in range(1, LENGTH + 1)
    ]
    return tuple(ended.output_token_ids), ("", *(text or "" for text in texts))


def settings_of(target: str) -> list[SamplingParams]:
    """Ends at every place of a window of four: single tokens, and strings that begin in one token
    and end in the next."""
    tokens, texts = whole(target)
    found = []
    for place in range(2, 12):
        border = len(texts[place])
        over = texts[place + 1][border - 1 : border + 1]
        token = {"stop_token_ids": (tokens[place],)}
        found += [
            SamplingParams(max_tokens=LENGTH, ignore_eos=True, **token),
            SamplingParams(max_tokens=LENGTH, ignore_eos=True, stop=(over,)),
            SamplingParams(max_tokens=LENGTH, ignore_eos=True, stop=(over,), min_tokens=place - 1),
            SamplingParams(max_tokens=place, ignore_eos=True),
        ]
    return found


def expected(target: str, sampling: SamplingParams) -> tuple[list[int], str, str]:
    """Tokens, text and reason by the definition, from the whole text."""
    tokens, texts = whole(target)
    for n in range(sampling.min_tokens + 1, LENGTH + 1):
        first = len(texts[sampling.min_tokens])
        places = [
            place
            for stop in sampling.stop
            if (place := texts[n].find(stop, max(0, first - len(stop) + 1))) >= 0
        ]
        if places or tokens[n - 1] in sampling.stop_token_ids:
            text = texts[n][: min(places)] if places else texts[n]
            return list(tokens[:n]), text, "stop"
        if n == sampling.max_tokens:
            break
    return list(tokens[: sampling.max_tokens]), texts[sampling.max_tokens], "length"


@pytest.mark.parametrize("path", PATHS)
def test_outputs_end_where_the_whole_text_says(path: str) -> None:
    typed = PATHS[path]
    target = next(each for each in typed if each.startswith("target=")).partition("=")[2]
    settings = settings_of(target)
    ended, num_cut = decoded(engine_of(*typed), settings)
    for completion, sampling in zip(ended, settings, strict=True):
        tokens, text, reason = expected(target, sampling)
        assert completion.output_token_ids == tokens
        assert (completion.text, completion.finish_reason) == (text, reason)
    assert num_cut > 0 or path in ("none", "transformers")
    assert len({len(completion.output_token_ids) for completion in ended}) > 6

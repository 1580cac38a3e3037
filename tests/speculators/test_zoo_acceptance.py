"""Acceptance of a whole run equals that of a plain uncached loop written from the definition.

The loop is `hydraspec.zoo.recipe.evaluate`: transformers' classes, whole forwards over the
growing text, every draft made from the hidden state and KV of its row. It shares no code with the
engine. Catches a wrong position, a stale key, a hidden state of the wrong row, the wrong norm: each
shows only as lower acceptance.
"""

from __future__ import annotations

import pytest
from records import request
from tiny_targets import run_config
from transformers import AutoTokenizer

from hydraspec.config.schema import Dtype, Weights
from hydraspec.engine.native import NativeEngine
from hydraspec.models.checkpoint.reader import resolve_folder
from hydraspec.types import StepRecord
from hydraspec.zoo.recipe.evaluate import (
    count_drafts,
    draft_all_rows,
    generate_greedy,
    read_workload,
)
from hydraspec.zoo.recipe.modeling import load_assistant, load_target

NUM_PROMPTS = 6


@pytest.mark.parametrize(
    ("name", "k"),
    [
        ("tiny_gemma4", 5),
        ("tiny_gemma4_e", 3),
        ("tiny_gemma4_moe", 5),
        pytest.param("tiny_gemma4_unified", 3, marks=pytest.mark.slow),
        pytest.param("tiny_gemma4", 3, marks=pytest.mark.slow),
        pytest.param("tiny_gemma4_e", 5, marks=pytest.mark.slow),
        pytest.param("tiny_gemma4_moe", 3, marks=pytest.mark.slow),
        pytest.param("tiny_gemma4_unified", 5, marks=pytest.mark.slow),
    ],
)
def test_drafts_and_acceptance_equal_the_plain_loop(name: str, k: int) -> None:
    """Mixed categories, batched, chunked prefill, float32; drafts and counts match step by step."""
    lines = read_workload()[:NUM_PROMPTS]
    folder, drafter = resolve_folder(f"zoo:{name}"), resolve_folder(f"zoo:{name}-assistant")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [
        tokenizer.apply_chat_template(
            line["messages"], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for line in lines
    ]
    limits = [16] * len(lines)
    plain = plain_loop(folder, drafter, prompts, limits, k)

    config = run_config(
        folder,
        method="gemma4_mtp",
        drafter=drafter,
        k=k,
        dtype=Dtype.float32,
        weights=Weights.checkpoint,
        max_num_seqs=5,
        max_num_batched_tokens=48,
        block_size=16,
    )
    got = run_native(config, prompts, limits)
    for index, (drafts, counts) in enumerate(plain):
        assert [accepted for _, accepted in got[index]] == counts, index
        assert [tokens for tokens, _ in got[index]] == drafts, index
    assert sum(sum(counts) for _, counts in plain) > 0, "the drafter accepts nothing: no test"


def plain_loop(folder, drafter, prompts, limits, k):  # type: ignore[no-untyped-def]
    """Per prompt: the drafts of every verify step, and how many of them were accepted."""
    target, assistant = load_target(folder), load_assistant(drafter)
    stops = target.generation_config.eos_token_id
    stops = set(stops if isinstance(stops, list) else [stops])
    found = []
    for text in generate_greedy(target, prompts, limits, stops, k + 1):
        rows = draft_all_rows(target, assistant, text, k)
        counts, drafts, row = count_drafts(text, rows), [], 0
        for accepted in counts:
            drafts.append(rows[row].tolist())
            row += accepted + 1
        found.append((drafts, counts))
    return found


def run_native(config, prompts, limits):  # type: ignore[no-untyped-def]
    """Per prompt: (draft tokens, accepted) of every verify step of our engine."""
    requests = [
        request(index, prompt_token_ids=list(prompt), max_tokens=limit)
        for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    steps: dict[int, list[tuple[list[int], int]]] = {index: [] for index in range(len(prompts))}
    for event in NativeEngine(config).run(requests, concurrency=None):
        if isinstance(event, StepRecord):
            for part in event.requests:
                if part.draft_token_ids:
                    steps[part.index].append((part.draft_token_ids, part.num_accepted))
    return steps

"""Block drafters of the zoo: what ships, in which format, and that the engine drafts what their
plain definition does.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from records import request
from safetensors.torch import load_file
from tiny_targets import run_config
from torch import Tensor
from transformers import AutoTokenizer

from hydraspec.config.schema import Dtype, Weights
from hydraspec.engine.native import NativeEngine
from hydraspec.models.detect import DEEPSPEC, SPECULATORS, Z_LAB, detect, open_draft
from hydraspec.types import StepRecord
from hydraspec.zoo.recipe import block_files, evaluate, modeling
from hydraspec.zoo.recipe.batches import Sequences
from hydraspec.zoo.recipe.recipes import BLOCK_DRAFTERS, CHECKPOINTS
from hydraspec.zoo.recipe.train_block import train_block

LIMIT = 1_200_000  # bytes of a drafter
FORMATS = {"z-lab": Z_LAB, "speculators": SPECULATORS, "deepseek-ai": DEEPSPEC}
NUM_PROMPTS, K = 3, 7


@cache
def _target(name: str) -> Any:
    return modeling.load_target(CHECKPOINTS / name)


@pytest.mark.parametrize("name", BLOCK_DRAFTERS)
def test_what_ships(name: str) -> None:
    recipe, folder = BLOCK_DRAFTERS[name], CHECKPOINTS / name
    assert (folder / "model.safetensors").stat().st_size <= LIMIT
    found = detect(open_draft(str(folder)))
    assert found is not None
    assert (found.method, found.format) == (recipe.kind, FORMATS[recipe.format])
    assert found.num_speculative_tokens == K


@pytest.mark.parametrize("name", BLOCK_DRAFTERS)
def test_saving_what_was_loaded_gives_the_same_bytes(name: str, tmp_path: Any) -> None:
    recipe, target = BLOCK_DRAFTERS[name], _target(BLOCK_DRAFTERS[name].target)
    head = block_files.load_block(CHECKPOINTS / name, recipe, target)
    block_files.save_block(head, recipe, target, tmp_path)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / file).read_bytes() == (CHECKPOINTS / name / file).read_bytes()


@pytest.mark.parametrize("name", BLOCK_DRAFTERS)
def test_the_engine_drafts_what_the_definition_does(name: str) -> None:
    """Batched, with chunked prefills, in float32: every draft and every accepted count."""
    recipe = BLOCK_DRAFTERS[name]
    lines = evaluate.read_workload()[:NUM_PROMPTS]
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / recipe.target)
    given = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    prompts = [tokenizer.apply_chat_template(line["messages"], **given) for line in lines]
    expected = _plain(name, prompts)
    steps: dict[int, list[tuple[list[int], int]]] = {i: [] for i in range(NUM_PROMPTS)}
    config = run_config(
        str(CHECKPOINTS / recipe.target),
        method=recipe.kind,
        drafter=str(CHECKPOINTS / name),
        k=K,
        dtype=Dtype.float32,
        weights=Weights.checkpoint,
        max_num_seqs=3,
        max_num_batched_tokens=48,
        block_size=16,
    )
    requests = [
        request(i, prompt_token_ids=list(prompt), max_tokens=30) for i, prompt in enumerate(prompts)
    ]
    for event in NativeEngine(config).run(requests, concurrency=None):
        if isinstance(event, StepRecord):
            for part in event.requests:
                if part.draft_token_ids:
                    steps[part.index].append((part.draft_token_ids, part.num_accepted))
    num_accepted = 0
    for found, wanted in zip(steps.values(), expected, strict=True):
        for (drafts, accepted), (tokens, count) in zip(found, wanted, strict=True):
            assert drafts == tokens[: len(drafts)]  # fewer at the end of an answer
            assert accepted == min(count, len(drafts))
            num_accepted += accepted
    assert num_accepted > 5


def _plain(name: str, prompts: list[list[int]]) -> list[list[tuple[list[int], int]]]:
    """Drafts and accepted count of each verify step, by an uncached loop."""
    recipe, target = BLOCK_DRAFTERS[name], _target(BLOCK_DRAFTERS[name].target)
    head = block_files.load_block(CHECKPOINTS / name, recipe, target)
    rows_of = evaluate.by_block(target, head, recipe.aux_layer_ids)
    stops = set(target.generation_config.eos_token_id)
    found = []
    for text in evaluate.generate_greedy(target, prompts, [30] * len(prompts), stops, K + 1):
        rows, row, steps = rows_of(text, K), 0, []
        for accepted in evaluate.count_drafts(text, rows):
            steps.append((rows[row].tolist(), accepted))
            row += accepted + 1
        found.append(steps)
    return found


def test_training_is_deterministic_and_reaches_every_weight() -> None:
    name = "tiny_qwen3-dspark"
    recipe = dataclasses.replace(BLOCK_DRAFTERS[name], steps=2, batch_size=2, num_anchors=3)
    target = _target(recipe.target)
    tokens = torch.randint(3, 400, (4, 40), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([12, 14, 9, 20]), torch.tensor([30, 35, 40, 33])
    data = Sequences(tokens, *lengths, torch.arange(4))
    states: list[dict[str, Tensor]] = []
    for _ in range(2):
        torch.manual_seed(0)
        states.append(train_block(recipe, target, data, title="test").state_dict())
    shipped = load_file(CHECKPOINTS / name / "model.safetensors")
    assert states[0].keys() == shipped.keys()
    for weight, tensor in states[0].items():
        assert torch.equal(tensor, states[1][weight]), weight

"""What ships: sizes, file formats, and that transformers takes the files unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoTokenizer,
    Gemma4AssistantForCausalLM,
    Gemma4UnifiedAssistantForCausalLM,
    PreTrainedModel,
)

from hydraspec.zoo.recipe import (
    corpus,
    evaluate,
    modeling,
    tasks,
    tokenizer,
    train_assistant,
    train_target,
)
from hydraspec.zoo.recipe.assistant_recipes import ASSISTANTS
from hydraspec.zoo.recipe.recipes import CHECKPOINTS, TARGETS

GEMMA4 = [name for name, recipe in TARGETS.items() if recipe.family.startswith("gemma4")]
MEGABYTE = 1_000_000
TARGET_LIMITS = {
    "tiny_gemma4": 11 * MEGABYTE,
    "tiny_gemma4_unified": 2.7 * MEGABYTE,
    "tiny_qwen3": 3.1 * MEGABYTE,
    "tiny_mistral": 2.6 * MEGABYTE,
    "tiny_ministral3": 2.6 * MEGABYTE,
    "tiny_deepseek": 3 * MEGABYTE,
}
OTHER_TARGET_LIMIT, ASSISTANT_LIMIT, ZOO_LIMIT = 4 * MEGABYTE, 700_000, 43 * MEGABYTE
WORKLOAD_KEYS = {"id", "messages", "category", "answer"}


def _config(folder: Path) -> dict[str, Any]:
    raw = dict(json.loads((folder / "config.json").read_text()))
    return raw.get("text_config", {}) | raw  # a multimodal wrapper's has the text model's inside


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _load(kind: type[PreTrainedModel], folder: Path) -> PreTrainedModel:
    model, report = kind.from_pretrained(str(folder), dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    return model


def test_sizes() -> None:
    for name in TARGETS:
        size = (CHECKPOINTS / name / "model.safetensors").stat().st_size
        assert size <= TARGET_LIMITS.get(name, OTHER_TARGET_LIMIT)
    for name in ASSISTANTS:
        draft = CHECKPOINTS / f"{name}-assistant" / "model.safetensors"
        assert draft.stat().st_size <= ASSISTANT_LIMIT
    whole = sum(path.stat().st_size for path in CHECKPOINTS.rglob("*") if path.is_file())
    assert whole <= ZOO_LIMIT


@pytest.mark.parametrize("name", TARGETS)
def test_the_recipe_is_the_shipped_shape(name: str) -> None:
    built = TARGETS[name].config().to_dict()
    shipped = modeling.load_target(CHECKPOINTS / name).config.to_dict()
    files = {"architectures", "dtype", "eos_token_id", "pad_token_id", "bos_token_id"}
    differing = {key for key in built if built[key] != shipped.get(key)}
    assert differing <= files | {"_name_or_path", "transformers_version"}


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "tiny_deepseek"])
def test_saving_a_loaded_target_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    """DeepSeek's file holds its MTP layer too, which is no part of the target."""
    folder = CHECKPOINTS / name
    target = modeling.load_target(folder)
    train_target.save_target(target, tmp_path, _config(folder)["eos_token_id"])
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        assert (tmp_path / file).read_bytes() == (folder / file).read_bytes(), file


@pytest.mark.parametrize("name", GEMMA4)
def test_transformers_loads_the_target(name: str) -> None:
    folder = CHECKPOINTS / name
    model = _load(modeling.GEMMA4_CLASSES[TARGETS[name].family], folder)
    layers = model.model.layers
    raw = _config(folder)
    for kind, layer in zip(raw["layer_types"], layers, strict=True):
        size = raw["global_head_dim"] if kind == "full_attention" else raw["head_dim"]
        assert layer.self_attn.head_dim == size
    assert {layer.self_attn.head_dim for layer in layers} == {32, 64}
    assert len({layer.layer_scalar.item() for layer in layers}) > 1


@pytest.mark.parametrize("name", ASSISTANTS)
def test_transformers_loads_the_assistant(name: str) -> None:
    folder = CHECKPOINTS / f"{name}-assistant"
    is_unified = TARGETS[name].family == "gemma4_unified"
    model = _load(
        Gemma4UnifiedAssistantForCausalLM if is_unified else Gemma4AssistantForCausalLM, folder
    )
    assert model.backbone_hidden_size == _config(CHECKPOINTS / name)["hidden_size"]
    assert all(layer.self_attn.is_kv_shared_layer for layer in model.model.layers)


@pytest.mark.parametrize("name", [*TARGETS, *(f"{n}-assistant" for n in ASSISTANTS)])
def test_tensors_are_bfloat16_and_finite(name: str) -> None:
    for key, tensor in _tensors(CHECKPOINTS / name).items():
        if key.endswith("e_score_correction_bias"):
            assert tensor.dtype == torch.float32  # as released: routing decides on small gaps
            assert tensor.unique().numel() > 1
            continue
        if key.endswith("token_ordering"):
            assert sorted(tensor.tolist()) == list(range(len(tensor)))
            continue
        assert tensor.dtype == torch.bfloat16
        assert tensor.isfinite().all()
        assert not key.endswith(("k_proj.weight", "v_proj.weight")) or "assistant" not in name


@pytest.mark.parametrize("name", TARGETS)
def test_chat_template_and_stop_tokens(name: str) -> None:
    tokens = AutoTokenizer.from_pretrained(CHECKPOINTS / name)
    message = {"role": "user", "content": "Sort: 31 4"}
    text = tokens.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    assert text == tokenizer.render_prompt(message["content"])
    ids = tokens.apply_chat_template(
        [message], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert tokens.decode(ids) == text
    assert ids == tokens(text, add_special_tokens=False)["input_ids"]
    assert [tokens.pad_token_id, tokens.eos_token_id, tokens.bos_token_id] == [0, 1, 2]
    stops = json.loads((CHECKPOINTS / name / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [1, tokens.convert_tokens_to_ids(tokenizer.TURN_END)]
    assert stops == _config(CHECKPOINTS / name)["eos_token_id"]
    assert len(tokens) == _config(CHECKPOINTS / name)["vocab_size"]


def test_tokenizer_recipe_gives_the_shipped_file(tmp_path: Path) -> None:
    tokenizer.save_tokenizer(tokenizer.train_tokenizer(), tmp_path)
    for name in (*TARGETS, *(f"{n}-assistant" for n in ASSISTANTS)):
        shipped = CHECKPOINTS / name / "tokenizer.json"
        assert shipped.read_bytes() == (tmp_path / "tokenizer.json").read_bytes()


def test_digits_are_single_tokens() -> None:
    tokens = AutoTokenizer.from_pretrained(CHECKPOINTS / "tiny_gemma4")
    assert tokens.tokenize("407") == ["4", "0", "7"]


def test_text_survives_the_tokenizer() -> None:
    tokens = AutoTokenizer.from_pretrained(CHECKPOINTS / "tiny_gemma4")
    for example in corpus.workload_examples():
        prompt, response = tokenizer.encode(tokens, example)
        assert tokens.decode(prompt) == tokenizer.render_prompt(example.prompt)
        assert tokens.decode(response, skip_special_tokens=True).strip() == example.response
        assert len(prompt) > 32, "prompts must cross the sliding window"
        assert len(response) - 1 < corpus.WORKLOAD_MAX_TOKENS


def test_workload_lines() -> None:
    lines = evaluate.read_workload()
    assert len(lines) == 96
    assert len({line["id"] for line in lines}) == 96
    assert [line["category"] for line in lines[:4]] == list(tasks.TASKS)
    for category in tasks.TASKS:
        assert sum(line["category"] == category for line in lines) == 24
    assert all(set(line) == WORKLOAD_KEYS for line in lines)


def test_a_short_workload_is_answered_and_drafted() -> None:
    """End to end on one prompt a category: right answers, and drafts that are accepted."""
    folder = CHECKPOINTS / "tiny_gemma4"
    target: Any = modeling.load_target(folder)
    assistant = modeling.load_assistant(CHECKPOINTS / "tiny_gemma4-assistant")
    result = evaluate.evaluate(
        target,
        {"assistant": evaluate.by_assistant(target, assistant)},
        AutoTokenizer.from_pretrained(folder),
        workload=evaluate.read_workload()[:4],
    )
    assert result["exact_match"]["math"] == 1.0
    assert result["acceptance"]["assistant"]["all"]["acceptance_length"] > 1.5


def test_drafts_do_not_look_ahead() -> None:
    """`draft_all_rows` reads one forward over the whole text; rows must not see what follows."""
    folder = CHECKPOINTS / "tiny_gemma4"
    target, tokens = modeling.load_target(folder), AutoTokenizer.from_pretrained(folder)
    assistant = modeling.load_assistant(CHECKPOINTS / "tiny_gemma4-assistant")
    prompt, response = tokenizer.encode(tokens, corpus.workload_examples()[3])
    text = evaluate.Generation(prompt + response, len(prompt), len(prompt) + 12)
    cut = evaluate.Generation(text.tokens[: len(prompt) + 2], len(prompt), len(prompt) + 2)
    whole = evaluate.draft_all_rows(target, assistant, text, 3)
    assert whole[:1].tolist() == evaluate.draft_all_rows(target, assistant, cut, 3)[:1].tolist()


def test_clusters_are_balanced_and_close() -> None:
    generator = torch.Generator().manual_seed(0)
    centre = torch.randn(4, 8, generator=generator) * 10
    table = centre.repeat_interleave(6, 0) + torch.randn(24, 8, generator=generator)
    order = train_assistant.fit_ordering(table, 4)
    groups = {frozenset(row) for row in (order // 6).view(4, 6).tolist()}
    assert groups == {frozenset({c}) for c in range(4)}


def test_clusters_must_divide_the_vocabulary() -> None:
    with pytest.raises(ValueError, match="num_centroids=5 must divide"):
        train_assistant.fit_ordering(torch.zeros(24, 8), 5)

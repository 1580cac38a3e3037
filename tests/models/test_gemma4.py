"""Gemma 4's pitfalls one by one, and that a step never asks the device for a number."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from gemma4_oracle import (
    FULL,
    SLIDING,
    PagedRun,
    Pass,
    final_hidden,
    load,
    make_target,
    random_target,
    text_config,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from hydraspec.models.gemma4.assistant import load_assistant
from hydraspec.models.gemma4.config import read_gemma4_config
from hydraspec.models.gemma4.model import Gemma4Target, rounded

EVERYTHING = text_config(
    num_hidden_layers=6,
    layer_types=[SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
    num_kv_shared_layers=2,
    use_double_wide_mlp=True,
    hidden_size_per_layer_input=4,
    vocab_size_per_layer_input=96,
    attention_k_eq_v=True,
    enable_moe_block=True,
    num_experts=4,
    top_k_experts=2,
    moe_intermediate_size=8,
)
# layers, period of full layers, shared layers, expected sources of sliding and full ones
RELEASED = {
    "E2B": (35, 5, 20, 13, 14),
    "E4B": (42, 6, 18, 22, 23),
}


@pytest.mark.parametrize("name", RELEASED)
def test_sharing_layers_read_the_last_owner_of_their_type(name: str) -> None:
    layers, period, shared, sliding, full = RELEASED[name]
    kinds = [FULL if (i + 1) % period == 0 else SLIDING for i in range(layers)]
    config = read_gemma4_config(
        text_config(num_hidden_layers=layers, layer_types=kinds, num_kv_shared_layers=shared), name
    )
    assert config.last_owner(SLIDING) == sliding
    assert config.last_owner(FULL) == full
    for i in range(layers - shared, layers):
        assert config.layers[i].kv_source == (sliding if kinds[i] == SLIDING else full)
    assert [x.kv_source for x in config.layers[: layers - shared]] == list(range(layers - shared))


def test_no_sharing_does_not_slice_to_nothing() -> None:
    config = read_gemma4_config(text_config(num_kv_shared_layers=0), "x")
    assert not any(layer.shares_kv for layer in config.layers)


@pytest.mark.parametrize("layers", [6, 7, 8])
def test_the_last_layer_is_full(layers: int) -> None:
    config = read_gemma4_config(text_config(num_hidden_layers=layers, layer_types=None), "x")
    kinds = [layer.kind for layer in config.layers]
    assert kinds[-1] == FULL
    assert kinds.count(FULL) == 1 + (layers > 6)


def test_double_width_is_for_sharing_layers_only() -> None:
    config = read_gemma4_config(EVERYTHING, "x")
    assert [layer.intermediate_size for layer in config.layers] == [48] * 4 + [96] * 2


def test_global_kv_heads_need_k_eq_v() -> None:
    for k_eq_v, expected in ((True, 1), (False, 2)):
        config = read_gemma4_config(text_config(attention_k_eq_v=k_eq_v), "x")
        assert config.layers[1].num_kv_heads == expected
        assert config.layers[1].head_dim == 32


def test_per_layer_config_with_padded_keys() -> None:
    raw = text_config(per_layer_config={"01": {"head_dim": 64, "num_key_value_heads": 4}})
    layers = read_gemma4_config(raw, "x").layers
    assert (layers[1].head_dim, layers[1].num_kv_heads) == (64, 4)
    assert (layers[3].head_dim, layers[3].num_kv_heads) == (16, 2)


@pytest.mark.parametrize(
    ("width", "expected"), [(1536, 39.25), (2560, 50.5), (2816, 53.0), (5376, 73.5)]
)
def test_the_embedding_scale_is_rounded_to_bfloat16(width: int, expected: float) -> None:
    assert rounded(math.sqrt(width), torch.bfloat16) == expected


def test_unknown_tokens_read_row_0_of_the_per_layer_table(tmp_path: Path) -> None:
    target = random_target(tmp_path, EVERYTHING | {"vocab_size_per_layer_input": 40})
    embedded = torch.randn(4, 32)
    inputs = target.per_layer.forward(torch.tensor([95, 40, -1, 39]), embedded)
    zeros = target.per_layer.forward(torch.tensor([0, 0, 0, 39]), embedded)
    assert inputs.shape == (4, 6, 4)
    assert torch.equal(inputs, zeros)


def test_names_lose_their_prefix_and_towers_drop_out() -> None:
    assert (
        Gemma4Target.canonical_name("model.language_model.layers.0.layer_scalar")
        == "layers.0.layer_scalar"
    )
    assert Gemma4Target.canonical_name("language_model.lm_head.weight") == "lm_head.weight"
    assert Gemma4Target.canonical_name("model.vision_tower.encoder.weight") is None
    assert Gemma4Target.canonical_name("model.embed_audio.embedding_projection.weight") is None


@pytest.mark.parametrize("scalars", [[0.5] * 4, [0.01, 0.02, 1.0, 3.0], [-1.0, 1.0, 1.0, 1.0]])
def test_layer_scalars_of_any_size_are_kept(scalars: list[float], tmp_path: Path) -> None:
    """They move into neighbouring weights while small, and are multiplied out where they run
    away.
    """
    oracle = make_target(text_config(), 2)
    for layer, scalar in zip(oracle.model.layers, scalars, strict=True):
        layer.layer_scalar.fill_(scalar)
    oracle.save_pretrained(tmp_path)
    prompt = [4, 8, 15, 16, 23, 42]
    _, logits = PagedRun(load(tmp_path), 1).step({0: prompt})[0]
    with torch.no_grad():
        expected = oracle(torch.tensor([prompt])).logits[0]
    assert (logits - expected).abs().max() < 1e-4 * (expected.max() - expected.min())


def faked(mode: FakeTensorMode, batch: Pass) -> Pass:
    def fake(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return mode.from_tensor(value)
        return [fake(v) for v in value] if isinstance(value, list) else value

    return Pass(**{f.name: fake(getattr(batch, f.name)) for f in dataclasses.fields(batch)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_draft_steps_never_ask_the_device(dtype: torch.dtype, tmp_path: Path) -> None:
    """Under FakeTensorMode `.item()`, boolean masks and the like raise."""
    target = random_target(tmp_path / "target", EVERYTHING, dtype)
    text = text_config(
        hidden_size=16, num_hidden_layers=2, layer_types=[SLIDING, FULL], attention_k_eq_v=True
    )
    raw = {
        "model_type": "gemma4_assistant",
        "text_config": text,
        "backbone_hidden_size": 32,
        "use_ordered_embeddings": True,
        "num_centroids": 8,
        "centroid_intermediate_top_k": 2,
    }
    (tmp_path / "assistant").mkdir()
    (tmp_path / "assistant" / "config.json").write_text(json.dumps(raw))
    assistant = load_assistant(str(tmp_path / "assistant"), weights="random", target=target, seed=0)
    run = PagedRun(target, 3)
    batch = run.batch({0: [1], 1: [2, 3], 2: [4, 5, 6, 7]})
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.inference_mode():
        fake = faked(mode, batch)
        caches = [None if c is None else mode.from_tensor(c) for c in run.caches]
        hidden = final_hidden(target, fake, caches)
        assert hidden.shape == (7, 32)
        assert target.compute_logits(hidden).shape == (7, 96)
        context = assistant.begin(fake.seq_lens - 1, fake.seq_lens, fake.block_tables, 12, caches)
        h, tokens = hidden[:3], fake.input_ids[:3]
        for _ in range(2):
            d, h = assistant.step(context, tokens, h)
            tokens = assistant.greedy_tokens(d)
        assert assistant.compute_logits(d).shape == (3, 96)
        assert tokens.shape == (3,)

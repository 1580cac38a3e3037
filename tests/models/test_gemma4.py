"""Gemma 4's pitfalls one by one, and that a step never asks the device for a number."""

import math
from pathlib import Path

import pytest
import torch
from gemma4_oracle import (
    FULL,
    SLIDING,
    PagedRun,
    load,
    make_target,
    random_target,
    text_config,
)

from hydraspec.models.gemma4.config import read_gemma4_config
from hydraspec.models.gemma4.model import rounded

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


def test_full_layers_have_512_wide_heads_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    """Catches a fall-back to head_dim, the sliding layers' width."""
    config = text_config()
    del config["global_head_dim"]
    assert [layer.head_dim for layer in read_gemma4_config(config, "x").layers] == [16, 512] * 2
    weights = random_target(tmp_path, config, torch.float32).tensors()  # type: ignore[attr-defined]
    assert weights["layers.0.self_attn.q_proj.weight"].shape == (4 * 16, 32)
    assert weights["layers.1.self_attn.q_proj.weight"].shape == (4 * 512, 32)
    assert weights["layers.1.self_attn.o_proj.weight"].shape == (32, 4 * 512)


def test_the_last_layer_is_full_whatever_the_file_says() -> None:
    """As transformers' config class has it."""
    layers = read_gemma4_config(text_config(layer_types=[SLIDING] * 4), "x").layers
    assert [layer.kind for layer in layers] == [SLIDING, SLIDING, SLIDING, FULL]
    assert [layer.head_dim for layer in layers] == [16, 16, 16, 32]


def test_embeddings_are_multiplied_by_the_rounded_scale(tmp_path: Path) -> None:
    """sqrt(32) is 5.657, and 5.656 in bfloat16; the target and its assistant read the same."""
    target = random_target(tmp_path, text_config(), torch.bfloat16)
    ids = torch.arange(target.vocab_size)
    rows = target.table.weight.float()
    expected = (rows * torch.tensor(math.sqrt(32)).bfloat16().float()).bfloat16()
    assert not expected.equal((rows * math.sqrt(32)).bfloat16())
    assert target.embed(ids).equal(expected)
    beside = target.embed_beside(ids, torch.zeros_like(expected), None)
    assert beside[:, :32].equal(expected)

"""Keys that released Gemma 4 configs leave out or get overruled, and rounding where it happens."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from gemma4_oracle import FULL, SLIDING, random_target, text_config

from hydraspec.models.gemma4.config import read_gemma4_config


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

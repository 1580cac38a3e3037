"""DeepSeek-V3: its compressed cache, states for drafters, layouts and refusals. Its logits are
compared with transformers' in test_target_parity.py.
"""

from pathlib import Path

import pytest
import torch
from deepseek_oracle import (
    deepseek_config,
    deepseek_logits,
    make_deepseek,
)
from gemma4_oracle import PagedRun, load
from safetensors.torch import load_file, save_file
from target_families import assert_near, prompts_of
from tiny_targets import edit_config

from hydraspec.errors import CheckpointError
from hydraspec.models.deepseek.config import read_deepseek_config

# Share of the logit range: float32 sums in another order (absorbed projections among them).
TOLERANCE = 1e-4


def test_a_token_caches_one_latent_and_one_rotary_key(tmp_path: Path) -> None:
    make_deepseek(deepseek_config(), 0).save_pretrained(tmp_path)
    (group,) = load(tmp_path).kv_groups(4)
    assert group.shape.page_row == (1, 16 + 8)
    assert group.layers == (0, 1, 2)


def test_mtp_layers_in_the_file_are_left_to_the_drafter(tmp_path: Path) -> None:
    oracle = make_deepseek(deepseek_config(), 6)
    oracle.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(32, 64)
    tensors["model.layers.3.embed_tokens.weight"] = torch.zeros(96, 32)
    save_file(tensors, tmp_path / "model.safetensors")
    run = PagedRun(load(tmp_path), 1)
    prompt = prompts_of(6)[0]
    assert_near(run.step({0: prompt})[0][1], deepseek_logits(oracle, prompt), TOLERANCE)


def released_layout(config: dict) -> dict:
    """As released: rope_theta at the top, YaRN under rope_scaling with `type`."""
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope | {"type": rope.pop("rope_type")}
    return config


def test_both_layouts_of_the_config_say_the_same() -> None:
    ours = read_deepseek_config(deepseek_config(), "x")
    released = read_deepseek_config(released_layout(deepseek_config()), "x")
    assert torch.equal(ours.rope.theta, released.rope.theta)
    assert (ours.rope.gain, ours.score_scale) == (released.rope.gain, released.score_scale)
    assert ours.score_scale != pytest.approx(20**-0.5)  # mscale_all_dim 1 sharpens the scores


def save(folder: Path, **changes: object) -> None:
    make_deepseek(deepseek_config(), 0).save_pretrained(folder)
    edit_config(folder, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_lora_rank": None}, ["kv_lora_rank is None", "at least 1"]),
        ({"n_group": 3}, ["n_group is 3", "divisor of n_routed_experts 8"]),
        ({"topk_group": 5}, ["topk_group is 5", "at most n_group 4"]),
        ({"num_experts_per_tok": 7}, ["num_experts_per_tok is 7", "at most the 4"]),
        ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "silu"]),
        ({"scoring_func": "softmax"}, ["scoring_func is 'softmax'", "sigmoid"]),
        ({"qk_rope_head_dim": 7}, ["qk_rope_head_dim is 7", "even"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["rope_parameters", "yarn"]),
        ({"num_hidden_layers": 4}, ["missing tensors: layers.3.input_layernorm.weight"]),
        (
            {"kv_lora_rank": 8},
            ["misshapen tensors: layers.0.self_attn.kv_a_layernorm.weight is [16]"],
        ),
        ({"n_routed_experts": 4, "n_group": 2}, ["surplus tensors: layers.1.mlp.experts.4"]),
    ],
)
def test_a_bad_checkpoint_is_named(changes: dict, words: list[str], tmp_path: Path) -> None:
    save(tmp_path, **changes)
    with pytest.raises(CheckpointError) as refused:
        load(tmp_path)
    for word in words:
        assert word in str(refused.value)

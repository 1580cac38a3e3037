"""Files of dense targets: Mistral's own format, what is ignored, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_oracle import make_dense, make_mimo, small
from gemma4_oracle import PagedRun, load
from safetensors.torch import load_file, save_file
from tiny_targets import edit_config, rewrite

from hydraspec.errors import CheckpointError
from hydraspec.models.checkpoint.hub import download
from hydraspec.models.checkpoint.mistral_names import (
    config_of_params,
    consolidated_name,
    half_split,
    hugging_face_name,
    interleaved,
    is_consolidated,
    rotary_heads,
)
from hydraspec.models.checkpoint.reader import open_checkpoint
from hydraspec.models.dense.config import read_dense_config

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
PARAMS = {
    "dim": 32,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 2,
    "hidden_dim": 48,
    "head_dim": 16,
    "vocab_size": 96,
    "norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_seq_len": 256,
}


def logits_of(folder: Path) -> torch.Tensor:
    return PagedRun(load(folder), 1).step({0: PROMPT})[0][1]


@pytest.fixture
def mistral(tmp_path: Path) -> Path:
    """Hugging Face's files."""
    config = small(sliding_window=8, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    make_dense("mistral", config, 1).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def consolidate(source: Path, folder: Path, **params: Any) -> Path:
    """The same weights in Mistral's own format."""
    folder.mkdir()
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        heads = rotary_heads(consolidated_name(name), {"num_attention_heads": 4}) and (
            len(tensor) // 16
        )
        rows = interleaved(tensor, heads) if heads else tensor
        tensors[consolidated_name(name)] = rows.contiguous()
    assert is_consolidated(tensors)
    save_file(tensors, folder / "consolidated.safetensors")
    (folder / "params.json").write_text(json.dumps(PARAMS | {"sliding_window": 8} | params))
    return folder


def test_consolidated_files_are_the_same_model(mistral: Path, tmp_path: Path) -> None:
    expected = logits_of(mistral)
    own = consolidate(mistral, tmp_path / "own")
    assert torch.equal(logits_of(own), expected)
    target = load(own)
    assert (target.max_position_embeddings, target.eos_token_ids) == (256, (2,))
    # config.json beside consolidated.safetensors, as a partial download leaves it
    (own / "config.json").write_bytes((mistral / "config.json").read_bytes())
    (own / "params.json").unlink()
    assert torch.equal(logits_of(own), expected)


def test_rows_out_of_order_would_show(mistral: Path, tmp_path: Path) -> None:
    own = consolidate(mistral, tmp_path / "own")
    file = own / "consolidated.safetensors"
    tensors = load_file(file)
    name = "layers.1.attention.wk.weight"
    tensors[name] = half_split(tensors[name], 2).contiguous()
    save_file(tensors, file)
    assert (logits_of(own) - logits_of(mistral)).abs().max() > 1e-2


def test_a_folder_with_both_formats_is_read_once(mistral: Path, tmp_path: Path) -> None:
    expected = logits_of(mistral)
    (mistral / "consolidated.safetensors").write_bytes(b"never opened")
    assert torch.equal(logits_of(mistral), expected)


def test_a_sharded_consolidated_folder(mistral: Path, tmp_path: Path) -> None:
    own = consolidate(mistral, tmp_path / "own")
    tensors = load_file(own / "consolidated.safetensors")
    (own / "consolidated.safetensors").unlink()
    shards = [f"consolidated-0000{i}-of-00002.safetensors" for i in (1, 2)]
    halves = [dict(list(tensors.items())[part]) for part in (slice(20), slice(20, None))]
    for shard, half in zip(shards, halves, strict=True):
        save_file(half, own / shard)
    index = {name: s for s, half in zip(shards, halves, strict=True) for name in half}
    (own / "consolidated.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert torch.equal(logits_of(own), logits_of(mistral))
    (own / shards[1]).unlink()
    with pytest.raises(CheckpointError, match=f"lacks {shards[1]}"):
        load(own)


@pytest.mark.parametrize("has_both", [True, False])
def test_a_download_takes_one_format(
    has_both: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fake(hub_id: str, allow_patterns: list[str], ignore_patterns: list[str] = ()) -> str:
        asked.append(list(ignore_patterns))
        if has_both:
            (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fake)
    assert download("mistralai/some") == tmp_path
    assert asked == [["consolidated*"]] + [[]] * (not has_both)


def test_the_rotary_order_of_rows() -> None:
    heads, dim = 3, 8
    rows = torch.arange(heads * dim)
    # Pair i of a head: rows (2i, 2i + 1) there, (i, i + H/2) here.
    expected = [h * dim + 2 * i + odd for h in range(3) for odd in (0, 1) for i in range(4)]
    assert half_split(rows, heads).tolist() == expected
    for shape in ((24,), (24, 1), (24, 5), (24, 2, 3)):  # biases, row scales, weights
        tensor = torch.randn(shape)
        assert torch.equal(interleaved(half_split(tensor, heads), heads), tensor)
        assert torch.equal(half_split(tensor, heads), tensor[half_split(rows, heads)])
    for scalar in (torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([[0.5]])):
        assert half_split(scalar, heads) is scalar


def test_what_the_rotary_order_concerns() -> None:
    config = {"num_attention_heads": 4, "num_key_value_heads": 2}
    concerned = {
        "layers.0.attention.wq.weight": 4,
        "layers.11.attention.wk.weight": 2,
        "layers.0.attention.wk.qscale_weight": 2,
        "layers.0.attention.wq.bias": 4,
        "layers.0.attention.wq.qscale_act": None,
        "layers.0.attention.wv.weight": None,
        "layers.0.attention.wo.weight": None,
        "layers.0.feed_forward.w1.weight": None,
    }
    assert {name: rotary_heads(name, config) for name in concerned} == concerned


def test_names_go_both_ways() -> None:
    names = {
        "tok_embeddings.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
        "eagle_linear.weight": "model.fc.weight",
        "eagle_linear.qscale_act": "model.fc.input_scale",
        "layers.3.attention_norm.weight": "model.layers.3.input_layernorm.weight",
        "layers.3.ffn_norm.weight": "model.layers.3.post_attention_layernorm.weight",
        "layers.3.attention.wo.qscale_weight": "model.layers.3.self_attn.o_proj.weight_scale",
        "layers.3.feed_forward.w1.weight": "model.layers.3.mlp.gate_proj.weight",
        "layers.3.feed_forward.w2.weight": "model.layers.3.mlp.down_proj.weight",
        "layers.3.feed_forward.w3.weight": "model.layers.3.mlp.up_proj.weight",
        "vision_encoder.ln_pre.weight": "vision_encoder.ln_pre.weight",
    }
    for own, hugging_face in names.items():
        assert hugging_face_name(own) == hugging_face
        assert consolidated_name(hugging_face) == own
    assert not is_consolidated(names.values())


def test_params_become_a_config() -> None:
    yarn = {"factor": 4, "beta": 16, "alpha": 2, "original_max_position_embeddings": 64}
    config = config_of_params(PARAMS | {"yarn": yarn | {"apply_scale": False}}, "x")
    rope = {"factor": 4, "beta_fast": 16, "beta_slow": 2, "original_max_position_embeddings": 64}
    assert config["rope_scaling"] == {"rope_type": "yarn", "attention_factor": 1.0} | rope
    assert (config["sliding_window"], config["tie_word_embeddings"]) == (None, False)
    assert read_dense_config(config, "x").rope.gain == 1.0
    assert read_dense_config(config, "x").kinds == ("full_attention",) * 3


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"moe": {"num_experts": 8}}, "moe is {'num_experts': 8}; expected a dense"),
        ({"kv_lora_rank": 512}, "kv_lora_rank is 512"),
        ({"quantization": {"qformat_weight": "int8"}}, "is 'int8'; expected fp8_e4m3"),
        ({"n_heads": 3}, "num_attention_heads is 3; expected a multiple of the 2 KV heads"),
    ],
)
def test_unusable_params_are_refused(
    params: dict, message: str, mistral: Path, tmp_path: Path
) -> None:
    own = consolidate(mistral, tmp_path / "own", **params)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load(own)


def test_mimos_draft_layers_are_not_the_targets(tmp_path: Path) -> None:
    config = small(rope_parameters={"rope_type": "default", "rope_theta": 640000.0})
    make_mimo(config, 1, tmp_path)
    expected = logits_of(tmp_path)
    rewrite(tmp_path, lambda t: {k: v for k, v in t.items() if "mtp_layers" not in k})
    assert torch.equal(logits_of(tmp_path), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_held_once(tied: bool, tmp_path: Path) -> None:
    make_dense("qwen3", small(tie_word_embeddings=tied), 1).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    target = load(tmp_path)
    assert (target.head is target.table) == tied
    assert target.memory_bytes() == sum(t.nbytes for t in tensors.values())
    if tied:  # its second name may be there
        expected = logits_of(tmp_path)
        save_file(tensors | {"lm_head.weight": torch.zeros(96, 32)}, file)
        assert torch.equal(logits_of(tmp_path), expected)


BAD_VALUES: dict[str, Any] = {
    "hidden_act": "gelu",
    "hidden_activation": "gelu_pytorch_tanh",  # beside hidden_act silu
    "hidden_size": None,
    "head_dim": 15,
    "layer_types": ["sliding_attention"],
    "num_key_value_heads": 3,
    "rms_norm_eps": 0,
    "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]},
    "rope_parameters": {"full_attention": {"rope_type": "default"}},
    "sliding_window": 0,
}


@pytest.mark.parametrize("key", BAD_VALUES)
def test_a_config_we_cannot_compute_is_refused(key: str, mistral: Path) -> None:
    edit_config(mistral, **{key: BAD_VALUES[key]})
    with pytest.raises(CheckpointError, match=r"\w+ is .*; expected"):
        load(mistral)


# Keys that decide, as released config.json files have them -> head_dim, window, biases, YaRN gain.
SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
SIZES |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE |= {"original_max_position_embeddings": 8192, "rope_type": "llama3"}
YARN_ROPE = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
QWEN_WINDOW = {"sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28}
RELEASED: dict[str, tuple[dict[str, Any], tuple]] = {
    "Llama 3.1": ({"model_type": "llama", "rope_scaling": LLAMA3_ROPE}, (128, None, False, 1.0)),
    "Mistral v0.1": ({"model_type": "mistral"}, (128, 4096, False, 1.0)),
    "Mistral v0.3": ({"model_type": "mistral", "sliding_window": None}, (128, None, False, 1.0)),
    "Mistral Nemo": (
        {"model_type": "mistral", "sliding_window": None, "hidden_size": 5120, "head_dim": 128},
        (128, None, False, 1.0),
    ),
    "Qwen2.5": ({"model_type": "qwen2", **QWEN_WINDOW}, (128, None, True, 1.0)),
    "Qwen3 with YaRN": (
        {"model_type": "qwen3", "sliding_window": None, "rope_scaling": YARN_ROPE},
        (128, None, False, 1.138629436111989),
    ),
    "Qwen3 0.6B": ({"model_type": "qwen3", "hidden_size": 1024}, (128, None, False, 1.0)),
    "MiMo": ({"model_type": "mimo", "attention_bias": True}, (128, None, True, 1.0)),
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_configs(name: str) -> None:
    raw, expected = RELEASED[name]
    config = read_dense_config(SIZES | raw, name)
    assert config.out_bias is False
    found = (config.head_dim, config.sliding_window, config.qkv_bias, config.rope.gain)
    assert found == pytest.approx(expected)
    assert config.score_scale == pytest.approx(128**-0.5 * expected[3] ** 2)


def test_a_window_that_is_turned_off(tmp_path: Path) -> None:
    make_dense("qwen3", small(), 1).save_pretrained(tmp_path)
    edit_config(tmp_path, layer_types=["sliding_attention"] * 3, sliding_window=8)
    with pytest.raises(CheckpointError, match="this config turns windows off"):
        load(tmp_path)


def test_a_wrapper_around_another_text_model_is_named(mistral: Path) -> None:
    edit_config(mistral, model_type="mistral3", text_config={"model_type": "ministral9"})
    with pytest.raises(CheckpointError, match="model_type is 'ministral9'; expected a dense"):
        load(mistral)
    assert open_checkpoint(str(mistral)).config["model_type"] == "mistral3"

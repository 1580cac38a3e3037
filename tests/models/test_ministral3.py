"""Ministral 3 and Mistral Medium 3.5: the released layouts in FP8, and values that are refused.

Logits and drafts beside independent definitions are in test_target_parity.py and test_eagle.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_oracle import make_dense, oracle, small, to_multimodal_layout
from eagle_folders import FP8
from gemma4_oracle import PagedRun, load
from quantised_folders import in_double_throughout
from safetensors.torch import load_file, save_file
from tiny_targets import edit_config
from torch import Tensor

from hydraspec.errors import CheckpointError
from hydraspec.models.checkpoint.mistral_names import (
    config_of_params,
    consolidated_name,
    interleaved,
)
from hydraspec.models.checkpoint.quantization import encode
from hydraspec.models.dense.config import read_dense_config

LENGTH = "original_max_position_embeddings"
ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 64.0,
    LENGTH: 8,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "llama_4_scaling_beta": 0.4,
}
CONFIG = small(rope_parameters=ROPE)
PARAMS: dict[str, Any] = {
    **{"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16},
    **{"hidden_dim": 48, "vocab_size": 96, "norm_eps": 1e-6, "rope_theta": 1e6},
    "max_position_embeddings": 256,
    "yarn": {"factor": 64, "alpha": 1, "beta": 4, LENGTH: 8, "apply_scale": True},
    "llama_4_scaling": {"beta": 0.4, LENGTH: 8},
    "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"},
    "vision_encoder": {"hidden_size": 4},
}
PROMPT = [(7 * i * i + 3 * i) % 96 for i in range(40)]
CLOSE = 1e-9  # share of the logit range: float64, where one number rounded otherwise gives 1e-3


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale.double()).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale.double()


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], Tensor]:
    """The folder of either layout, and the logits that transformers has for the dequantised model
    with every projection's inputs rounded."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("hugging_face", "own")}
    model = make_dense("ministral3", CONFIG, 4).double()
    model.save_pretrained(folders["hugging_face"])
    to_multimodal_layout(folders["hugging_face"])
    theirs, own = {}, {}
    for name, tensor in load_file(folders["hugging_face"] / "model.safetensors").items():
        plain = name.replace("language_model.", "")
        if not plain.endswith("_proj.weight"):
            theirs[name] = tensor
            own["vision_encoder.ln_pre.weight" if "vision" in name else plain] = tensor
            continue
        found = encode(tensor, FP8)
        scale, static = found["weight_scale"].view(()), torch.tensor(0.01 + 0.001 * len(theirs))
        linear = model.get_submodule(plain.removesuffix(".weight"))
        linear.weight.data = found["weight"].double() * scale.double()
        linear.register_forward_pre_hook(lambda _, x, static=static: (rounded(x[0], static),))
        rows = found["weight"]
        theirs |= {name: rows, f"{name}_scale_inv": scale}
        theirs[name.replace("weight", "activation_scale")] = static
        if "q_proj" in name or "k_proj" in name:
            rows = interleaved(rows, len(rows) // 16)
        own |= {plain: rows.contiguous(), f"{plain}_scale": scale}
        own[plain.replace("weight", "input_scale")] = static
    save_file(theirs, folders["hugging_face"] / "model.safetensors")
    kept = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
    edit_config(
        folders["hugging_face"],
        quantization_config={
            "quant_method": "fp8",
            "activation_scheme": "static",
            "weight_block_size": None,
            "modules_to_not_convert": kept,
        },
    )
    own = {consolidated_name(name): tensor for name, tensor in own.items()}
    save_file(own, folders["own"] / "consolidated.safetensors")
    (folders["own"] / "params.json").write_text(json.dumps(PARAMS))
    with in_double_throughout():
        return folders, oracle(model, PROMPT)[0]


@pytest.mark.parametrize("layout", ["hugging_face", "own"])
def test_a_release_in_fp8(layout: str, released: tuple[dict[str, Path], Tensor]) -> None:
    """Catches scales that are skipped or taken from another matrix, and rows of q and k out of
    order, in contexts several times the original one."""
    folders, expected = released
    target = load(folders[layout], torch.float64)
    assert set((target.quantization or {}).values()) == {str(FP8)}
    logits = PagedRun(target, 1).step({0: PROMPT})[0][1]
    assert (logits - expected).abs().max() <= CLOSE * (expected.max() - expected.min())


def test_without_growth_nothing_is_scaled() -> None:
    """Mistral Medium's beta is 0: no factor is computed, and no product."""
    positions = torch.arange(40)
    for beta in (0, 0.0, None):
        raw = CONFIG | {"model_type": "ministral3", "rope_parameters": ROPE}
        raw["rope_parameters"] = ROPE | {"llama_4_scaling_beta": beta}
        assert read_dense_config(raw, "x").rope.query_scale(positions, torch.float32) is None
    raw["rope_parameters"] = ROPE
    scale = read_dense_config(raw, "x").rope.query_scale(positions, torch.float32)
    assert scale is not None
    expected = 1 + 0.4 * torch.log(1 + torch.floor(positions / 8))
    torch.testing.assert_close(scale[:, 0], expected)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"low_freq_factor": 1.0}, "rope_parameters.low_freq_factor is 1.0; expected"),
    "no length": ({LENGTH: None}, f"rope_parameters.{LENGTH} is None; expected an integer"),
    "zero length": ({LENGTH: 0}, "is 0; expected a"),
    "negative factor": ({"factor": -4}, "factor is -4; expected a number above 0"),
    "no factor": ({"factor": None}, "factor is None; expected a number above 0"),
    "negative beta": (
        {"llama_4_scaling_beta": -0.1},
        "rope_parameters.llama_4_scaling_beta is -0.1; expected a number above 0",
    ),
    "a text": ({"llama_4_scaling_beta": "0.1"}, "beta is '0.1'; expected a number above 0"),
    "unknown type": ({"rope_type": "longrope"}, "expected rope_type default, linear"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rotary_parameters_that_are_not_computed(name: str) -> None:
    changes, message = REFUSED[name]
    raw = CONFIG | {"model_type": "ministral3", "rope_parameters": ROPE | changes}
    with pytest.raises(CheckpointError) as caught:
        read_dense_config(raw, "x")
    assert message in str(caught.value)
    assert "'x'" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 8}, "sliding_window is 8; expected null"),
        ({"layer_types": ["sliding_attention"] * 3}, "this config turns windows off"),
        ({"model_type": "mistral"}, "llama_4_scaling_beta is 0.4; expected 0 or nothing"),
    ],
    ids=["window", "sliding layers", "another family"],
)
def test_keys_that_contradict_the_family(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_dense_config(CONFIG | {"model_type": "ministral3"} | changes, "x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama_4_scaling": {"beta": 0.1, LENGTH: 9}}, f"llama_4_scaling.{LENGTH} is 9, and yarn"),
        ({"llama_4_scaling": {"beta": 0.1, "floor": 8}}, "expected an object with beta, original"),
        ({"llama_4_scaling": 0.1}, "llama_4_scaling is 0.1; expected an object"),
        ({"llama_4_scaling": {"beta": 0.1}, "yarn": None}, f"rope_scaling.{LENGTH} is nothing"),
        ({"yarn": {"gamma": 1}}, "yarn is {'gamma': 1}; expected an object with factor, alpha"),
        ({"sliding_window": 8}, "sliding_window is 8; expected null"),
    ],
)
def test_params_that_are_not_computed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_dense_config(config_of_params(PARAMS | changes, "x"), "x")

"""Small folders in each quantised format that is read, to be broken by tests."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from dense_oracle import make_dense, small
from tiny_targets import edit_config, rewrite
from torch import Tensor

from hydraspec.models.checkpoint.quantization import Scheme, encode

FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
Q_PROJ = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"
SHAPES = {  # [N, K] of a layer's matrices in `small`
    **{"self_attn.q_proj": (64, 32), "self_attn.k_proj": (32, 32), "self_attn.v_proj": (32, 32)},
    **{"self_attn.o_proj": (32, 64), "mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32)},
    "mlp.down_proj": (32, 48),
}
MODULES = {
    f"model.layers.{layer}.{name}": shape for layer in range(3) for name, shape in SHAPES.items()
}


def compressed(weights: Any, inputs: Any = None, layout: str = "float-quantized") -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "format": layout,
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


TOKEN = FP8 | {"strategy": "token", "dynamic": True}
FORMATS: dict[str, tuple[Scheme, dict[str, Any]]] = {
    "channel": (
        Scheme(kind="fp8", rows=1, columns=None, inputs="token"),
        compressed(FP8 | {"strategy": "channel"}, TOKEN),
    ),
    "block": (
        Scheme(kind="fp8", rows=32, columns=32, inputs="group", group=32),
        compressed(
            FP8 | {"strategy": "block", "block_structure": [32, 32]},
            FP8 | {"strategy": "group", "group_size": 32, "dynamic": True},
        ),
    ),
    "static": (
        Scheme(kind="fp8", rows=None, columns=None, inputs="static", input_scale="input_scale"),
        compressed(FP8 | {"strategy": "tensor"}, FP8 | {"strategy": "tensor", "dynamic": False}),
    ),
    "packed": (
        Scheme(kind="int4", rows=1, columns=16, inputs="float"),
        compressed(INT4, None, "pack-quantized"),
    ),
    "transformers": (
        Scheme(kind="fp8", rows=32, columns=16, inputs="group", group=16, scale="weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [32, 16], "activation_scheme": "dynamic"},
    ),
}


def quantised(tensors: Mapping[str, Tensor], scheme: Scheme) -> dict[str, Tensor]:
    """The tensors of a file with each layer's matrices in a scheme."""
    found = dict(tensors)
    for module in MODULES:
        if f"{module}.weight" in found:
            encoded = encode(found.pop(f"{module}.weight"), scheme)
            found |= {f"{module}.{part}": tensor for part, tensor in encoded.items()}
            if scheme.input_scale is not None:
                found[f"{module}.{scheme.input_scale}"] = torch.tensor(0.02)
    return found


def write_formats(root: Path) -> Path:
    """A folder of a random Qwen3 in float, and one in each format, by their names."""
    make_dense("qwen3", small(), 1).save_pretrained(root / "float")
    for name, (scheme, config) in FORMATS.items():
        shutil.copytree(root / "float", root / name)
        rewrite(root / name, lambda tensors, scheme=scheme: quantised(tensors, scheme))
        edit_config(root / name, quantization_config=config)
    return root

"""Quantised folders whose tensors do not fit their config, or hold no scales that a product could
use: one message each.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gemma4_oracle import load
from tiny_targets import edit_config, rewrite
from torch import Tensor
from written_formats import (
    DOWN,
    FORMATS,
    FP8,
    INT4,
    MODULES,
    Q_PROJ,
    TOKEN,
    compressed,
)

from hydraspec.errors import CheckpointError

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def drop(*names: str) -> Change:
    return lambda tensors: {name: t for name, t in tensors.items() if name not in names}


def put(**parts: Tensor) -> Change:
    """Tensors of one matrix, by their names after the module's."""
    return lambda tensors: tensors | {f"{DOWN}.{part}": tensor for part, tensor in parts.items()}


def change(part: str, how: Callable[[Tensor], Tensor]) -> Change:
    return put_of(lambda tensors: {f"{DOWN}.{part}": how(tensors[f"{DOWN}.{part}"])})


def put_of(made: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Change:
    return lambda tensors: tensors | made(tensors)


def config(name: str, **keys: Any) -> dict[str, Any]:
    return FORMATS[name][1] | keys


NOT_READ = "numbers that are not read"
BROKEN: dict[str, tuple[str, Change | dict[str, Any] | None, list[str]]] = {
    "no scale": ("channel", drop(f"{DOWN}.weight_scale"), [f"missing: {DOWN}.weight_scale"]),
    "no scales at all": (
        "block",
        drop(*(f"{module}.weight_scale" for module in MODULES)),
        ["missing: ", "and 11 more"],
    ),
    "no scale of inputs": ("static", drop(f"{DOWN}.input_scale"), [f"missing: {DOWN}.input_scale"]),
    "no shape before packing": (
        "packed",
        drop(f"{DOWN}.weight_shape"),
        [f"missing: {DOWN}.weight_shape"],
    ),
    "no numbers": (
        "packed",
        drop(f"{DOWN}.weight_packed"),
        ["scales without a matrix: ", f"{DOWN}.weight_scale"],
    ),
    "a scale of no module": (
        "channel",
        lambda t: t | {"model.layers.0.mlp.gate.weight_scale": torch.ones(4, 1)},
        ["scales without a matrix: model.layers.0.mlp.gate.weight_scale"],
    ),
    "a scale beside a float weight": (
        "channel",
        change("weight", Tensor.float),
        [f"scales beside a float weight: {DOWN}.weight"],
    ),
    "a scale in another layout": (
        "channel",
        change("weight_scale", Tensor.t),
        [f"{DOWN}.weight_scale is [1, 32], the config makes it [32, 1]"],
    ),
    "a scale too few": (
        "block",
        change("weight_scale", lambda x: x[:, :1]),
        ["is [1, 1], the con"],
    ),
    "a scale too many": (
        "static",
        change("weight_scale", lambda x: x.expand(1, 2)),
        ["is [1, 2], the config makes it [1, 1]"],
    ),
    "channels where the config says blocks": ("channel", config("block"), ["makes it [2, 1]"]),
    "blocks where the config says channels": ("block", config("channel"), ["makes it [64, 1]"]),
    "another block": (
        "block",
        config("block") | compressed(FP8 | {"strategy": "block", "block_structure": [16, 16]}),
        ["makes it [4, 2]"],
    ),
    "another group": (
        "packed",
        compressed(INT4 | {"group_size": 32}, None, "pack-quantized"),
        ["weight_scale is [64, 2], the config makes it [64, 1]"],
    ),
    "packed where the config says fp8": (
        "packed",
        config("channel"),
        ["int4 numbers where the config says fp8: model.layers.0.mlp.down_proj"],
    ),
    "fp8 where the config says packed": (
        "channel",
        config("packed"),
        ["fp8 numbers where the config says int4"],
    ),
    "static where the config says dynamic": (
        "static",
        compressed(FP8 | {"strategy": "tensor"}, TOKEN),
        ["scales that the config does not announce: ", "q_proj.input_scale"],
    ),
    "dynamic where the config says static": (
        "channel",
        compressed(FP8 | {"strategy": "channel"}, FP8 | {"strategy": "tensor", "dynamic": False}),
        ["missing: ", ".input_scale"],
    ),
    "names of another format": (
        "transformers",
        compressed(FP8 | {"strategy": "block", "block_structure": [32, 16]}),
        ["missing: ", "weight_scale, ", "does not announce: ", "weight_scale_inv"],
    ),
    "excluded and yet quantised": (
        "channel",
        config("channel", ignore=["lm_head", "re:.*down_proj"]),
        ["though the config excludes them: ", f"{DOWN} (by 're:.*down_proj')"],
    ),
    "named by no group": (
        "channel",
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "a": {
                    "targets": ["re:.*self_attn.*"],
                    "weights": FP8 | {"strategy": "channel"},
                    "input_activations": TOKEN,
                }
            },
        },
        ["though the config names no format for them: ", DOWN],
    ),
    "no config": ("channel", {}, ["is quantised: layers.0.mlp.down_proj", "names no quant"]),
    "numbers in e5m2": (
        "channel",
        change("weight", lambda x: x.float().to(torch.float8_e5m2)),
        [NOT_READ, f"{DOWN}.weight (F8_E5M2)"],
    ),
    "numbers in int8": (
        "channel",
        change("weight", lambda x: x.float().to(torch.int8)),
        [NOT_READ, f"{DOWN}.weight (I8)"],
    ),
    "packed in bytes": (
        "packed",
        change("weight_packed", lambda x: x.view(torch.uint8)),
        [NOT_READ, f"{DOWN}.weight_packed (U8)"],
    ),
    "scales in e8m0": (
        "channel",
        change("weight_scale", lambda x: x.to(torch.float8_e8m0fnu)),
        ["scales that are no float numbers: ", "(F8_E8M0)"],
    ),
    "packed off by one": (
        "packed",
        change("weight_packed", lambda x: x[:, 1:]),
        ["packed numbers of another shape", f"{DOWN} holds [32, 5], weight_shape is [32, 48]"],
    ),
    "rows off by one": (
        "packed",
        put(weight_shape=torch.tensor([31, 48])),
        ["holds [32, 6], weight_shape is [31, 48]"],
    ),
    "zero points": (
        "packed",
        put(weight_zero_point=torch.ones(4, 3, dtype=torch.int32)),
        ["zero points (asymmetric numbers), which are not computed", f"{DOWN}.weight_zero_point"],
    ),
    "reordered columns": (
        "packed",
        put(weight_g_idx=torch.arange(48)),
        ["columns in another order (actorder), which are not computed"],
    ),
    "a second scale": (
        "channel",
        put(weight_scale_2=torch.ones(1)),
        ["a second scale (NVFP4), which are not computed"],
    ),
    "a vector": ("channel", change("weight", lambda x: x[0]), ["that are no matrix: ", DOWN]),
    "an unknown method": ("channel", {"quant_method": "fbgemm_fp8"}, ["is 'fbgemm_fp8'; expected"]),
}


def break_folder(folder: Path, how: Change | dict[str, Any] | None) -> None:
    if isinstance(how, dict):
        edit_config(folder, quantization_config=how)
    elif how is not None:
        rewrite(folder, lambda t: {name: x.contiguous() for name, x in how(t).items()})


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_one_message(name: str, copied: Any) -> None:
    format_name, how, words = BROKEN[name]
    folder = copied(format_name)
    break_folder(folder, how)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert caught.value.exit_code == 3
    for part in (*words, str(folder)):
        assert part in str(caught.value)


def test_all_that_does_not_fit_is_in_the_message(copied: Any) -> None:
    folder = copied("channel")
    rewrite(folder, drop(f"{DOWN}.weight_scale", f"{Q_PROJ}.weight_scale"))
    rewrite(folder, lambda t: t | {"model.x.weight_scale": torch.ones(1)})
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    for part in (
        f"missing: {Q_PROJ}.weight_scale, {DOWN}.weight_scale",
        "scales without a matrix: model.x.weight_scale",
        "(float-quantized)",
    ):
        assert part in str(caught.value)


VALUES: dict[str, tuple[str, str, float]] = {
    "NaN": ("channel", "weight_scale", float("nan")),
    "infinity": ("block", "weight_scale", float("inf")),
    "zero": ("packed", "weight_scale", 0.0),
    "zero blocks": ("transformers", "weight_scale_inv", 0.0),
    "negative": ("static", "weight_scale", -0.5),
    "zero for inputs": ("static", "input_scale", 0.0),
    "NaN for inputs": ("static", "input_scale", float("nan")),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_scale_that_no_product_can_use_is_refused(name: str, copied: Any) -> None:
    """Catches NaN in all logits, and weights that are zero, in a run that says nothing."""
    format_name, part, value = VALUES[name]
    folder = copied(format_name)
    load(folder)

    def broken(scales: Tensor) -> Tensor:
        flat = scales.float().flatten()
        flat[0] = value
        return flat.view_as(scales)

    rewrite(folder, change(part, broken))
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert caught.value.exit_code == 3
    for words in (f"layers.1.mlp.down_proj.{part}", str(folder)):
        assert words in str(caught.value)

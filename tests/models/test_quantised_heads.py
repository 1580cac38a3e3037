"""Quantised EAGLE heads against their plain definition: Mistral's own files with a static fusion
layer, and FP8 heads of any format with scales of their own, beside a target in float."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from eagle_folders import (
    FakeTarget,
    authors_names,
    draw_eagle1,
    draw_eagle3,
    write_authors,
    write_consolidated,
    write_speculators,
)
from eagle_oracle import PlainEagle
from eagle_rows import check_chain, load
from quantised_folders import drawn_scheme, library_config, quantised_tensors
from quantised_reference import STATIC, dequantised, rounded
from safetensors.torch import load_file, save_file
from torch import Tensor

from hydraspec.models.checkpoint.mistral_names import consolidated_name
from hydraspec.models.checkpoint.quantization import Scheme

SEEDS = range(6)


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


def linears_of(plain: PlainEagle) -> tuple[str, ...]:
    return tuple(
        name.removesuffix(".weight")
        for name in plain.weights
        if name.endswith("_proj.weight") or name == "fc.weight"
    )


def quantise(
    file: Path, plain: PlainEagle, scheme: Scheme, name_in_file: Callable[[str], str], seed: int
) -> None:
    """Quantises the linear maps of a head's file, and gives its definition the same numbers."""
    modules = linears_of(plain)
    draw = random.Random(seed)
    scales = {module: draw.uniform(0.004, 0.03) for module in modules}
    change = partial(quantised_tensors, scheme=scheme, input_scales=scales)
    found = change(plain.weights, modules)
    in_file = {name_in_file(f"{module}.weight")[: -len(".weight")]: module for module in modules}
    tensors = change(
        load_file(file), tuple(in_file), input_scales={f: scales[m] for f, m in in_file.items()}
    )
    save_file({name: each.contiguous() for name, each in tensors.tensors.items()}, file)
    for module in modules:
        columns = plain.weights[f"{module}.weight"].shape[1]
        plain.weights[f"{module}.weight"] = dequantised(found, module, columns)

    def rounding(name: str, x: Tensor) -> Tensor:
        return rounded(x, scheme, found.of(name).get("input_scale"))

    plain.rounding = rounding


@pytest.mark.parametrize("seed", SEEDS)
def test_mistrals_static_head(tmp_path: Path, seed: int) -> None:
    """Its fusion layer `eagle_linear` is quantised as all others."""
    rng = np.random.default_rng([41, seed])
    target = FakeTarget(rng, hidden_size=16, vocab_size=40)
    plain = draw_eagle1(rng, target, is_mistral=True)
    plain.layer.pop("rope_scaling", None)
    folder = write_consolidated(tmp_path / "d", plain)
    file = folder / "consolidated.safetensors"
    quantise(file, plain, STATIC, lambda name: consolidated_name(f"model.{name}"), seed)
    own = {"weight_scale": "qscale_weight", "input_scale": "qscale_act"}
    tensors = load_file(file)
    for name in list(tensors):
        stem, _, suffix = name.rpartition(".")
        tensors[f"{stem}.{own.get(suffix, suffix)}"] = tensors.pop(name)
    save_file(tensors, file)
    params = json.loads((folder / "params.json").read_text())
    params["quantization"] = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
    (folder / "params.json").write_text(json.dumps(params))
    check_chain(rng, plain, load(folder, "eagle", target), target)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["fp8_dynamic", "fp8_static", "w4a16"])
def test_eagle3_heads_by_the_library(tmp_path: Path, name: str, seed: int) -> None:
    rng = np.random.default_rng([42, seed])
    target = FakeTarget(rng, hidden_size=16, vocab_size=40)
    plain = draw_eagle3(rng, target)
    is_authors = bool(seed % 2)
    folder = (write_authors if is_authors else write_speculators)(tmp_path / "d", plain)
    scheme = drawn_scheme(name, random.Random(seed))

    def name_in_file(module: str) -> str:
        return next(iter(authors_names({module: plain.weights[module]}))) if is_authors else module

    quantise(folder / "model.safetensors", plain, scheme, name_in_file, seed)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = library_config(scheme, ("lm_head",)).model_dump(mode="json")
    (folder / "config.json").write_text(json.dumps(config))
    check_chain(rng, plain, load(folder, "eagle3", target), target)

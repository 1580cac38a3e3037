"""Quantised folders: the scheme of each matrix, by config and tensors."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gemma4_oracle import load
from hydraspec_kernels.quantised import E4M3
from safetensors.torch import load_file, save_file
from tiny_targets import edit_config, rewrite
from torch import Tensor
from written_formats import DOWN, FORMATS, MODULES, Q_PROJ

from hydraspec.models.checkpoint.kv_scales import stored_kv_scales
from hydraspec.models.checkpoint.mistral_names import consolidated_name
from hydraspec.models.checkpoint.quantization import Scheme, decode, tensor_name
from hydraspec.models.checkpoint.quantized_tensors import describe, schemes_of
from hydraspec.models.checkpoint.reader import open_checkpoint
from hydraspec.models.checkpoint.tensors import KV_SCALE


def found(folder: Path) -> dict[str, Scheme]:
    return schemes_of(open_checkpoint(str(folder)))


@pytest.mark.parametrize("name", FORMATS)
def test_every_matrix_has_the_scheme_of_its_format(name: str, written: Path) -> None:
    scheme, _ = FORMATS[name]
    assert found(written / name) == dict.fromkeys(MODULES, scheme)
    assert open_checkpoint(str(written / name)).is_quantised
    plain = load_file(written / "float" / "model.safetensors")[f"{DOWN}.weight"]
    read = load_file(written / name / "model.safetensors")
    parts = {
        part: read[f"{DOWN}.{part}"] for part in scheme.shapes(*plain.shape) if "input" not in part
    }
    step = plain.abs().max() / (15 if scheme.kind == "int4" else 16)  # e4m3: 1/16 of a number
    assert (decode(parts, scheme, plain.shape[1]) - plain).abs().max() <= step


def test_scales_of_an_fp8_cache_are_read_beside_quantised_matrices(copied: Any) -> None:
    folder = copied("channel")
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    edit_config(folder, quantization_config=FORMATS["channel"][1] | {"kv_cache_scheme": scheme})
    target = load(folder)
    names = [
        f"model.layers.{i}.self_attn.{x}_scale" for i in range(target.num_layers) for x in "kv"
    ]
    numbers = {name: torch.tensor([0.25 * (1 + i)]) for i, name in enumerate(names)}
    rewrite(folder, lambda tensors: tensors | numbers)
    target = load(folder)
    read = stored_kv_scales(open_checkpoint(str(folder)), target)
    assert read.keys() == {i for spec in target.kv_groups(4) for i in spec.layers}
    for i, scales in read.items():
        assert scales[:, 0].tolist() == [0.25 * (1 + 2 * i), 0.25 * (2 + 2 * i)]
        assert scales.shape == (2, target.layers[i].attention.kv.count)


def test_a_float_folder_has_no_schemes_whatever_its_config_says(copied: Any) -> None:
    """A drafter that repeats its target's config is float; so is a matrix without a scale."""
    folder = copied("float")
    assert (found(folder), open_checkpoint(str(folder)).is_quantised) == ({}, False)
    for config in (FORMATS["channel"][1], {"quant_method": "modelopt", "quant_algo": "NVFP4"}):
        edit_config(folder, quantization_config=config)
        assert found(folder) == {}
        assert open_checkpoint(str(folder)).is_quantised
    load(folder)


def test_a_matrix_without_a_scale_is_float_whatever_the_config_says(
    written: Path, copied: Any
) -> None:
    plain = load_file(written / "float" / "model.safetensors")[f"{DOWN}.weight"]
    folder = copied("channel")

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        del tensors[f"{DOWN}.weight_scale"]
        return tensors | {f"{DOWN}.weight": plain}

    rewrite(folder, change)
    assert found(folder).keys() == MODULES.keys() - {DOWN}


def test_scalars_may_have_one_dimension_or_none(copied: Any) -> None:
    folder = copied("static")
    name = f"{DOWN}.weight_scale"
    rewrite(folder, lambda t: t | {name: t[name].reshape(1), f"{DOWN}.input_scale": torch.ones(1)})
    assert found(folder)[DOWN] == FORMATS["static"][0]


def test_mistrals_own_files(written: Path, tmp_path: Path) -> None:
    """Names are Hugging Face's, as those of `entries`."""
    scheme, tensors = FORMATS["static"][0], {}
    for name, tensor in load_file(written / "static" / "model.safetensors").items():
        if "_norm." not in name or "layernorm" in name:
            tensors[consolidated_name(name)] = tensor
    tensors["eagle_linear.weight"] = torch.zeros(32, 64).to(E4M3)
    tensors |= {f"eagle_linear.qscale_{of}": torch.ones(()) for of in ("act", "weight")}
    assert "layers.0.attention.wq.qscale_act" in tensors
    save_file(tensors, tmp_path / "consolidated.safetensors")
    params = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16}
    params["quantization"] = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
    (tmp_path / "params.json").write_text(json.dumps(params))
    assert found(tmp_path) == dict.fromkeys([*MODULES, "model.fc"], scheme)


def stack(scheme: Scheme, **sizes: tuple[int, int]) -> dict[str, Tensor]:
    """Experts of transformers' FP8 layer: numbers and scales of all experts in one tensor each."""
    found = {}
    for projection, (rows, columns) in sizes.items():
        module = f"model.layers.0.mlp.experts.{projection}"
        for part, shape in scheme.shapes(rows, columns, 3).items():
            full = tensor_name(module, part, stacked=True)
            found[full] = torch.ones(shape).to(E4M3 if full == module else torch.float32)
    return found


def test_stacks_of_experts(copied: Any) -> None:
    """The scales of gate and up are apart even where one block would hold both."""
    folder, scheme = copied("transformers"), replace(FORMATS["transformers"][0], stacked=True)
    rewrite(folder, lambda t: t | stack(scheme, gate_up_proj=(64, 32), down_proj=(32, 32)))
    experts = "model.layers.0.mlp.experts"
    assert found(folder)[f"{experts}.down_proj"] == scheme
    assert found(folder)[f"{experts}.gate_up_proj"] == scheme
    assert scheme.name(f"{experts}.down_proj", scheme.data) == f"{experts}.down_proj"
    assert scheme.name(f"{experts}.down_proj", scheme.scale) == f"{experts}.down_proj_scale_inv"

    edit_config(
        folder, quantization_config=FORMATS["transformers"][1] | {"weight_block_size": [64, 16]}
    )
    narrow = replace(scheme, rows=16)
    rewrite(folder, lambda t: stack(narrow, gate_up_proj=(32, 32)))
    assert found(folder) == {f"{experts}.gate_up_proj": narrow}


def test_scales_of_the_cache_are_no_matrix(copied: Any) -> None:
    folder = copied("channel")
    names = [f"model.layers.0.self_attn.{name}" for name in ("k_scale", "v_proj.output_scale")]
    rewrite(folder, lambda t: t | {name: torch.ones(1) for name in names})
    assert found(folder).keys() == MODULES.keys()
    load(folder)  # which would refuse a tensor that nothing reads
    assert all(KV_SCALE.search(name) for name in names)
    assert KV_SCALE.search(f"{Q_PROJ}.input_scale") is None


def test_kinds_of_matrices_in_few_words() -> None:
    schemes = {name: scheme for name, (scheme, _) in FORMATS.items()}
    experts = {f"model.layers.0.mlp.experts.{i}.up_proj": schemes["packed"] for i in range(2)}
    rest = {Q_PROJ: schemes["channel"], "model.layers.1.self_attn.q_proj": schemes["block"]}
    assert describe(experts | rest | {DOWN: schemes["static"]}) == {
        "down_proj": "fp8 per tensor, inputs static",
        "experts": "int4 group 16",
        "q_proj": "fp8 32x32, inputs per 32; fp8 per channel, inputs per token",
    }
    assert describe({}) is None

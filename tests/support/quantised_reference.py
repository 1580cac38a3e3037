"""The arithmetic of quantised checkpoints in plain torch, around transformers' float models; and
the layouts that compressed-tensors does not read: DeepSeek's blocks, experts one by one, Mistral's.

Written from the published definitions, without our kernels or our reading of files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from quantised_folders import Quantised, in_double, quantised_tensors, write
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from hydraspec.models.checkpoint.mistral_names import consolidated_name, interleaved
from hydraspec.models.checkpoint.quantization import Scheme

E4M3_MAX = 448.0
STATIC = Scheme(kind="fp8", rows=None, columns=None, inputs="static", input_scale="input_scale")
_EXPERT = re.compile(r"(.*[.]experts)[.](\d+)[.](gate|up|down)_proj")
Rounding = Callable[[Tensor], Tensor]


def rounded(x: Tensor, scheme: Scheme, static: Tensor | None = None) -> Tensor:
    """Rows x [..., K] as the product sees them: e4m3 numbers times their scale."""
    if scheme.inputs == "float":
        return x
    if scheme.inputs == "static":
        assert static is not None
        return _to_e4m3(x, static.to(x.dtype))
    if scheme.inputs == "token":
        return _to_e4m3(x, (_largest(x) / E4M3_MAX).clamp(min=1 / (E4M3_MAX * 512)))
    assert scheme.group is not None
    groups = x.split(scheme.group, -1)
    return torch.cat([_to_e4m3(g, _largest(g).clamp(min=1e-10) / E4M3_MAX) for g in groups], -1)


def _largest(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True)


def _to_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    number = (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return number.to(x.dtype) * scale


def dequantised(quantised: Quantised, module: str, columns: int) -> Tensor:
    """A module's matrix [N, K] in float64."""
    scheme, own = quantised.scheme, quantised.of(module)
    if scheme.kind == "int4":
        packed = own["weight_packed"]
        numbers = unpack_from_int32(packed, 4, torch.Size((packed.shape[0], columns))).double()
    else:
        numbers = own["weight"].double()
    rows, inputs = scheme.rows or numbers.shape[0], scheme.columns or columns
    scales = own[scheme.scale].double().reshape(-(-numbers.shape[0] // rows), -1)
    found = torch.empty_like(numbers)
    for i, j in ((i, j) for i in range(scales.shape[0]) for j in range(scales.shape[1])):
        block = slice(i * rows, (i + 1) * rows), slice(j * inputs, (j + 1) * inputs)
        found[block] = numbers[block] * scales[i, j]
    return found


def plain_reference(
    model: PreTrainedModel, quantised: Quantised, *, float_rows: tuple[str, ...] = ()
) -> PreTrainedModel:
    """A float model with the dequantised weights of `quantised`, in float64, whose quantised maps
    round their inputs, but for those whose names end with float_rows."""
    found = in_double(deepcopy(model))
    for module in quantised.modules:
        match = _EXPERT.fullmatch(module)
        if match is not None:
            experts = found.get_submodule(match[1])
            _fill_expert(experts, int(match[2]), match[3], quantised, module)
            rounding = partial(rounded, scheme=quantised.scheme)
            experts.forward = partial(expert_sums, experts, rounding)
            continue
        linear = found.get_submodule(module)
        linear.weight.data = dequantised(quantised, module, linear.in_features)
        if not module.endswith(float_rows):
            static = quantised.of(module).get(quantised.scheme.input_scale or "")
            rounding = partial(rounded, scheme=quantised.scheme, static=static)
            linear.register_forward_pre_hook(lambda _, x, to_e4m3=rounding: (to_e4m3(x[0]),))
    return found


def _fill_expert(experts: Any, i: int, part: str, quantised: Quantised, module: str) -> None:
    """Writes a dequantised matrix into its place of the stacked ones."""
    inner, size = experts.down_proj.shape[2], experts.down_proj.shape[1]
    stacked, first = (experts.gate_up_proj, inner if part == "up" else 0)
    if part == "down":
        experts.down_proj.data[i] = dequantised(quantised, module, inner)
    else:
        stacked.data[i, first : first + inner] = dequantised(quantised, module, size)


def expert_sums(
    experts: Any, rounding: Rounding, x: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """Weighted sums [T, D] of the chosen experts for x [T, D], a token and an expert at a time;
    an expert's inputs and its inner activations are rounded."""
    found = torch.zeros_like(x)
    for t in range(x.shape[0]):
        row = rounding(x[t : t + 1])
        for i, weight in zip(chosen[t].tolist(), weights[t], strict=True):
            gate, up = F.linear(row, experts.gate_up_proj[i]).chunk(2, -1)
            inner = rounding(experts.act_fn(gate) * up)
            found[t] += weight * F.linear(inner, experts.down_proj[i])[0]
    return found


def to_transformers_fp8(
    folder: Path,
    block: tuple[int, int] | None,
    input_scales: dict[str, float] | None = None,
) -> Quantised:
    """Rewrites a saved model in transformers' own FP8, as Qwen3 and DeepSeek-V3 are released: every
    projection in blocks, or with one scale; inputs are rounded per block's width, per token or
    statically."""
    rows, columns = block or (None, None)
    inputs: Any = "static" if input_scales else "group" if block else "token"
    scheme = Scheme(
        kind="fp8",
        rows=rows,
        columns=columns,
        inputs=inputs,
        group=columns if inputs == "group" else None,
        scale="weight_scale_inv",
        input_scale="activation_scale" if input_scales else None,
    )
    found = _quantised(folder, scheme, input_scales)
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": block and list(block)}
    scheme_of_inputs = "static" if input_scales else "dynamic"
    write(folder, found.tensors, config | {"activation_scheme": scheme_of_inputs})
    return found


def write_expert_channels(folder: Path, model: PreTrainedModel) -> Quantised:
    """A Gemma 4 with experts as its FP8_DYNAMIC releases have them: one by one, scales in bf16."""
    scheme = Scheme(kind="fp8", rows=1, columns=None, inputs="token")
    model.save_pretrained(folder)
    tensors = _one_by_one(load_file(folder / "model.safetensors"))
    modules = tuple(
        name.removesuffix(".weight")
        for name in tensors
        if name.endswith("_proj.weight") and "per_layer" not in name
    )
    found = quantised_tensors(tensors, modules, scheme, scale_dtype=torch.bfloat16)
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    inputs = weights | {"strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights | {"dynamic": False}}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    config |= {"quantization_status": "compressed"}
    config |= {"ignore": ["lm_head", "re:.*embed.*", "re:.*router.*", "re:.*per_layer.*"]}
    groups = {"group_0": group | {"input_activations": inputs, "output_activations": None}}
    write(folder, found.tensors, config | {"config_groups": groups})
    return found


def write_mistral(
    folder: Path, model: PreTrainedModel, input_scales: dict[str, float], yarn: dict[str, Any]
) -> Quantised:
    """A Mistral in its own format: params.json and consolidated.safetensors, static per tensor."""
    model.save_pretrained(folder)
    found = _quantised(folder, STATIC, input_scales)
    for file in ("config.json", "model.safetensors"):
        (folder / file).unlink()
    config = model.config
    own = {}
    for name, tensor in found.tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = interleaved(tensor, len(tensor) // config.head_dim)
        own[consolidated_name(name)] = tensor.contiguous()
    save_file(own, folder / "consolidated.safetensors")
    params = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "hidden_dim": config.intermediate_size,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "max_position_embeddings": config.max_position_embeddings,
        "tied_embeddings": config.tie_word_embeddings,
        "sliding_window": config.sliding_window,
        "yarn": yarn,
        "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"},
    }
    (folder / "params.json").write_text(json.dumps(params))
    return found


def _quantised(
    folder: Path, scheme: Scheme, input_scales: dict[str, float] | None = None
) -> Quantised:
    """The tensors of a saved folder with its layers' projections quantised."""
    tensors = load_file(folder / "model.safetensors")
    names = (re.fullmatch(r"(.*(?<!eh)_(proj|mqa))[.]weight", name) for name in tensors)
    modules = tuple(match[1] for match in names if match is not None)
    return quantised_tensors(tensors, modules, scheme, input_scales=input_scales)


def _one_by_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stacked experts under a name for each matrix of each."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, packed, part = name.rpartition("experts.")
        if not packed or part not in ("gate_up_proj", "down_proj"):
            found[name] = tensor
            continue
        for i, expert in enumerate(tensor):
            halves = {"down": expert}
            if part == "gate_up_proj":
                halves = dict(zip(("gate", "up"), expert.chunk(2), strict=True))
            for half, matrix in halves.items():
                found[f"{stem}experts.{i}.{half}_proj.weight"] = matrix.contiguous()
    return found

"""Checkpoints with quantised linear maps, written as releases are, and transformers with
compressed-tensors on the same folder as an oracle.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    preset_name_to_scheme,
)
from compressed_tensors.utils import match_named_modules
from dense_oracle import random_config
from gemma4_oracle import random_text_config
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from hydraspec.models.checkpoint.quantization import Scheme, encode

FORMATS = ("fp8_dynamic", "fp8_block", "fp8_static", "w4a16")
# Modules that a drawn config leaves in float beside the output projection, as recipes do.
IGNORED = (
    (),
    ("re:.*layers[.]0[.].*",),
    ("re:.*o_proj",),
    ("re:.*[.]mlp[.].*", "re:.*per_layer.*"),
)


@dataclass(frozen=True)
class Quantised:
    """Quantised modules of a file, all in one scheme."""

    scheme: Scheme
    modules: tuple[str, ...]
    tensors: Mapping[str, Tensor]  # all of the file, by Hugging Face's names

    def of(self, module: str) -> dict[str, Tensor]:
        """A module's tensors by their names after its own."""
        return {
            name.removeprefix(f"{module}."): tensor
            for name, tensor in self.tensors.items()
            if name.rpartition(".")[0] == module
        }


def drawn_scheme(name: str, draw: random.Random) -> Scheme:
    """A scheme of a format, with small and released blocks and groups."""
    if name == "fp8_dynamic":
        return Scheme(kind="fp8", rows=1, columns=None, inputs="token")
    if name == "fp8_static":
        inputs = "input_scale"
        return Scheme(kind="fp8", rows=None, columns=None, inputs="static", input_scale=inputs)
    group = draw.choice([16, 32, 128] if name == "fp8_block" else [32, 128])
    if name == "fp8_block":
        rows = draw.choice([group, 24])
        return Scheme(kind="fp8", rows=rows, columns=group, inputs="group", group=group)
    return Scheme(kind="int4", rows=1, columns=group, inputs="float")


def random_shape(family: str, seed: int, unit: int) -> dict[str, Any]:
    """A random dense config of a family in which every linear map's inputs are a multiple of
    `unit`, as groups of the oracle need it; any for 1."""
    config = random_text_config(seed) if family == "gemma4" else random_config(family, seed)
    for key in ("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"):
        config.pop(key, None)
    if unit == 1:
        return config
    draw = random.Random(f"{family} {seed} {unit}")
    config["num_attention_heads"] = heads = draw.choice([2, 4] if unit < 128 else [4, 8])
    config["num_key_value_heads"] = draw.choice([1, 2])
    config["hidden_size"] = unit * draw.choice([1, 2, 3] if unit < 128 else [1, 2])
    config["intermediate_size"] = unit * draw.choice([1, 2, 3])
    config["head_dim"] = max(16, unit // heads)
    if family == "gemma4":
        config["global_head_dim"] = 2 * config["head_dim"]
        config["num_global_key_value_heads"] = draw.choice([None, 1])
        if config["hidden_size_per_layer_input"]:
            config["hidden_size_per_layer_input"] = unit
    return config


def quantise(
    folder: Path,
    model: PreTrainedModel,
    scheme: Scheme,
    *,
    ignore: tuple[str, ...] = (),
    scale_dtype: torch.dtype = torch.float32,
    input_scales: Mapping[str, float] | None = None,
) -> Quantised:
    """Saves `model` as compressed-tensors does, its linear maps quantised but for the output
    projection and what `ignore` names; a static scheme needs input_scales.
    """
    model.save_pretrained(folder)
    config = library_config(scheme, ("lm_head", *ignore))
    names = match_named_modules(model, ["Linear"], config.ignore)
    found = quantised_tensors(
        load_file(folder / "model.safetensors"),
        tuple(name for name, _ in names),
        scheme,
        scale_dtype=scale_dtype,
        input_scales=input_scales,
    )
    write(folder, found.tensors, config.model_dump(mode="json"))
    return found


def quantised_tensors(
    tensors: Mapping[str, Tensor],
    modules: tuple[str, ...],
    scheme: Scheme,
    *,
    scale_dtype: torch.dtype = torch.float32,
    input_scales: Mapping[str, float] | None = None,
) -> Quantised:
    """Tensors of a file with the weights of `modules` in a scheme."""
    found = dict(tensors)
    for module in modules:
        own = encode(found.pop(f"{module}.weight"), scheme, scale_dtype=scale_dtype)
        if scheme.input_scale is not None:
            assert input_scales is not None
            own[scheme.input_scale] = torch.tensor([input_scales[module]], dtype=scale_dtype)
        found |= {f"{module}.{name}": tensor for name, tensor in own.items()}
    return Quantised(scheme, modules, found)


def write(folder: Path, tensors: Mapping[str, Tensor], quantization_config: dict[str, Any]) -> None:
    """Replaces the tensors of a saved folder and names their quantisation in config.json."""
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    raw = json.loads(file.read_text()) | {"quantization_config": quantization_config}
    file.write_text(json.dumps(raw))


def library_config(scheme: Scheme, ignore: tuple[str, ...]) -> QuantizationConfig:
    """The library's record of a scheme, from its preset."""
    preset = {"token": "FP8_DYNAMIC", "group": "FP8_BLOCK", "static": "FP8", "float": "W4A16"}
    group = preset_name_to_scheme(preset[scheme.inputs], ["Linear"])
    if scheme.inputs == "group":
        group.weights.block_structure = [scheme.rows, scheme.columns]
        group.input_activations.group_size = scheme.group
    elif scheme.kind == "int4":
        group.weights.group_size = scheme.columns
    return QuantizationConfig(
        config_groups={"group_0": group},
        format="pack-quantized" if scheme.kind == "int4" else "float-quantized",
        ignore=list(ignore),
        quantization_status=QuantizationStatus.COMPRESSED,
    )


def calibrated(model: PreTrainedModel, prompts: list[list[int]]) -> dict[str, float]:
    """A static scale for the input of every linear map: 0.8 of what the prompts need, so that
    some numbers are clamped."""
    largest: dict[str, float] = {}

    def seen(name: str) -> Callable[[nn.Module, tuple[Tensor]], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor]) -> None:
            largest[name] = max(largest.get(name, 0.0), float(inputs[0].abs().max()))

        return hook

    linears = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    hooks = [each.register_forward_pre_hook(seen(name)) for name, each in linears]
    with torch.no_grad():
        for prompt in prompts:
            model(torch.tensor([prompt]), output_hidden_states=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    return {name: 0.8 * top / 448 for name, top in largest.items()}


def library_oracle(folder: Path, kind: type[PreTrainedModel]) -> PreTrainedModel:
    """The folder through transformers and compressed-tensors, in float64."""
    return in_double(kind.from_pretrained(folder, dtype=torch.float32).eval())


def in_double(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its parameters and buffers in float64, among them the factor of Gemma's
    embeddings, which transformers rounds to float32."""
    model = model.double()
    for module in model.modules():
        if hasattr(module, "scalar_embed_scale"):
            module.embed_scale.fill_(module.scalar_embed_scale)
    return model


@contextmanager
def in_double_throughout() -> Iterator[None]:
    """Lets transformers' code, which takes norms, RoPE and softmax in float32, take them in
    float64: rounding to e4m3 shows any noise as a step."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(Tensor, "float", Tensor.double),
    ):
        yield


def oracle_logits(model: PreTrainedModel, prompt: list[int]) -> Tensor:
    """Logits [len, V] of an uncached forward in float64."""
    with torch.no_grad(), in_double_throughout():
        return model(torch.tensor([prompt]), output_hidden_states=True, use_cache=False).logits[0]


def shaken_logits(
    model: PreTrainedModel, modules: Iterable[str], prompt: list[int], size: float, seed: int
) -> Tensor:
    """Logits of `oracle_logits` with noise on the inputs of `modules`: `size` times a number's own
    magnitude and its row's, which what is left of larger numbers inherits."""
    draw = torch.Generator().manual_seed(seed)

    def shake(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        x = inputs[0]
        noise = torch.randn(x.shape, generator=draw, dtype=x.dtype)
        return (x + size * noise * (x.abs() + x.pow(2).mean(-1, keepdim=True).sqrt()),)

    hooks = [model.get_submodule(name).register_forward_pre_hook(shake) for name in modules]
    logits = oracle_logits(model, prompt)
    for hook in hooks:
        hook.remove()
    return logits

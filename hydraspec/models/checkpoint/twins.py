"""Quantised twins of the zoo's checkpoints, in the formats of quantised releases.

A twin is a function of a float checkpoint that ships: it is written into the user's cache on first
use, and never a second time. The module knows formats and names, and nothing about any
architecture.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hydraspec.errors import CheckpointError
from hydraspec.models.checkpoint import mistral_names, quantization
from hydraspec.models.checkpoint.quantization import Scheme, encode
from hydraspec.shipped import ZOO, ZOO_PREFIX

INPUT_SCALES = ZOO.parent / "data" / "input_scales.json"  # checkpoint -> module -> scale
CACHE = "XDG_CACHE_HOME"  # environment: the folder of the user's caches
_PARAMS = {  # keys of Mistral's params.json -> Hugging Face's
    "dim": "hidden_size",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "vocab_size": "vocab_size",
}


@dataclass(slots=True, frozen=True, kw_only=True)
class Format:
    """How a release stores a model: the scheme of its matrices, and what its config says of it."""

    scheme: Scheme
    config: Mapping[str, Any]  # quantization_config, or Mistral's `quantization`
    # Modules whose matrices stay in float: embeddings and output layers, routers, and the layer
    # that joins the inputs of DeepSeek's MTP layers, which releases leave in bfloat16.
    floats: str = r"embed|lm_head|head\.head|router|mlp\.gate$|eh_proj"
    scale_dtype: torch.dtype = torch.bfloat16
    is_native: bool = False  # Mistral's params.json and consolidated.safetensors


def _compressed(layout: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> Any:
    """The quantization_config of compressed-tensors, with llm-compressor's ignore list."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    return {
        "config_groups": {
            "group_0": group | {"input_activations": inputs, "output_activations": None}
        },
        "format": layout,
        "ignore": ["lm_head", "re:.*embed.*", "re:.*router", "re:.*vision_tower.*"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
FP8_DYNAMIC = Format(
    scheme=Scheme(kind="fp8", rows=1, columns=None, inputs="token"),
    config=_compressed(
        "float-quantized",
        {**_FP8, "strategy": "channel"},
        {**_FP8, "strategy": "token", "dynamic": True},
    ),
)
FP8_BLOCK = Format(
    scheme=Scheme(kind="fp8", rows=128, columns=128, inputs="group", group=128),
    config=_compressed(
        "float-quantized",
        {**_FP8, "strategy": "block", "block_structure": [128, 128]},
        {**_FP8, "strategy": "group", "group_size": 128, "dynamic": True},
    ),
)
MISTRAL = Format(
    scheme=Scheme(kind="fp8", rows=None, columns=None, inputs="static", input_scale="input_scale"),
    config={"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"},
    is_native=True,
)


def w4a16(group: int) -> Format:
    """Four-bit integers of which `group` inputs share a scale; inputs stay in float."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
    return Format(
        scheme=Scheme(kind="int4", rows=1, columns=group, inputs="float"),
        config=_compressed("pack-quantized", weights, None),
    )


def fp8_blocks(rows: int, columns: int) -> Format:
    """The fp8 of transformers, DeepSeek and Qwen: a scale for each block."""
    return Format(
        scheme=Scheme(
            kind="fp8",
            rows=rows,
            columns=columns,
            inputs="group",
            group=columns,
            scale="weight_scale_inv",
        ),
        config={
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [rows, columns],
        },
        scale_dtype=torch.float32,
    )


@dataclass(slots=True, frozen=True)
class Twin:
    """A checkpoint of the zoo in a quantised format."""

    of: str
    format: Format = field(repr=False)


# Groups and blocks are narrower than in releases, so that two tensor-parallel ranks cut none.
TWINS = {
    "tiny_gemma4_fp8": Twin("tiny_gemma4", FP8_DYNAMIC),
    "tiny_gemma4_fp8-eagle3": Twin("tiny_gemma4-eagle3", FP8_DYNAMIC),
    "tiny_gemma4_fp8_block": Twin("tiny_gemma4", FP8_BLOCK),  # 128 divides neither 160 nor 480
    "tiny_gemma4_w4a16": Twin("tiny_gemma4", w4a16(16)),
    "tiny_gemma4_moe_fp8": Twin("tiny_gemma4_moe", FP8_DYNAMIC),
    "tiny_qwen3_fp8": Twin("tiny_qwen3", fp8_blocks(32, 32)),  # 32 does not divide 80
    "tiny_deepseek_fp8": Twin("tiny_deepseek", fp8_blocks(32, 4)),
    "tiny_mistral_fp8": Twin("tiny_mistral", MISTRAL),
    "tiny_mistral_fp8-eagle": Twin("tiny_mistral-eagle", MISTRAL),
}


def twin_folder(name: str) -> Path:
    """The folder of a twin, written if the cache has none of this version.

    Raises CheckpointError where the cache cannot be written.
    """
    root = Path(os.environ.get(CACHE) or "~/.cache").expanduser() / "hydraspec" / "zoo"
    folder = root / f"{name}-{_version(name)}"
    try:
        if not folder.is_dir():
            root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=root) as held:
                written = Path(held) / name
                write_twin(name, written)
                _place(written, folder)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint '{ZOO_PREFIX}{name}' is made from {ZOO_PREFIX}{TWINS[name].of} in "
            f"{str(root)!r}, which cannot be written: {error.strerror or error}; expected a folder "
            f"that this user may write: set {CACHE} to one"
        ) from None
    return folder


def _place(written: Path, folder: Path) -> None:
    """Give a finished folder its name, unless another process was faster."""
    try:
        written.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


@cache
def _version(name: str) -> str:
    """Digest of what a twin is made of: the float checkpoint, input scales and this code."""
    source = ZOO / TWINS[name].of
    code = [Path(module).resolve() for module in (__file__, str(quantization.__file__))]
    digest = hashlib.sha256()
    for file in [*sorted(source.iterdir()), INPUT_SCALES, *code]:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def write_twin(name: str, folder: Path) -> None:
    """Write a twin's files into a new folder: the tensors, the config that names their format, and
    the float checkpoint's other files without its card."""
    source, form = ZOO / TWINS[name].of, TWINS[name].format
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.name not in ("README.md", "config.json"):
            shutil.copy(file, folder)
    scales = json.loads(INPUT_SCALES.read_text(encoding="utf-8")).get(TWINS[name].of, {})
    found: dict[str, Tensor] = {}
    left: list[str] = []
    for tensor_name, tensor in _float_tensors(source, form).items():
        module, _, kind = tensor_name.rpartition(".")
        is_matrix = kind == "weight" and tensor.dim() == 2
        if not is_matrix or re.search(form.floats, module):
            found[tensor_name] = tensor
            left += [module] if is_matrix else []
        else:
            parts = _encoded(tensor, form, scales.get(module))
            found |= {f"{module}.{part}": value for part, value in parts.items()}
    config_file, key, tensor_file = "config.json", "quantization_config", "model.safetensors"
    if form.is_native:
        config_file, key, tensor_file = "params.json", "quantization", "consolidated.safetensors"
        found = {mistral_names.consolidated_name(n): tensor for n, tensor in found.items()}
    settings = dict(form.config)
    if settings.get("quant_method") == "fp8":
        settings["modules_to_not_convert"] = sorted(left)
    config = _config(source, form) | {key: settings}
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / config_file).write_text(text, encoding="utf-8")
    save_file({n: tensor.contiguous() for n, tensor in found.items()}, folder / tensor_file)


def _float_tensors(source: Path, form: Format) -> dict[str, Tensor]:
    """The tensors of a float checkpoint by their Hugging Face names, a matrix for each expert; in
    Mistral's format with its order of rows."""
    found: dict[str, Tensor] = {}
    read = {name: t for file in source.glob("*.safetensors") for name, t in load_file(file).items()}
    if (source / "params.json").is_file():
        return {mistral_names.hugging_face_name(name): tensor for name, tensor in read.items()}
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for name, tensor in read.items():
        stem, packed, projection = name.rpartition("experts.")
        if packed and projection in ("gate_up_proj", "down_proj"):
            for i, expert in enumerate(tensor):
                parts = [("down_proj", expert)]
                if projection == "gate_up_proj":
                    parts = list(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
                found |= {f"{stem}experts.{i}.{part}.weight": matrix for part, matrix in parts}
            continue
        native = mistral_names.consolidated_name(name)
        heads = mistral_names.rotary_heads(native, config) if form.is_native else None
        found[name] = tensor if heads is None else mistral_names.interleaved(tensor, heads)
    return found


def _encoded(weight: Tensor, form: Format, input_scale: float | None) -> dict[str, Tensor]:
    """A module's tensors by their names after its own; single scales are scalars."""
    scheme = form.scheme
    parts = encode(weight, scheme, scale_dtype=form.scale_dtype)
    if scheme.rows is None and scheme.columns is None:
        parts[scheme.scale] = parts[scheme.scale].reshape(())
    if scheme.input_scale is not None:
        assert input_scale is not None, "calibrate: `python -m hydraspec.zoo.recipe.make calibrate`"
        parts[scheme.input_scale] = torch.tensor(input_scale, dtype=form.scale_dtype)
    return parts


def _config(source: Path, form: Format) -> dict[str, Any]:
    """The float checkpoint's config, in the format's keys."""
    native = source / "params.json"
    file = native if native.is_file() else source / "config.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if not form.is_native or native.is_file():
        return config
    found = {theirs: config[ours] for theirs, ours in _PARAMS.items()}
    return found | {"tied_embeddings": False}

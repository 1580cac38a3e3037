"""Mistral's own checkpoint format (params.json, consolidated.safetensors) in Hugging Face's terms.

Keys and tensor names differ, and rows of wq and wk are ordered for interleaved RoPE (pairs 2i and
2i + 1), where Hugging Face's are ordered for half-split RoPE (pairs i and i + H/2).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from hydraspec.errors import CheckpointError
from hydraspec.models.checkpoint.config_reader import shown

_PARTS = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "eagle_linear": "model.fc",  # EAGLE-1 heads
}
_SUFFIXES = {"qscale_act": "input_scale", "qscale_weight": "weight_scale"}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.([^.]+)")
_ROTARY = {"attention.wq": "num_attention_heads", "attention.wk": "num_key_value_heads"}
_ROTARY_SUFFIXES = ("weight", "bias", "qscale_weight")

_SAME_MEANING = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "sliding_window": "sliding_window",
}
_YARN = {"factor": "factor", "alpha": "beta_slow", "beta": "beta_fast"}
_YARN |= {"original_max_position_embeddings": "original_max_position_embeddings"}
_YARN |= {"apply_scale": "attention_factor"}
_GROWTH = {"beta": "llama_4_scaling_beta"}  # of queries with their positions
_GROWTH |= {"original_max_position_embeddings": "original_max_position_embeddings"}
_UNSUPPORTED = ("moe", "q_lora_rank", "kv_lora_rank")
_NO_ROPE_SCALING: tuple[dict[str, str], ...] = ({}, {"rope_type": "default"}, {"type": "default"})
EOS = 2  # </s> of every Mistral tokenizer; params.json does not say


def config_of_params(params: Mapping[str, Any], where: str) -> dict[str, Any]:
    """params.json as a Hugging Face config of model_type mistral, or of ministral3, which scales
    queries. Raises CheckpointError.
    """
    for key in _UNSUPPORTED:
        if params.get(key) is not None:
            raise CheckpointError(
                f"params.json of {where!r}: {key} is {params[key]!r}; expected a dense Mistral "
                "model without it: give the Hugging Face files of this release if it has them"
            )
    _refuse_uncomputed(params, where)
    config = {ours: params[key] for key, ours in _SAME_MEANING.items() if key in params}
    window = config.setdefault("sliding_window", None)
    theta = params.get("rope_theta") or (1e6 if window is None else 1e4)  # as mistral-inference
    length = params.get("max_position_embeddings") or params.get("max_seq_len") or 128_000
    config |= {
        "model_type": "ministral3" if params.get("llama_4_scaling") else "mistral",
        "rope_theta": theta,
        "max_position_embeddings": length,
        "tie_word_embeddings": bool(params.get("tied_embeddings", False)),
        "eos_token_id": EOS,
    }
    yarn = _renamed(params, "yarn", _YARN, where)
    growth = _renamed(params, "llama_4_scaling", _GROWTH, where)
    if not yarn.pop("attention_factor", True):
        yarn["attention_factor"] = 1.0
    for key in yarn.keys() & growth.keys():
        if yarn[key] != growth[key]:
            raise CheckpointError(
                f"params.json of {where!r}: llama_4_scaling.{key} is {shown(growth[key])}, and "
                f"yarn.{key} {shown(yarn[key])}; expected the same in both: mend the config"
            )
    if yarn or growth:
        config["rope_scaling"] = {"rope_type": "yarn" if yarn else "default"} | yarn | growth
    if params.get("quantization"):
        config["quantization_config"] = _quantization(params["quantization"], where)
    return config


def _renamed(
    params: Mapping[str, Any], key: str, names: Mapping[str, str], where: str
) -> dict[str, Any]:
    """The object under a key by Hugging Face's names, {} if there is none. Raises CheckpointError
    for keys that are not in `names`.
    """
    values = params.get(key) or {}
    if not isinstance(values, Mapping) or values.keys() - names.keys():
        raise CheckpointError(
            f"params.json of {where!r}: {key} is {shown(values)}; expected an object with "
            f"{', '.join(names)}: mend the config, or give the Hugging Face files of this release"
        )
    return {names[name]: value for name, value in values.items()}


def _quantization(values: object, where: str) -> dict[str, Any]:
    """Mistral's FP8, a scale per tensor for weights and for inputs, as compressed-tensors says it.
    Which matrices are quantised is not said: their scales tell. Raises CheckpointError.
    """
    if not isinstance(values, Mapping):
        values = {"qformat_weight": values}
    for key, allowed in (
        ("qformat_weight", ("fp8_e4m3",)),
        ("qscheme_act", ("TENSOR", "NO_SCALES", None)),  # the inputs' scale: stored, or computed
    ):
        if values.get(key) not in allowed:
            raise CheckpointError(
                f"params.json of {where!r}: quantization.{key} is {shown(values.get(key))}; "
                f"expected {' or '.join(each for each in allowed if each)}: give the Hugging Face "
                "files of this release if it has them, or a release in bfloat16"
            )
    numbers = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    is_dynamic = values.get("qscheme_act") == "NO_SCALES"
    group = {"targets": ["Linear"], "weights": numbers}
    group["input_activations"] = numbers | {"dynamic": is_dynamic}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
    }


def _refuse_uncomputed(params: Mapping[str, Any], where: str) -> None:
    """Raises CheckpointError for values that would change the computation of a Mistral model."""
    width = params.get("head_dim")
    if width is None and params.get("dim") and params.get("n_heads"):
        width = params["dim"] // params["n_heads"]
    scale, plain = params.get("softmax_scale"), None if width is None else width**-0.5
    is_plain = isinstance(scale, int | float) and plain and abs(scale - plain) < 1e-6 * plain
    for key, is_computed, expected in (
        ("rope_scaling", params.get("rope_scaling") in _NO_ROPE_SCALING, "none, or yarn"),
        ("softmax_scale", is_plain, f"none, or head_dim**-0.5 ({plain})"),
        ("use_biases", params.get("use_biases") is False, "none, or false"),
        ("logit_scale", params.get("logit_scale") == 1, "none, or 1"),
    ):
        if params.get(key) is not None and not is_computed:
            raise CheckpointError(
                f"params.json of {where!r}: {key} is {params[key]!r}; expected {expected}, since "
                "no more is computed: give the Hugging Face files of this release if it has them"
            )


def is_consolidated(names: Iterable[str]) -> bool:
    """Returns whether tensors have Mistral's own names."""
    found = (_LAYER.fullmatch(name) for name in names)
    return any(match is not None and match[2] in _PARTS for match in found)


def hugging_face_name(name: str) -> str:
    """A consolidated tensor's Hugging Face name; names that are not Mistral's are unchanged."""
    match = _LAYER.fullmatch(name)
    if match is not None and match[2] in _PARTS:
        suffix = _SUFFIXES.get(match[3], match[3])
        return f"model.layers.{match[1]}.{_PARTS[match[2]]}.{suffix}"
    stem, _, suffix = name.rpartition(".")
    return f"{_TOP[stem]}.{_SUFFIXES.get(suffix, suffix)}" if stem in _TOP else name


def consolidated_name(name: str) -> str:
    """The inverse of `hugging_face_name`, for writing the format."""
    stem, _, suffix = name.rpartition(".")
    suffix = {theirs: ours for ours, theirs in _SUFFIXES.items()}.get(suffix, suffix)
    top = {theirs: ours for ours, theirs in _TOP.items()}
    if stem in top:
        return f"{top[stem]}.{suffix}"
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    parts = {theirs: ours for ours, theirs in _PARTS.items()}
    if match is None or match[2] not in parts:
        return name
    return f"layers.{match[1]}.{parts[match[2]]}.{suffix}"


def rotary_heads(name: str, config: Mapping[str, Any]) -> int | None:
    """Number of heads of a consolidated tensor whose rows are in RoPE order; None for others."""
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _ROTARY or match[3] not in _ROTARY_SUFFIXES:
        return None
    heads = config.get(_ROTARY[match[2]]) or config.get("num_attention_heads")
    return heads if isinstance(heads, int) else None


def half_split(rows: Tensor, heads: int) -> Tensor:
    """Rows [heads * H, ...] reordered from interleaved to half-split RoPE; a scalar stays as is."""
    if rows.numel() == 1:
        return rows
    parts = rows.view(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return parts.transpose(1, 2).reshape(rows.shape)


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """The inverse of `half_split`, for writing the format."""
    if rows.numel() == 1:
        return rows
    parts = rows.view(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return parts.transpose(1, 2).reshape(rows.shape)

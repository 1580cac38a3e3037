"""Random small Gemma 4 folders (config.json only) and RunConfigs for engine tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hydraspec.config.schema import (
    CudagraphConfig,
    Dtype,
    EngineConfig,
    KVCacheConfig,
    MethodConfig,
    ParallelismConfig,
    RunConfig,
    SamplingConfig,
    TargetConfig,
    TrackerConfig,
    Weights,
    WorkloadConfig,
)
from hydraspec.models import TargetModel, load_target

ROPE = {
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1000000.0,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


def gemma4_config(**changes: Any) -> dict[str, Any]:
    """A three-layer text config in the public layout; every field can be overridden."""
    config: dict[str, Any] = {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "dtype": "float32",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 64,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "rope_parameters": ROPE,
    }
    config.update(changes)
    return config


def assistant_config(target: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A two-layer assistant (sliding, full) for `target`, in the public layout."""
    text = gemma4_config(
        vocab_size=target["vocab_size"],
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=0,
        final_logit_softcapping=None,
        **{
            key: target[key]
            for key in (
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "global_head_dim",
                "num_global_key_value_heads",
                "attention_k_eq_v",
                "sliding_window",
                "max_position_embeddings",
            )
        },
    )
    config = {
        "model_type": "gemma4_assistant",
        "architectures": ["Gemma4AssistantForCausalLM"],
        "dtype": "float32",
        "backbone_hidden_size": target["hidden_size"],
        "use_ordered_embeddings": False,
        "num_centroids": 8,
        "centroid_intermediate_top_k": 2,
        "tie_word_embeddings": True,
        "text_config": text,
    }
    config.update(changes)
    return config


def write_folder(folder: Path, config: dict[str, Any]) -> Path:
    """A checkpoint folder that holds only config.json, for weights=random."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def edit_config(folder: Path, name: str = "config.json", **changes: Any) -> None:
    """Change keys of a json file."""
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Change the tensors of model.safetensors."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def load(checkpoint: Path | str, dtype: torch.dtype = torch.float32, **changes: Any) -> TargetModel:
    """Our target from a folder or a name, on the CPU."""
    given = {
        "weights": "checkpoint",
        "device": torch.device("cpu"),
        "seed": 0,
        "max_model_len": None,
    }
    return load_target(str(checkpoint), dtype=dtype, **(given | changes))


def run_config(
    checkpoint: Path | str,
    *,
    method: str = "none",
    drafter: Path | str | None = None,
    k: int = 3,
    dtype: Dtype = Dtype.float64,
    weights: Weights = Weights.random,
    max_model_len: int | None = None,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 256,
    block_size: int = 4,
    seed: int = 0,
    **method_fields: Any,
) -> RunConfig:
    """A RunConfig for engine tests: CPU, no tracker."""
    from hydraspec.config.schema import Device

    return RunConfig(
        target=TargetConfig(
            name="test",
            checkpoint=str(checkpoint),
            weights=weights,
            dtype=dtype,
            max_model_len=max_model_len,
        ),
        method=MethodConfig(
            name=method,
            num_speculative_tokens=0 if method == "none" else k,
            checkpoint=None if drafter is None else str(drafter),
            weights=weights,
            **method_fields,
        ),
        engine=EngineConfig(
            name="native",
            device=Device.cpu,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache=KVCacheConfig(block_size=block_size),
        ),
        parallelism=ParallelismConfig(name="single"),
        cudagraph=CudagraphConfig(name="none"),
        sampling=SamplingConfig(name="greedy"),
        workload=WorkloadConfig(name="jsonl"),
        tracker=TrackerConfig(name="none"),
        seed=seed,
    )

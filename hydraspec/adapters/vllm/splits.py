"""Refuses splits that vLLM cannot make of a target, before anything is started.

vLLM's own refusals come minutes later, from processes that it has started. Checked against 0.26.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from hydraspec.config.messages import refusal
from hydraspec.config.schema import RunConfig
from hydraspec.models.checkpoint.config_reader import text_part
from hydraspec.models.checkpoint.reader import open_checkpoint
from hydraspec.shipped import SHAPE_PREFIX, SHAPES, ZOO_PREFIX

MOST = 64  # ranks that a message lists


def check_shipped(config: RunConfig) -> None:
    """Compares the splits with the sizes of a target whose config.json ships with the package.

    Raises:
        ConfigurationError: as `check_sizes`.
    """
    checkpoint = config.target.checkpoint
    if (SHAPES / config.target.name).is_dir():
        checkpoint = f"{SHAPE_PREFIX}{config.target.name}"
    if checkpoint.startswith((SHAPE_PREFIX, ZOO_PREFIX)):
        check_sizes(config, _sizes(checkpoint))


@cache
def _sizes(checkpoint: str) -> Mapping[str, Any]:
    return text_part(open_checkpoint(checkpoint).config)


def check_sizes(config: RunConfig, shape: Mapping[str, Any]) -> None:
    """Compares the splits with a text model's sizes.

    Raises:
        ConfigurationError: a split does not fit; the message names the axis and what is allowed.
    """
    legal = [ranks for ranks in range(1, MOST + 1) if _divides(shape, ranks)]
    tensor, pipeline = config.parallelism.tensor, config.parallelism.pipeline
    if tensor <= MOST and tensor not in legal:
        raise refusal(
            "parallelism.tensor",
            tensor,
            "does not divide the target's heads and widths, which vLLM 0.26 refuses",
            allowed=", ".join(map(str, legal)),
            remedy="choose one of these",
        )
    if pipeline > 1 and shape.get("hidden_size_per_layer_input"):
        raise refusal(
            "parallelism.pipeline",
            pipeline,
            "is not available with engine=vllm and a target with per-layer inputs: vLLM 0.26 loses "
            "them after its first stage, without a word",
            allowed="1",
            remedy="split with parallelism.tensor, or choose engine=native",
        )
    layers = shape.get("num_hidden_layers")
    if isinstance(layers, int) and pipeline > layers:
        raise refusal(
            "parallelism.pipeline",
            pipeline,
            f"is more stages than the target has layers ({layers})",
            allowed=f"1 to {layers}",
        )


def _divides(shape: Mapping[str, Any], ranks: int) -> bool:
    """Returns whether a text model's heads and widths divide among tensor-parallel ranks; key and
    value heads may also be repeated."""
    whole = [shape.get(key) for key in ("num_attention_heads", "intermediate_size")]
    whole.append(shape.get("moe_intermediate_size"))
    kv = [shape.get(key) for key in ("num_key_value_heads", "num_global_key_value_heads")]
    return all(size % ranks == 0 for size in whole if size) and all(
        heads % ranks == 0 or ranks % heads == 0 for heads in kv if heads
    )


def check_devices(config: RunConfig) -> None:
    """Compares the splits with this host's devices, unless ray finds devices elsewhere.

    Raises:
        ConfigurationError: there are too few devices.
    """
    if config.engine.vllm.distributed_executor_backend == "ray":
        return
    ranks, nodes = config.parallelism, config.engine.vllm.nnodes
    needed, found = ranks.num_ranks // nodes, torch.cuda.device_count()
    if needed <= found:
        return
    raise refusal(
        *ranks.largest_axis,
        f"needs {needed} CUDA devices on this host, one a rank, and there are {found}",
        allowed=f"{found} ranks a host: parallelism.tensor x parallelism.pipeline x "
        "parallelism.data / engine.vllm.nnodes",
        remedy="choose fewer, or add hosts (engine.vllm.nnodes, or "
        "engine.vllm.distributed_executor_backend=ray)",
    )

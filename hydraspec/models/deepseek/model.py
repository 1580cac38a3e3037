"""DeepSeek-V3 as a target: latent attention over a compressed cache, experts in groups.

Follows the released checkpoints' format and transformers' arithmetic (DeepseekV3ForCausalLM). The
multi-token-prediction layers after the last one belong to the drafter (mtp/).
"""

from __future__ import annotations

import re
from functools import partial

import torch
from hydraspec_kernels.attention import GroupShape
from torch import Tensor

from hydraspec.models.checkpoint.names import name_in_model
from hydraspec.models.checkpoint.reader import Checkpoint
from hydraspec.models.decoder import Decoder
from hydraspec.models.deepseek.attention import latent_group, latent_rope_table
from hydraspec.models.deepseek.config import DeepseekConfig, read_deepseek_config
from hydraspec.models.deepseek.layer import DeepseekLayer, unpack_experts
from hydraspec.models.kv_groups import RopeTable
from hydraspec.models.place import Place
from hydraspec.models.stages import WHOLE, Stage
from hydraspec.parallel.group import SOLO, TensorGroup

_LAYER = re.compile(r"layers\.(\d+)\.")
_SINGLE_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.")


class DeepseekTarget(Decoder):
    """Implements TargetModel."""

    def __init__(self, config: DeepseekConfig, place: Place) -> None:
        layers = [partial(DeepseekLayer, config, i) for i in range(config.num_layers)]
        super().__init__(config, layers, place)
        self.config = config
        self.theta = place.frequencies(config.rope.theta)

    def ignores(self, name: str) -> bool:
        """The MTP layers, rotary buffers of old files, and the head of a tied model."""
        match = _LAYER.match(name)
        is_mtp = match is not None and int(match[1]) >= self.num_layers
        return is_mtp or name.endswith("rotary_emb.inv_freq") or super().ignores(name)

    def group_shape(self, kind: str, block_size: int) -> GroupShape:
        """The attention of all layers, over rows [1, kv_rank + rope_dim] of the cache."""
        return latent_group(self.config, block_size, self.place)

    def rope_tables(self, positions: Tensor) -> dict[str, RopeTable]:
        """The rotary table of all layers."""
        table = latent_rope_table(self.config, self.theta, positions, self.dtype)
        return {DeepseekLayer.kind: table}


def names_single_experts(checkpoint: Checkpoint) -> bool:
    """Returns whether the files name every expert by itself (releases do) or pack those of a
    layer."""
    return any(_SINGLE_EXPERT.search(name) for name in checkpoint.entries())


def load_deepseek(
    checkpoint: Checkpoint,
    *,
    weights: str,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    group: TensorGroup = SOLO,
    stage: Stage = WHOLE,
) -> DeepseekTarget:
    """Read and check the config, then fill the weights. Raises CheckpointError."""
    where = str(checkpoint.folder)
    config = read_deepseek_config(checkpoint.config, where)
    config.divided.check(group.size, where)
    with torch.no_grad():
        model = DeepseekTarget(config, Place(dtype, device, group, stage))
        if weights == "checkpoint" and names_single_experts(checkpoint):
            unpack_experts(model.layers)
        model.load(checkpoint, weights=weights, seed=seed, canonical=name_in_model)
    return model

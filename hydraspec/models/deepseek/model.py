"""DeepSeek-V3 as a target: latent attention over a compressed cache, experts in groups.

Follows the released checkpoints' format and transformers' arithmetic (DeepseekV3ForCausalLM). The
multi-token-prediction layers behind the last one belong to the drafter (mtp.py).
"""

from __future__ import annotations

import re

import torch

from hydraspec.models.attention import GroupPass
from hydraspec.models.checkpoint.reader import Checkpoint
from hydraspec.models.decoder import Decoder
from hydraspec.models.deepseek.attention import latent_frequencies, latent_group, latent_pass
from hydraspec.models.deepseek.config import DeepseekConfig, read_deepseek_config
from hydraspec.models.deepseek.layer import DeepseekLayer, unpack_experts
from hydraspec.models.layers import Place
from hydraspec.types import KVGroupSpec, Rows

_LAYER = re.compile(r"layers\.(\d+)\.")
_SINGLE_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.")


class DeepseekTarget(Decoder):
    """Implements TargetModel."""

    def __init__(self, config: DeepseekConfig, place: Place) -> None:
        super().__init__(
            place,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            tied=config.tied,
        )
        self.config = config
        self.layers = [DeepseekLayer(config, i, place) for i in range(config.num_layers)]
        self.theta = latent_frequencies(config, place)

    def ignores(self, name: str) -> bool:
        """The MTP layers, rotary buffers of old files, and the head of a tied model."""
        match = _LAYER.match(name)
        is_mtp = match is not None and int(match[1]) >= self.num_layers
        return is_mtp or name.endswith("rotary_emb.inv_freq") or super().ignores(name)

    def kv_groups(self, block_size: int) -> list[KVGroupSpec]:
        """One group: [num_blocks * block_size, 1, kv_rank + rope_dim] a layer. Also sets the block
        size forward reads with.
        """
        self.block_size = block_size
        return [latent_group(self.config, "full", tuple(range(self.num_layers)), block_size)]

    def _passes(self, batch: Rows) -> dict[str, GroupPass]:
        shared = latent_pass(self.config, self.theta, batch, self.block_size, self.dtype)
        return {DeepseekLayer.kind: shared}


def names_single_experts(checkpoint: Checkpoint) -> bool:
    """Whether the files name every expert by itself (releases do) or pack those of a layer."""
    return any(_SINGLE_EXPERT.search(name) for name in checkpoint.entries())


def canonical_name(name: str) -> str:
    """A checkpoint's tensor name without the leading `model.`."""
    return name.removeprefix("model.")


def load_deepseek(
    checkpoint: Checkpoint, *, weights: str, dtype: torch.dtype, device: torch.device, seed: int
) -> DeepseekTarget:
    """Read and check the config, then fill the weights. Raises CheckpointError."""
    config = read_deepseek_config(checkpoint.config, str(checkpoint.folder))
    with torch.no_grad():
        model = DeepseekTarget(config, Place(dtype, device))
        if weights == "checkpoint" and names_single_experts(checkpoint):
            unpack_experts(model.layers)
        model.load(checkpoint, weights=weights, seed=seed, canonical=canonical_name)
    return model

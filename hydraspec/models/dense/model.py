"""Llama-like dense decoders over a paged KV cache: Llama 3, Mistral, Qwen2, Qwen3 and MiMo.

Follows the checkpoints' published format and transformers' arithmetic. Knows nothing of
scheduling or speculation.
"""

from __future__ import annotations

from functools import partial

import torch
from hydraspec_kernels.attention import GroupShape
from hydraspec_kernels.rope import rope_table
from torch import Tensor

from hydraspec.models.checkpoint.names import name_in_text_model
from hydraspec.models.checkpoint.reader import Checkpoint
from hydraspec.models.decoder import Decoder
from hydraspec.models.dense.config import DenseConfig, read_dense_config
from hydraspec.models.dense.layer import DenseLayer, dense_group
from hydraspec.models.kv_groups import RopeTable
from hydraspec.models.place import Place
from hydraspec.models.stages import WHOLE, Stage
from hydraspec.parallel.group import SOLO, TensorGroup

_NOT_OURS = (
    "mtp_layers.",  # MiMo's draft layers
    "vision_tower.",
    "multi_modal_projector.",
    # Mistral's own names
    "vision_encoder.",
    "vision_language_adapter.",
    "patch_merger.",
    "pre_mm_projector_norm.",
)


def canonical_name(name: str) -> str | None:
    """A checkpoint's tensor name without its prefix; None for draft layers, towers and rotary
    buffers of old files.
    """
    name = name_in_text_model(name)
    return None if name.startswith(_NOT_OURS) or name.endswith("rotary_emb.inv_freq") else name


class DenseTarget(Decoder):
    """Implements TargetModel."""

    def __init__(self, config: DenseConfig, place: Place) -> None:
        layers = [partial(DenseLayer, config, kind) for kind in config.kinds]
        super().__init__(config, layers, place)
        self.config = config
        self.theta = place.frequencies(config.rope.theta)

    def group_shape(self, kind: str, block_size: int) -> GroupShape:
        """The attention of the KV group of a kind of layers."""
        return dense_group(self.config, kind, block_size, self.place)

    def rope_tables(self, positions: Tensor) -> dict[str, RopeTable]:
        """One rotary table, which all kinds of layers share."""
        return dict.fromkeys(self.groups, rope_table(positions, self.theta, self.dtype))


def load_dense(
    checkpoint: Checkpoint,
    *,
    weights: str,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    group: TensorGroup = SOLO,
    stage: Stage = WHOLE,
) -> DenseTarget:
    """Read and check the config, then fill the weights. Raises CheckpointError."""
    where = str(checkpoint.folder)
    config = read_dense_config(checkpoint.config, where)
    config.divided.check(group.size, where)
    with torch.no_grad():
        model = DenseTarget(config, Place(dtype, device, group, stage))
        model.load(checkpoint, weights=weights, seed=seed, canonical=canonical_name)
    return model

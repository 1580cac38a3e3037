"""Llama-like dense decoders over a paged KV cache: Llama 3, Mistral, Qwen2, Qwen3 and MiMo.

Follows the checkpoints' published format and transformers' arithmetic. Knows nothing of
scheduling or speculation.
"""

from __future__ import annotations

import torch
from hydraspec_kernels.attention import GroupShape
from hydraspec_kernels.rope import rope_table

from hydraspec.models.attention import GroupPass
from hydraspec.models.checkpoint.reader import Checkpoint
from hydraspec.models.decoder import Decoder
from hydraspec.models.dense.config import DenseConfig, read_dense_config
from hydraspec.models.dense.layer import DenseLayer, dense_frequencies, dense_group, group_pass
from hydraspec.models.gemma4.config import FULL, GROUP_NAMES, SLIDING
from hydraspec.models.layers import Place
from hydraspec.types import KVGroupSpec, Rows

_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
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
    if name.endswith("lm_head.weight"):
        return "lm_head.weight"
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    return None if name.startswith(_NOT_OURS) or name.endswith("rotary_emb.inv_freq") else name


class DenseTarget(Decoder):
    """Implements TargetModel."""

    def __init__(self, config: DenseConfig, place: Place) -> None:
        super().__init__(
            place,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=len(config.kinds),
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            tied=config.tied,
        )
        self.config = config
        self.layers = [DenseLayer(config, kind, place) for kind in config.kinds]
        self.theta = dense_frequencies(config, place)
        self.groups: dict[str, GroupShape] = {}

    def kv_groups(self, block_size: int) -> list[KVGroupSpec]:
        """Sliding layers first, then full ones; also sets the block size forward reads with."""
        self.block_size = block_size
        self.groups = {}  # not cleared: another engine's view of this target has the old ones
        specs = []
        for kind in (SLIDING, FULL):
            layers = tuple(i for i, x in enumerate(self.config.kinds) if x == kind)
            if not layers:
                continue
            window = self.config.sliding_window if kind == SLIDING else None
            self.groups[kind] = dense_group(self.config, block_size, window)
            specs.append(
                KVGroupSpec(
                    name=GROUP_NAMES[kind],
                    layers=layers,
                    num_kv_heads=self.config.num_kv_heads,
                    head_dim=self.config.head_dim,
                    block_size=block_size,
                    window=window,
                )
            )
        return specs

    def _passes(self, batch: Rows) -> dict[str, GroupPass]:
        assert self.groups, "call kv_groups before forward"
        table = rope_table(batch.positions, self.theta, self.dtype)
        return {
            kind: group_pass(shape, batch, g, table, self.dtype)
            for g, (kind, shape) in enumerate(self.groups.items())
        }


def load_dense(
    checkpoint: Checkpoint, *, weights: str, dtype: torch.dtype, device: torch.device, seed: int
) -> DenseTarget:
    """Read and check the config, then fill the weights. Raises CheckpointError."""
    config = read_dense_config(checkpoint.config, str(checkpoint.folder))
    with torch.no_grad():
        model = DenseTarget(config, Place(dtype, device))
        model.load(checkpoint, weights=weights, seed=seed, canonical=canonical_name)
    return model

"""Llama-like dense decoders over a paged KV cache: Llama 3, Mistral, Qwen2, Qwen3 and MiMo.

The model follows the checkpoints' published format and transformers' arithmetic, and knows nothing
of scheduling or speculation.
"""

from __future__ import annotations

from hydraspec.models.checkpoint.names import name_in_text_model
from hydraspec.models.decoder import Decoder
from hydraspec.models.dense.config import read_dense_config
from hydraspec.models.dense.layer import DenseLayer

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


class DenseTarget(Decoder):
    """Llama-like dense target; implements TargetModel."""

    layer_type = DenseLayer
    read_config = staticmethod(read_dense_config)

    def canonical_name(self, name: str) -> str | None:
        """A checkpoint's tensor name without its prefix; None for draft layers, towers and rotary
        buffers of old files.
        """
        name = name_in_text_model(name)
        return None if name.startswith(_NOT_OURS) or name.endswith("rotary_emb.inv_freq") else name

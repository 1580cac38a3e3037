"""DeepSeek-V3 as a target: latent attention over a compressed cache, experts in groups.

It follows the released checkpoints' format and transformers' arithmetic (DeepseekV3ForCausalLM).
The multi-token-prediction layers after the last one belong to the drafter (mtp/).
"""

from __future__ import annotations

import re

from hydraspec.models.checkpoint.names import name_in_model
from hydraspec.models.decoder import Decoder
from hydraspec.models.deepseek.config import read_deepseek_config
from hydraspec.models.deepseek.layer import DeepseekLayer

_LAYER = re.compile(r"layers\.(\d+)\.")


class DeepseekTarget(Decoder):
    """DeepSeek-V3 target; implements TargetModel."""

    layer_type = DeepseekLayer
    read_config = staticmethod(read_deepseek_config)

    def canonical_name(self, name: str) -> str | None:
        """A checkpoint's tensor name without the leading `model.`."""
        return name_in_model(name)

    def ignores(self, name: str) -> bool:
        """Returns whether a tensor is not needed: it is of an MTP layer, a rotary buffer of an old
        file, or the head of a tied model.
        """
        match = _LAYER.match(name)
        is_mtp = match is not None and int(match[1]) >= self.num_layers
        return is_mtp or name.endswith("rotary_emb.inv_freq") or super().ignores(name)

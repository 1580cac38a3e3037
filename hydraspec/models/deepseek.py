"""DeepSeek-V3 as a target: latent attention over a compressed cache, experts in groups.

Follows the released checkpoints' format and transformers' arithmetic (DeepseekV3ForCausalLM). The
multi-token-prediction layers behind the last one belong to the drafter (mtp.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hydraspec.models.aux_states import AuxCollector
from hydraspec.models.checkpoint import Checkpoint
from hydraspec.models.deepseek_attention import latent_frequencies, latent_group, latent_pass
from hydraspec.models.deepseek_config import DeepseekConfig, read_deepseek_config
from hydraspec.models.deepseek_layer import DeepseekLayer, unpack_experts
from hydraspec.models.layers import Norm, Place, Tensors
from hydraspec.models.weights import fill, memory_bytes
from hydraspec.types import KVGroupSpec, Rows

_LAYER = re.compile(r"layers\.(\d+)\.")
_SINGLE_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.")


class DeepseekTarget:
    """Implements TargetModel."""

    def __init__(self, config: DeepseekConfig, place: Place) -> None:
        self.config, self.dtype, self.device = config, place.dtype, place.device
        self.hidden_size, self.vocab_size = config.hidden_size, config.vocab_size
        self.num_layers = config.num_layers
        self.max_position_embeddings = config.max_position_embeddings
        self.eos_token_ids: tuple[int, ...] = ()
        self.suppress_token_ids: tuple[int, ...] = ()
        self.table = place.empty(config.vocab_size, config.hidden_size)
        self.head = (
            self.table if config.tied else place.empty(config.vocab_size, config.hidden_size)
        )
        self.layers = [DeepseekLayer(config, i, place) for i in range(config.num_layers)]
        self.norm = Norm(config.hidden_size, config.rms_norm_eps, place)
        self.theta = latent_frequencies(config, place)
        self.block_size = 16  # until kv_groups says otherwise
        self._suppressed: Tensor | None = None

    def tensors(self) -> Tensors:
        """Every weight by its checkpoint name without the leading `model.`."""
        found = {"embed_tokens.weight": self.table, "norm.weight": self.norm.weight}
        if not self.config.tied:
            found["lm_head.weight"] = self.head
        for i, layer in enumerate(self.layers):
            found |= {f"layers.{i}.{name}": tensor for name, tensor in layer.tensors().items()}
        return found

    def finish(self) -> None:
        """Call once after the weights are filled."""
        for layer in self.layers:
            layer.finish()
        self.norm.fold_gain()
        if self.suppress_token_ids:
            self._suppressed = torch.tensor(self.suppress_token_ids, device=self.device)

    def ignores(self, name: str) -> bool:
        """Tensors that files may hold without our needing them: the MTP layers among them."""
        if name == "lm_head.weight":
            return self.config.tied
        match = _LAYER.match(name)
        return name.endswith("rotary_emb.inv_freq") or (
            match is not None and int(match[1]) >= self.num_layers
        )

    def kv_groups(self, block_size: int) -> list[KVGroupSpec]:
        """One group of latent rows; also sets the block size forward reads with."""
        self.block_size = block_size
        return [latent_group(self.config, "full", tuple(range(self.num_layers)), block_size)]

    def kv_source(self, layer: int) -> int:
        """Every layer reads its own cache."""
        return layer

    def forward(
        self, batch: Rows, kv_caches: list[Tensor | None], aux_layer_ids: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden states [T, D] after the final norm, and one [T, D] per aux layer id.

        kv_caches has one [num_blocks * block_size, 1, kv_rank + rope_dim] a layer; the rest is as
        TargetModel.forward says.
        """
        shared = latent_pass(self.config, self.theta, batch, self.block_size, self.dtype)
        h = self.embed(batch.input_ids)
        aux = AuxCollector(aux_layer_ids, self.num_layers)
        aux.see(0, h)
        for i, layer in enumerate(self.layers):
            cache = kv_caches[i]
            assert cache is not None, f"layer {i} has no cache"
            h = layer(h, shared, cache)
            aux.see(i + 1, h)
        return self.norm.scaled(h), aux.states()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[N, D] -> [N, V], suppressed tokens at minus infinity."""
        logits = torch.mm(hidden, self.head.t())
        if self._suppressed is not None:
            logits.index_fill_(1, self._suppressed, -math.inf)
        return logits

    def embed(self, token_ids: Tensor) -> Tensor:
        """[...] -> [..., D], unscaled."""
        return F.embedding(token_ids, self.table)

    def memory_bytes(self) -> int:
        """Bytes of weights held; a tied head counts once."""
        return memory_bytes(self.tensors())


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
        model.eos_token_ids = checkpoint.token_ids("eos_token_id", config.vocab_size)
        model.suppress_token_ids = checkpoint.token_ids("suppress_tokens", config.vocab_size)
        if weights == "checkpoint" and names_single_experts(checkpoint):
            unpack_experts(model.layers)
        fill(
            model.tensors(),
            checkpoint,
            weights=weights,
            seed=seed,
            canonical=canonical_name,
            ignored=model.ignores,
        )
        model.finish()
    return model

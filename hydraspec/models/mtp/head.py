"""Multi-token-prediction heads: DeepSeek-V3's, MiMo's, and those of the speculators format.

A row at position t joins the embedding of token t + 1 with a hidden state at t, and runs a decoder
layer over a cache of its own. The first state is the target's output after its final norm: it is
what transformers and vLLM hand over, and what the checkpoints' hidden norm was trained on. What a
layer returns after its own final norm is scored by the target's head and fed back
(docs/adr/0008; DeepSeek-V3 report, arXiv 2412.19437, section 2.2).
"""

from __future__ import annotations

from typing import Protocol

import torch
from hydraspec_kernels.linear import linear
from hydraspec_kernels.rope import rope_table
from hydraspec_kernels.sampling.token_choice import greedy_tokens
from torch import Tensor

from hydraspec.models.attention import GroupPass
from hydraspec.models.base import TargetModel
from hydraspec.models.deepseek.attention import latent_frequencies, latent_group, latent_pass
from hydraspec.models.deepseek.config import DeepseekConfig
from hydraspec.models.deepseek.layer import DeepseekLayer
from hydraspec.models.deepseek.model import canonical_name
from hydraspec.models.dense.config import DenseConfig
from hydraspec.models.dense.layer import DenseLayer, dense_frequencies, dense_group, group_pass
from hydraspec.models.draft_spec import DraftSpec
from hydraspec.models.gemma4.config import FULL
from hydraspec.models.layers import Norm, Place, Tensors
from hydraspec.models.mtp.config import MTPConfig, MTPLayout
from hydraspec.models.weights import memory_bytes
from hydraspec.types import KVGroupSpec, Rows, TargetStep

GROUP = "mtp"


class Block(Protocol):
    """A decoder layer: h [T, D] -> [T, D] over its cache."""

    def tensors(self) -> Tensors: ...
    def finish(self) -> None: ...
    def __call__(self, h: Tensor, shared: GroupPass, cache: Tensor) -> Tensor: ...
    def enter(self, h: Tensor) -> Tensor: ...
    def advance(
        self, h: Tensor, y: Tensor, shared: GroupPass, cache: Tensor, then: Norm
    ) -> tuple[Tensor, Tensor]: ...


class LatentBlocks:
    """DeepSeek-V3's layers: they count on behind the target's, so they hold experts."""

    def __init__(self, config: DeepseekConfig, count: int, place: Place) -> None:
        self.config, self.place = config, place
        first = config.num_layers
        self.each = [DeepseekLayer(config, first + i, place) for i in range(count)]
        self.theta = latent_frequencies(config, place)
        self.block_size = 16  # until kv_group says otherwise

    def kv_group(self, layers: tuple[int, ...], block_size: int) -> KVGroupSpec:
        self.block_size = block_size
        return latent_group(self.config, GROUP, layers, block_size)

    def begin(self, rows: Rows) -> GroupPass:
        return latent_pass(self.config, self.theta, rows, self.block_size, self.place.dtype)


class DenseBlocks:
    """Qwen-style layers, without a window."""

    def __init__(self, config: DenseConfig, count: int, place: Place) -> None:
        self.config, self.place = config, place
        self.each = [DenseLayer(config, FULL, place) for _ in range(count)]
        self.theta = dense_frequencies(config, place)
        self.shape = dense_group(config, 16, None)  # until kv_group says otherwise

    def kv_group(self, layers: tuple[int, ...], block_size: int) -> KVGroupSpec:
        self.shape = dense_group(self.config, block_size, None)
        return KVGroupSpec(
            name=GROUP,
            layers=layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            block_size=block_size,
            window=None,
        )

    def begin(self, rows: Rows) -> GroupPass:
        table = rope_table(rows.positions, self.theta, self.place.dtype)
        return group_pass(self.shape, rows, 0, table, self.place.dtype)


class MTPLayer:
    """final_norm(block(projection(cat of the normed embedding and the normed state)))."""

    def __init__(
        self, layout: MTPLayout, block: Block, size: int, eps: float, place: Place
    ) -> None:
        self.layout, self.block, self.size = layout, block, size
        self.order = 1 if layout.embedding_first else -1  # of (token, hidden)
        self.token_norm, self.hidden_norm = Norm(size, eps, place), Norm(size, eps, place)
        self.projection = place.matrix(2 * size, size)
        self.final_norm = Norm(size, eps, place)
        self.folded = place.folded

    def tensors(self) -> Tensors:
        """Weights by their names below the layer's prefix."""
        layout = self.layout
        return self.block.tensors() | {
            f"{layout.token_norm}.weight": self.token_norm.weight,
            f"{layout.hidden_norm}.weight": self.hidden_norm.weight,
            f"{layout.projection}.weight": self.projection.t(),
            f"{layout.final_norm}.weight": self.final_norm.weight,
        }

    def finish(self) -> None:
        """Fold what can be, once the weights are filled."""
        norms = (self.token_norm, self.hidden_norm)[:: self.order]
        for norm, rows in zip(norms, self.projection.split(self.size), strict=True):
            norm.fold_into(rows, stream_scale=1.0)
        self.block.finish()
        self.final_norm.fold_gain()

    def __call__(self, e: Tensor, h: Tensor, shared: GroupPass, cache: Tensor) -> Tensor:
        """Embeddings e and states h [T, D] -> [T, D], after the final norm."""
        parts = (self.token_norm.normed(e), self.hidden_norm.normed(h))[:: self.order]
        x = linear(torch.cat(parts, -1), self.projection)
        if self.folded:
            return self.final_norm.scaled(self.block(x, shared, cache))
        return self.block.advance(x, self.block.enter(x), shared, cache, self.final_norm)[1]


class MTPHead:
    """Implements OwnCacheHead. Step j runs layer j % n; embedding and head are the target's."""

    spec: DraftSpec

    def __init__(self, config: MTPConfig, target: TargetModel, num_drafts: int) -> None:
        place = Place(target.dtype, target.device)
        block, count = config.block, config.num_layers
        self.config, self.target, self.num_drafts = config, target, num_drafts
        self.blocks: LatentBlocks | DenseBlocks
        if isinstance(block, DeepseekConfig):
            self.blocks = LatentBlocks(block, count, place)
        else:
            self.blocks = DenseBlocks(block, count, place)
        self.layers = [
            MTPLayer(config.layout, each, block.hidden_size, block.rms_norm_eps, place)
            for each in self.blocks.each
        ]

    def tensors(self) -> Tensors:
        """Every weight by its checkpoint name without the leading `model.`."""
        return {
            prefix + name: tensor
            for prefix, layer in zip(self.config.prefixes, self.layers, strict=True)
            for name, tensor in layer.tensors().items()
        }

    def canonical_name(self, name: str) -> str | None:
        """A checkpoint's tensor name without `model.`; None for what is not an MTP layer's."""
        name = canonical_name(name)
        return name if name.startswith(self.config.prefixes) else None

    def finish(self) -> None:
        """Call once after the weights are filled."""
        for layer in self.layers:
            layer.finish()

    def kv_groups(self, block_size: int, first_layer: int) -> list[KVGroupSpec]:
        """One group; also sets the block size forward reads with."""
        layers = tuple(range(first_layer, first_layer + len(self.layers)))
        return [self.blocks.kv_group(layers, block_size)]

    def combine_target_hidden(self, target_step: TargetStep) -> Tensor:
        """The target's states after its final norm, [T, D]."""
        return target_step.hidden_states

    def forward(
        self, rows: Rows, hidden: Tensor, kv_caches: list[Tensor], *, step: int
    ) -> tuple[Tensor, Tensor]:
        """States [T, D] of layer `step` % n, the same for logits and as feedback.

        A layer that a later step of the round runs gets these rows too, or its cache would lack
        them.
        """
        count = len(self.layers)
        e = self.target.embed(rows.input_ids)
        if self.config.layout.blanks_first_position:
            e = e.masked_fill((rows.positions == 0)[:, None], 0.0)
        shared = self.blocks.begin(rows)
        last = max(step + 1, self.num_drafts)
        states = {
            i: self.layers[i](e, hidden, shared, kv_caches[i])
            for i in dict.fromkeys(later % count for later in range(step, last))
        }
        return states[step % count], states[step % count]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[B, D] -> [B, V]: the target's head, as the target applies it."""
        return self.target.compute_logits(hidden)

    def greedy_tokens(self, hidden: Tensor) -> Tensor:
        """[B, D] -> [B] ids; equal scores go to the lowest id."""
        return greedy_tokens(self.compute_logits(hidden))

    def memory_bytes(self) -> int:
        """Bytes of weights held beside the target's."""
        return memory_bytes(self.tensors())

"""Multi-token-prediction heads: DeepSeek-V3's, MiMo's, and those of the speculators format.

A row at position t joins the embedding of token t + 1 with a hidden state at t, and runs a decoder
layer over its own cache. The first state is the target's output after its final norm, which
transformers and vLLM hand over, and on which the checkpoints' hidden norm was trained. A layer's
output after its own final norm is scored by the target's head and fed back (docs/adr/0008;
DeepSeek-V3 report, arXiv 2412.19437, section 2.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from hydraspec_kernels.attention import GroupShape
from torch import Tensor

from hydraspec.models.base import TargetModel
from hydraspec.models.checkpoint.names import name_in_model
from hydraspec.models.draft_spec import DraftSpec
from hydraspec.models.kv_groups import (
    FULL,
    MTP_GROUPS,
    BlockSize,
    GroupPass,
    group_layers,
    group_passes,
)
from hydraspec.models.layers import Norm, PreNormLayer
from hydraspec.models.linear import Linear
from hydraspec.models.mtp.config import MTPConfig, MTPLayout
from hydraspec.models.parts import Weights
from hydraspec.models.place import Place
from hydraspec.types import KVGroupSpec, Rows, TargetStep


class MTPLayer(Weights):
    """MTP layer: final_norm(block(projection(cat[norm(embedding), norm(state)]))); the order of the
    concatenation is the layout's.
    """

    def __init__(
        self,
        layout: MTPLayout,
        block: PreNormLayer,
        size: int,
        eps: float,
        place: Place,
    ) -> None:
        self.layout, self.block = layout, block
        self.order = 1 if layout.embedding_first else -1  # of (token, hidden)
        self.token_norm, self.hidden_norm = Norm(size, eps, place), Norm(size, eps, place)
        self.projection = Linear(place, 2 * size, {layout.projection: size})
        self.final_norm = Norm(size, eps, place)
        self.names = {
            "block": "",
            "token_norm": f"{layout.token_norm}.",
            "hidden_norm": f"{layout.hidden_norm}.",
            "projection": "",
            "final_norm": f"{layout.final_norm}.",
        }

    def forward(self, e: Tensor, h: Tensor, shared: GroupPass, cache: Tensor) -> Tensor:
        """States [T, D] after the final norm, for embeddings e and states h, [T, D] each."""
        parts = (self.token_norm.forward(e), self.hidden_norm.forward(h))[:: self.order]
        x = self.projection.forward(torch.cat(parts, -1))
        norm = self.block.input_norm
        y = x if norm is None else norm.forward(x)
        states = self.block.forward(x, y, shared, cache, self.final_norm)[1]
        assert isinstance(states, Tensor), "the last norm is not the input of a layer"
        return states


class MTPHead(Weights):
    """Draft head of n MTP layers; implements OwnCacheHead. Step j runs layer j % n; embedding and
    output projection are the target's.
    """

    spec: DraftSpec

    def __init__(
        self, config: MTPConfig, target: TargetModel, num_drafts: int, place: Place
    ) -> None:
        self.place = place
        block, count = config.block, config.num_layers
        self.config, self.target, self.num_drafts = config, target, num_drafts
        self.theta = place.frequencies(block.rope.theta)
        self.layer_type = config.layout.layer_type
        # Indices after the target's: layers with experts, where there are any.
        self.blocks = [self.layer_type(block, block.num_layers + i, place) for i in range(count)]
        self.layers = [
            MTPLayer(config.layout, each, block.hidden_size, block.rms_norm_eps, place)
            for each in self.blocks
        ]
        self.groups: dict[str, GroupShape] = {}

    def parts(self) -> Iterator[tuple[str, Weights]]:
        """Yields the layers; names are the checkpoint's without the leading `model.`."""
        return zip(self.config.prefixes, self.layers, strict=True)

    def canonical_name(self, name: str) -> str | None:
        """A checkpoint's tensor name without `model.`; None for what is not an MTP layer's."""
        name = name_in_model(name)
        return name if name.startswith(self.config.prefixes) else None

    def ignores(self, name: str) -> bool:
        """Returns whether a tensor is not needed: a layer's copy of the target's embedding or head,
        since the target's are used, or a rotary buffer.
        """
        is_copy = ".embed_tokens." in name or ".shared_head.head." in name
        return is_copy or name.endswith("inv_freq")

    def finish(self) -> None:
        """Finishes all decoder blocks; call once after the weights are filled."""
        for block in self.blocks:
            block.finish()

    def kv_groups(self, block_size: BlockSize, first_layer: int) -> list[KVGroupSpec]:
        """The KV group of all layers; also sets the block size that forward reads with."""
        layers = dict.fromkeys(range(first_layer, first_layer + len(self.layers)), FULL)
        self.groups, specs = group_layers(
            layers,
            MTP_GROUPS,
            block_size,
            partial(self.layer_type.group_shape, self.config.block, place=self.place),
        )
        return specs

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
        if rows.encoded is not None:
            e = rows.encoded.merge(e)
        if self.config.layout.blanks_first_position:
            e = e.masked_fill((rows.positions == 0)[:, None], 0.0)
        config, dtype = self.config, self.place.dtype
        tables = self.layer_type.rope_tables(config.block, self.theta, rows.positions, dtype)
        shared = group_passes(self.groups, rows, tables, dtype)[FULL]
        last = max(step + 1, self.num_drafts)
        states = {
            i: self.layers[i].forward(e, hidden, shared, kv_caches[i])
            for i in dict.fromkeys(later % count for later in range(step, last))
        }
        return states[step % count], states[step % count]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [B, V] of hidden [B, D] by the target's head, as the target applies it."""
        return self.target.vocabulary.whole(self.target.compute_logits(hidden))

    def greedy_tokens(self, hidden: Tensor) -> Tensor:
        """Best tokens [B] of hidden [B, D]; of equal scores the lowest id wins."""
        return self.target.vocabulary.greedy_tokens(self.target.compute_logits(hidden))

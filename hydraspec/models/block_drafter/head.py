"""Block drafters: DFlash (arXiv 2602.06036), and DSpark on top of it.

The target's states at committed positions become context features, which every layer turns into
keys and values at these positions. A block (the newest token, then mask tokens) attends to that
context and to itself, and drafts all its tokens in one pass.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from hydraspec_kernels.attention import GroupShape
from torch import Tensor

from hydraspec.models.block_drafter.config import BlockConfig
from hydraspec.models.dense.config import DenseConfig
from hydraspec.models.dense.layer import DenseLayer
from hydraspec.models.draft_spec import DraftSpec
from hydraspec.models.draft_tables import DraftTables
from hydraspec.models.kv_groups import (
    DRAFT_GROUPS,
    BlockSize,
    group_layers,
    group_passes,
    writing_passes,
)
from hydraspec.models.layers import Norm
from hydraspec.models.linear import Linear
from hydraspec.models.place import Place
from hydraspec.types import KVGroupSpec, Rows, TargetStep

_IGNORED = re.compile(r"^(d2t|t2d|verifier_.*|.*rotary_emb\..*)$")
_STARTS = (  # other spellings of names
    ("midlayer.", "layers.0."),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
)


def canonical_name(name: str) -> str:
    """A tensor's canonical name: without `model.`, layers numbered."""
    name = name.removeprefix("model.")
    for start, ours in _STARTS:
        if name.startswith(start):
            return ours + name.removeprefix(start)
    return name


class BlockHead(DraftTables):
    """Draft head of DFlash. `load_block_drafter` builds it empty, then fills and finishes it.

    Attributes:
        mask_embedding: what enters for mask tokens [D]; None: their row of the embedding.
        embed_scale: factor of the embedding; None: 1.
    """

    names: Mapping[str, str] = {
        "fc": "",
        "hidden_norm": "hidden_norm.",
        "norm": "norm.",
        "layers": "layers.",
    }
    spec: DraftSpec

    def __init__(
        self, config: BlockConfig, layers: DenseConfig, target_width: int, place: Place
    ) -> None:
        super().__init__(layers.hidden_size)
        self.config, self.shape, self.place = config, layers, place
        self.softcap = config.softcap
        size, eps = layers.hidden_size, layers.rms_norm_eps
        self.fc = Linear(place, len(config.aux_layer_ids) * target_width, {"fc": size})
        self.hidden_norm = Norm(size, eps, place)
        self.norm = Norm(size, eps, place)
        self.layers = [DenseLayer(layers, i, place) for i in range(layers.num_layers)]
        self.theta = place.frequencies(layers.rope.theta)
        self.mask_embedding: Tensor | None = None
        self.embed_scale: float | None = None
        self.groups: dict[str, GroupShape] = {}

    def canonical_name(self, name: str) -> str | None:
        """The canonical name of a checkpoint's tensor: see the function `canonical_name`."""
        return canonical_name(name)

    def ignores(self, name: str) -> bool:
        """Returns whether a tensor is not needed, or read separately."""
        return _IGNORED.match(name) is not None

    def kv_groups(self, block_size: BlockSize, first_layer: int) -> list[KVGroupSpec]:
        """KV groups, sliding layers first; also sets the block size that passes read with."""
        self.groups, specs = group_layers(
            {first_layer + i: kind for i, kind in enumerate(self.shape.kinds)},
            DRAFT_GROUPS,
            block_size,
            self._group_shape,
        )
        return specs

    def _group_shape(self, kind: str, block_size: int) -> GroupShape:
        shape = DenseLayer.group_shape(self.shape, kind, block_size, self.place)
        return replace(shape, mask=self.config.mask(kind))

    def context_features(self, target_step: TargetStep) -> Tensor:
        """Features [T, D] of the target's rows, from which layers compute their keys and values."""
        states = torch.cat(tuple(target_step.aux_hidden_states), -1)
        return self.hidden_norm.forward(self.fc.forward(states))

    def write_context(self, rows: Rows, features: Tensor, kv_caches: list[Tensor]) -> None:
        """Writes the keys and values of features [T, D] at the rows' positions, in every layer."""
        tables = DenseLayer.rope_tables(self.shape, self.theta, rows.positions, self.place.dtype)
        passes = writing_passes(self.groups, rows, tables)
        for layer, cache in zip(self.layers, kv_caches, strict=True):
            layer.attention.write_kv(features, passes[layer.kind], cache)

    def draft_block(self, rows: Rows, kv_caches: list[Tensor]) -> Tensor:
        """States [T, D] of blocks of rows, for `compute_logits`. The rows' keys and values are
        written too; they hold until context features take their place."""
        h = self._embed(rows)
        dtype = self.place.dtype
        tables = DenseLayer.rope_tables(self.shape, self.theta, rows.positions, dtype)
        passes = group_passes(self.groups, rows, tables, dtype)
        norms = [*(layer.input_norm for layer in self.layers), self.norm]
        first = norms[0]
        assert first is not None, "block drafters have an input norm in every layer"
        y = first.forward(h)
        for layer, next_norm, cache in zip(self.layers, norms[1:], kv_caches, strict=True):
            h, y = layer.forward(h, y, passes[layer.kind], cache, next_norm)
        return y

    def _embed(self, rows: Rows) -> Tensor:
        """What enters for the rows of equally long blocks, [T, D]."""
        h = self.embedding.embed(rows.input_ids, self.embed_scale)
        if self.mask_embedding is not None:
            num_requests = rows.query_start_loc.shape[0] - 1
            h.view(num_requests, -1, h.shape[1])[:, 1:] = self.mask_embedding
        return h

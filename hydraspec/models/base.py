"""The interface of a target model, as the engine and the speculators use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hydraspec.models.kv_groups import BlockSize
from hydraspec.models.linear import Table
from hydraspec.models.stages import Stage
from hydraspec.parallel.vocabulary import Vocabulary
from hydraspec.types import Image, IntermediateTensors, KVGroupSpec, NeededRows, Rows


class ImageEncoder(Protocol):
    """The part of a target that turns images into embeddings."""

    is_held: bool  # by this pipeline stage; others read no embeddings

    def fault(self, image: Image) -> str | None:
        """Words for what makes an image unreadable; None: it is sound."""
        ...

    def encode(self, images: Sequence[Image]) -> list[Tensor]:
        """Embeddings [tokens, D] of each image, which replace those of its placeholders."""
        ...

    def largest_image(self) -> Image:
        """A black image that takes as much memory to encode as any images together."""
        ...


class TargetModel(Protocol):
    """A decoder over a paged KV cache. Run it under `torch.inference_mode`; no method of a step
    waits for results of the device.
    """

    hidden_size: int
    vocab_size: int
    vocabulary: Vocabulary  # the part that this rank holds
    num_layers: int
    max_position_embeddings: int
    dtype: torch.dtype
    device: torch.device
    eos_token_ids: tuple[int, ...]
    suppress_token_ids: tuple[int, ...]  # minus infinity in the logits
    stage: Stage
    held: range  # the layers of this pipeline stage, counted in all num_layers
    table: Table  # token embedding, unscaled
    head: Table  # output projection; the same where the two are tied
    kv_scales: Mapping[int, Tensor]  # [2, Hkv] by layer that owns KV, of an e4m3 cache; else {}
    block_size: BlockSize  # cache rows a block, as last given to kv_groups
    encoder: ImageEncoder | None  # None: images are not read
    images_see_ahead: bool  # on sliding layers, rows of an image see each other both ways

    def kv_groups(self, block_size: BlockSize) -> list[KVGroupSpec]:
        """The KV groups, in the order of Rows.slot_mapping. The call also sets the block size that
        forward reads with: engines that share weights have a shallow copy of the target each.
        """
        ...

    def kv_source(self, layer: int) -> int:
        """The layer whose cache `layer` reads: itself, unless it shares."""
        ...

    def forward(
        self,
        batch: Rows,
        kv_caches: list[Tensor | None],
        aux_layer_ids: Sequence[int] = (),
        needed: NeededRows | None = None,
        received: IntermediateTensors | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden states [T, D] after the final norm, and one [T, D] per aux layer id, in order.

        Aux id i is the residual stream after i decoder layers, un-normed: 0 is the embedding output
        (scaled as the first layer reads it), num_layers is what the final norm reads.

        kv_caches has one entry a layer, [num_blocks * block_size, *GroupShape.page_row] (2, Hkv, H
        with separate keys and values) or None for layers that share. Keys and values are written
        through batch.slot_mapping before they are read; a slot of -1 (only where batch.has_padding)
        writes none. Block 0 is reserved and stays zero.

        needed: hidden states of other rows are not read and may be any finite numbers. Aux states
        are those of all rows in any case.

        received: the states from the stage before, None in the first pipeline stage; its tensors
        may be written to. A stage that is not the last returns what the next one receives.
        """
        ...

    def aux_ids_before(self, aux_layer_ids: Sequence[int]) -> list[int]:
        """The given aux ids whose states come from earlier pipeline stages."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocabulary.num_rows] of hidden [N, D], soft cap applied, suppressed tokens at
        minus infinity.
        """
        ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings [..., D] of token_ids [...], a new tensor, scaled as the first layer reads
        them (Gemma: by sqrt(D) rounded to the model's dtype).
        """
        ...

    def embed_beside(self, token_ids: Tensor, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """Embeddings of token_ids [B], each concatenated with its row of hidden [B, H], or of
        hidden [T, H] at rows [B] -> [B, D + H].
        """
        ...

    def memory_bytes(self) -> int:
        """Bytes of weights held."""
        ...

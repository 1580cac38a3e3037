"""Keys and values of context features in every layer of a block drafter, by one product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from hydraspec.models.linear import Linear
from hydraspec.models.place import Place

SEPARATE_ON = ("cpu",)  # types of devices on which one product saves no time


class ContextProjection:
    """The key and value columns of all layers' projections, side by side in one matrix: every layer
    reads the same features.

    They are a second copy. A block's rows need a layer's queries, keys and values in one product,
    in this order, and no order of the layers' own slabs has the other columns of all layers beside
    each other.

    Attributes:
        linear: the copy; its columns are those of one layer after another.
    """

    def __init__(self, layers: Sequence[Any], place: Place) -> None:
        """Copies the columns of layers, whose weights are filled and in float."""
        self._copied = [layer.attention.qkv for layer in layers]
        firsts = [layer.attention.num_query_columns for layer in layers]
        widths = {
            f"layers.{i}.kv": qkv.weight.shape[1] - first
            for i, (qkv, first) in enumerate(zip(self._copied, firsts, strict=True))
        }
        first_qkv, place = self._copied[0], replace(place, is_quantised=False)
        self.linear = Linear(place, first_qkv.inputs, widths, bias=first_qkv.bias is not None)
        for qkv, first, (_, _, columns) in zip(
            self._copied, firsts, self.linear.slices(), strict=True
        ):
            self.linear.weight[:, columns].copy_(qkv.weight[:, first:])
            assert (qkv.bias is None) == (self.linear.bias is None), "layers have the same options"
            if qkv.bias is not None and self.linear.bias is not None:
                self.linear.bias[columns].copy_(qkv.bias[first:])

    def is_of(self, layers: Sequence[Any]) -> bool:
        """Returns whether the layers have the projections that were copied, not edited ones."""
        pairs = zip(layers, self._copied, strict=True)
        return all(layer.attention.qkv is qkv for layer, qkv in pairs)

    def forward(self, features: Tensor) -> list[Tensor]:
        """Key and value columns [T, n] of each layer for features [T, D]: views of one tensor."""
        widths = [share.count for share in self.linear.outputs.values()]
        return list(self.linear.forward(features).split(widths, 1))


def context_projection(layers: Sequence[Any], place: Place) -> ContextProjection | None:
    """The projection of layers, once their weights are filled. None where one product would gain
    nothing, or has no matrix: on a CPU, for a single layer, and if any layer's projection is
    quantised."""
    is_quantised = any(layer.attention.qkv.slab is not None for layer in layers)
    is_separate = place.device.type in SEPARATE_ON or is_quantised or len(layers) == 1
    return None if is_separate else ContextProjection(layers, place)

"""Matrices with their place in a checkpoint: linear maps and tables of tokens.

Checkpoints store a matrix per projection. Where several read the same input (queries, keys and
values; gate and up), they are one slab here and one product in a step; each keeps its name in the
checkpoint and its rank's share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy

import torch
from hydraspec_kernels.linear import (
    Activation,
    gated_linear,
    linear,
    linear_partials,
    scaled_gelu_linear,
)
from torch import Tensor
from torch.nn.functional import linear as library_linear

from hydraspec.models.parts import Part, Share, Tensors, Weights, divided, undivided
from hydraspec.models.place import Place
from hydraspec.parallel.vocabulary import Vocabulary


class Linear(Weights):
    """Linear map y = x W + b, x [T, k] -> y [T, n].

    Ranks divide the columns of a map (`outputs`: shares of each projection's outputs), or its rows
    (`inputs`): the ranks' outputs then add up to y, and the first rank alone adds the bias.

    Attributes:
        weight: [k, n] of this rank; see `Place.matrix` for its memory.
        scales: factors of a quantised weight; None: the weight is in a floating-point type.
        bias: [n] of this rank, or None.
    """

    def __init__(
        self,
        place: Place,
        inputs: int | Share,
        outputs: Mapping[str, int | Share],
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        as_stored: bool = False,
    ) -> None:
        """Builds empty weights.

        Args:
            outputs: the projections of the slab, in its order, by their names in the checkpoint
                without ".weight"; a number is a dimension that ranks do not divide.
            dtype: the type of the weight; None: the place's.
            as_stored: keep the checkpoint's order [n, k] in memory on every device.
        """
        self.inputs = undivided(inputs)
        self.outputs = {name: undivided(share) for name, share in outputs.items()}
        columns = sum(share.count for share in self.outputs.values())
        if as_stored:
            self.weight = place.empty(columns, self.inputs.count, dtype=dtype).t()
        else:
            self.weight = place.matrix(self.inputs.count, columns, dtype=dtype)
        self.scales: Tensor | None = None
        self.bias = place.empty(columns, dtype=dtype) if bias else None
        self._adds_bias = not self.inputs.is_part or place.group.rank == 0

    def slices(self) -> Iterator[tuple[str, Share, slice]]:
        """Yields each projection of the slab: its name, its share of outputs, its columns."""
        first = 0
        for name, share in self.outputs.items():
            yield name, share, slice(first, first + share.count)
            first += share.count

    def tensors(self) -> Tensors:
        """Weights and biases by their names in the checkpoint, in its layout [n, k]."""
        found: Tensors = {}
        for name, share, columns in self.slices():
            rows = self.weight[:, columns].t()
            if self.inputs.is_part:
                found[f"{name}.weight"] = Part(rows, 1, self.inputs)
            else:
                found[f"{name}.weight"] = divided(rows, 0, share)
            if self.bias is not None:
                found[f"{name}.bias"] = divided(self.bias[columns], 0, share)
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Output [T, n] for x [T, k]; a rank's addend where ranks divide the inputs."""
        return linear(x, self.weight, self.bias if self._adds_bias else None)

    def partial_sums(self, x: Tensor) -> Tensor:
        """Output [T, n] for x [T, k], or its partial sums [S, T, n], which the next kernel adds."""
        if self.bias is not None:
            return self.forward(x)
        return linear_partials(x, self.weight)

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """Product act(gate(x)) * up(x) [T, n / 2] for x [T, k]; the slab holds gate and up."""
        return gated_linear(x, self.weight, self.bias, activation=activation)

    def gelu_times(self, x: Tensor, factor: Tensor) -> Tensor:
        """Product gelu(x W) * factor [T, n] for x [T, k] and factor [T, n]; without a bias."""
        return scaled_gelu_linear(x, self.weight, factor)

    def by_library(self, x: Tensor, first: int = 0) -> Tensor:
        """Columns `first` and later of `forward`, by the library's product: for float32, and for
        columns that decoding never takes alone, so that no kernel is compiled for them."""
        bias = None if self.bias is None else self.bias[first:]
        return library_linear(x, self.weight[:, first:].t(), bias)

    def with_weight(self, weight: Tensor) -> Linear:
        """A map with another weight of the same shape; it shares all else."""
        assert weight.shape == self.weight.shape
        found = copy(self)
        found.weight = weight
        return found

    def reordered(self, name: str, reorder: Callable[[Tensor], Tensor]) -> Linear:
        """A map in which the rows [n, ...] of projection `name`, of its weight and of its bias as
        the checkpoint has them, are replaced by `reorder` of them."""
        found = self.with_weight(self.weight.clone())
        found.bias = None if self.bias is None else self.bias.clone()
        for each, _, columns in self.slices():
            if each == name:
                rows = self.weight[:, columns].t().contiguous()
                found.weight[:, columns] = reorder(rows).t()
                if found.bias is not None:
                    found.bias[columns] = reorder(found.bias[columns])
        return found

    def swapped(self) -> Linear:
        """A map with its two equally wide projections in each other's places."""
        half = self.weight.shape[1] // 2
        found = self.with_weight(self.weight.roll(half, 1))
        found.bias = None if self.bias is None else self.bias.roll(half)
        return found


class Table(Weights):
    """A row for each token of a vocabulary: an embedding, an output projection, or both where a
    model ties them. Ranks divide the tokens.

    Attributes:
        weight: [vocabulary.num_rows, D] of this rank; rows after its tokens are zero.
    """

    def __init__(
        self, place: Place, vocabulary: Vocabulary, width: int, *, columns: Share | None = None
    ) -> None:
        """Builds empty weights. `columns`: the `width` columns of the checkpoint's tensor that a
        pipeline stage holds; None: all."""
        self.vocabulary, self.width, self.columns = vocabulary, width, columns
        self.weight = place.empty(vocabulary.num_rows, width)
        self.weight[vocabulary.num_tokens :] = 0.0

    def tensors(self) -> Tensors:
        """The rows of this rank's tokens by name, without padding."""
        tokens = self.vocabulary
        if tokens.group.size == 1 and self.columns is None:
            return {"weight": self.weight}
        share = Share(tokens.size, tokens.first, tokens.num_tokens)
        return {"weight": Part(self.weight[: share.count], 0, share, columns=self.columns)}

    def embed(self, token_ids: Tensor, scale: float | None = None) -> Tensor:
        """Rows [..., D] of token_ids [...] in the whole table times scale, a new tensor."""
        return self.vocabulary.embed(token_ids, self.weight, scale)

    def embed_beside(
        self, token_ids: Tensor, scale: float | None, hidden: Tensor, rows: Tensor | None
    ) -> Tensor:
        """Embeddings of token_ids [B], each concatenated with its row of hidden [B, H], or of
        hidden [T, H] at rows [B] -> [B, D + H].
        """
        return self.vocabulary.embed_beside(token_ids, self.weight, scale, hidden, rows)

    def logits(self, x: Tensor, softcap: float | None = None) -> Tensor:
        """This rank's columns [N, num_rows] of the logits of x [N, D], soft cap applied."""
        return linear(x, self.weight.t(), softcap=softcap)

    def of_tokens(self, token_ids: Tensor) -> Table:
        """A table of the rows token_ids [V'] alone, on a single rank."""
        found = copy(self)
        found.vocabulary = Vocabulary(token_ids.shape[0])
        found.weight = self.weight.index_select(0, token_ids)
        return found

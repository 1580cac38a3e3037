"""Matrices with their place in a checkpoint: linear maps and tables of tokens.

Checkpoints store a matrix per projection. Where several read the same input (queries, keys and
values; gate and up), they are one slab here and one product in a step; each keeps its name in the
checkpoint and its rank's share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy

import torch
from hydraspec_kernels.activation import gated_activation, rounded_activation
from hydraspec_kernels.linear import (
    Activation,
    gated_linear,
    linear,
    linear_partials,
    scaled_gelu_linear,
)
from hydraspec_kernels.quantised import MOST_ROWS, RoundedRows, Rounding
from torch import Tensor
from torch.nn.functional import gelu
from torch.nn.functional import linear as library_linear

from hydraspec.models.checkpoint.quantization import Scheme
from hydraspec.models.parts import (
    Part,
    Share,
    Tensors,
    Weights,
    divided,
    divided_matrix,
    undivided,
)
from hydraspec.models.place import Place
from hydraspec.models.quantised.projection import Projection
from hydraspec.models.quantised.slab import Slab
from hydraspec.parallel.vocabulary import Vocabulary


class Linear(Weights):
    """Linear map y = x W + b, x [T, k] -> y [T, n].

    Ranks divide the columns of a map (`outputs`: shares of each projection's outputs), or its rows
    (`inputs`): the ranks' outputs then add up to y, and the first rank alone adds the bias.

    Attributes:
        weight: [k, n] of this rank; see `Place.matrix` for its memory. Without memory where the map
            is quantised.
        slab: the quantised matrix; None: the weight is in a floating-point type.
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
        unpacked: bool = False,
    ) -> None:
        """Builds empty weights.

        Args:
            outputs: the projections of the slab, in its order, by their names in the checkpoint
                without ".weight"; a number is a dimension that ranks do not divide.
            dtype: the type of the weight; None: the place's.
            as_stored: keep the checkpoint's order [n, k] in memory on every device.
            unpacked: a quantised weight becomes one in float once it is read: something else than
                a product reads it.
        """
        self.place, self.dtype = place, dtype
        self.as_stored, self.unpacked = as_stored, unpacked
        self.inputs = undivided(inputs)
        self.outputs = {name: undivided(share) for name, share in outputs.items()}
        self.weight = self._empty(place.of_matrices)
        self.slab: Slab | None = None
        self.bias = place.empty(self.weight.shape[1], dtype=dtype) if bias else None
        self._adds_bias = not self.inputs.is_part or place.group.rank == 0

    def _empty(self, place: Place) -> Tensor:
        """Uninitialised memory of the weight [k, n]."""
        columns = sum(share.count for share in self.outputs.values())
        if self.as_stored:
            return place.empty(columns, self.inputs.count, dtype=self.dtype).t()
        return place.matrix(self.inputs.count, columns, dtype=self.dtype)

    def matrices(self) -> Iterator[tuple[str, Linear]]:
        """Yields this map."""
        yield "", self

    @property
    def projection_names(self) -> list[str]:
        """Names of the modules in a checkpoint that this map holds."""
        return list(self.outputs)

    def projections(self) -> Iterator[Projection]:
        """Yields the quantised projections."""
        if self.slab is not None:
            yield from self.slab.projections()

    def allocate(self, schemes: Mapping[str, Scheme]) -> None:
        """Makes the memory of a map of a quantised checkpoint, from the schemes of its projections,
        by their names; those without one are in float."""
        if not schemes:
            self.weight = self._empty(self.place)
            return
        self.slab = Slab.of(
            self.inputs,
            self.outputs,
            {name: schemes.get(name) for name in self.outputs},
            group=self.place.group,
            dtype=self.dtype or self.place.dtype,
            device=self.place.device,
        )

    def finish_quantised(self, where: str, prefix: str) -> None:
        """Collects scales; call once after a quantised checkpoint's weights are filled. Raises
        CheckpointError, which names the checkpoint and the tensor, for values that cannot be."""
        if self.slab is None or self.place.device.type == "meta":
            return
        for each in self.projections():
            each.check(where, prefix)
        self.slab.finish()
        if self.unpacked:
            self.unpack()

    def slices(self) -> Iterator[tuple[str, Share, slice]]:
        """Yields each projection of the slab: its name, its share of outputs, its columns."""
        first = 0
        for name, share in self.outputs.items():
            yield name, share, slice(first, first + share.count)
            first += share.count

    def tensors(self) -> Tensors:
        """Weights and biases by their names in the checkpoint, in its layout [n, k]."""
        found: Tensors = {} if self.slab is None else self.slab.tensors()
        for name, share, columns in self.slices():
            if self.slab is None:
                rows = self.weight[:, columns].t()
                found[f"{name}.weight"] = divided_matrix(rows, self.inputs, share)
            if self.bias is not None:
                found[f"{name}.bias"] = divided(self.bias[columns], 0, share)
        return found

    @property
    def rounding_before(self) -> Rounding | None:
        """How the kernel that writes up to MOST_ROWS rows x may round them for this map, which then
        takes `RoundedRows`; None: not at all."""
        return None if self.slab is None else self.slab.rounding_before

    def forward(self, x: Tensor | RoundedRows) -> Tensor:
        """Output [T, n] for x [T, k]; a rank's addend where ranks divide the inputs."""
        bias = self.bias if self._adds_bias else None
        if self.slab is None:
            assert isinstance(x, Tensor)
            return linear(x, self.weight, bias)
        y = self.slab.product(x)
        return y if bias is None else y.add_(bias)

    def partial_sums(self, x: Tensor | RoundedRows) -> Tensor:
        """Output [T, n] for x [T, k], or its partial sums [S, T, n], which the next kernel adds."""
        if self.bias is not None:
            return self.forward(x)
        if self.slab is not None:
            return self.slab.partial_sums(x)
        assert isinstance(x, Tensor)
        return linear_partials(x, self.weight)

    def gated(
        self, x: Tensor | RoundedRows, activation: Activation, rounding: Rounding | None = None
    ) -> Tensor | RoundedRows:
        """Product act(gate(x)) * up(x) [T, n / 2] for x [T, k]; the slab holds gate and up.

        rounding: of the map that reads it, if it is to be rounded here (`rounding_before`).
        """
        if self.slab is not None:
            if self.bias is None and (y := self.slab.gated(x, activation)) is not None:
                return y
            both = self.forward(x)
            if rounding is not None and both.shape[0] <= MOST_ROWS:
                return rounded_activation(both, activation, rounding)
            return gated_activation(both, activation)
        assert isinstance(x, Tensor)
        return gated_linear(x, self.weight, self.bias, activation=activation)

    def gelu_times(self, x: Tensor, factor: Tensor) -> Tensor:
        """Product gelu(x W) * factor [T, n] for x [T, k] and factor [T, n]; without a bias."""
        if self.slab is not None:
            return gelu(self.forward(x), approximate="tanh").mul_(factor)
        return scaled_gelu_linear(x, self.weight, factor)

    def by_library(self, x: Tensor | RoundedRows, first: int = 0) -> Tensor:
        """Columns `first` and later of `forward`, by the library's product: for float32, and for
        columns that decoding never takes alone, so that no kernel is compiled for them."""
        bias = None if self.bias is None else self.bias[first:]
        if self.slab is not None:
            y = self.slab.product(x, first)
            return y if bias is None else y.add_(bias)
        assert isinstance(x, Tensor)
        return library_linear(x, self.weight[:, first:].t(), bias)

    def with_weight(self, weight: Tensor) -> Linear:
        """A map with another weight of the same shape; it shares all else."""
        assert weight.shape == self.weight.shape
        assert self.slab is None
        found = copy(self)
        found.weight = weight
        return found

    def reordered(self, name: str, reorder: Callable[[Tensor], Tensor]) -> Linear:
        """A map in which the rows [n, ...] of projection `name`, of its weight and of its bias as
        the checkpoint has them, are replaced by `reorder` of them; the same map if it has no such
        projection."""
        if name not in self.outputs:
            return self
        found = copy(self)
        found.bias = None if self.bias is None else self.bias.clone()
        columns = next(columns for each, _, columns in self.slices() if each == name)
        if found.bias is not None:
            found.bias[columns] = reorder(found.bias[columns])
        if self.slab is not None:
            found.slab = self.slab.reordered(columns, reorder)
        else:
            found.weight = self.weight.clone()
            rows = self.weight[:, columns].t().contiguous()
            found.weight[:, columns] = reorder(rows).t()
        return found

    def unpack(self) -> None:
        """Turns a quantised matrix into a float one, whose rows are not rounded."""
        if self.slab is not None:
            self.weight = self._empty(self.place)
            self.weight.copy_(self.slab.decoded(self.weight.dtype).t())
            self.slab = None

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

"""The layers of DFlash2: DenseLayer with a short convolution before and after attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping

from hydraspec_kernels.convolution import block_convolution
from hydraspec_kernels.quantised import RoundedRows
from torch import Tensor

from hydraspec.models.dense.config import DenseConfig
from hydraspec.models.dense.layer import DenseLayer
from hydraspec.models.draft_place import whole
from hydraspec.models.kv_groups import GroupPass
from hydraspec.models.linear import Linear
from hydraspec.models.parts import Weights
from hydraspec.models.place import Place


class Convolutions(Weights):
    """The convolutions around one part of a layer, over the rows of a block. Each row's taps are a
    base plus what a map of the part's input gives, alike for groups of columns.

    Every rank holds them whole: they are linear in what they convolve, so that a rank's addends
    may be convolved before they are summed.
    """

    names: Mapping[str, str] = {"base": "base_kernel", "projection": ""}

    def __init__(self, size: int, taps: int, group: int, place: Place) -> None:
        """Builds empty weights. size: width of rows; group: columns that share a row's tap."""
        self.sizes = (2, taps, size // group)
        self.base = place.empty(2, taps, size)  # of the part's input, and of its output
        count = 2 * taps * (size // group)
        self.projection = Linear(whole(place), size, {"kernel_projection": count})

    def taps(self, y: Tensor) -> Tensor:
        """What rows y [T, D] add to the base, [T, 2, taps, D / group]."""
        found: Tensor = self.projection.forward(y).unflatten(1, self.sizes)
        return found

    def before(self, y: Tensor, taps: Tensor, rows_per_block: int) -> Tensor:
        """The part's input [T, D] from its rows y [T, D] and their taps."""
        return block_convolution(y, taps[:, 0], self.base[0], rows_per_block)

    def after(self, x: Tensor, taps: Tensor, rows_per_block: int) -> Tensor:
        """The convolved output [T, D] of the part, from its output x [T, D] or partial sums [S, T,
        D]."""
        summed = x.sum(0).to(taps.dtype) if x.dim() == 3 else x
        return block_convolution(summed, taps[:, 1], self.base[1], rows_per_block)


class ConvolvedLayer(DenseLayer):
    """Pre-norm layer whose attention and MLP each read and write through convolutions."""

    names: Mapping[str, str] = {
        **DenseLayer.names,
        "attention_conv": "attention_conv.",
        "mlp_conv": "mlp_conv.",
    }

    def __init__(
        self, config: DenseConfig, index: int, place: Place, *, taps: int, group: int
    ) -> None:
        super().__init__(config, index, place)
        self.attention_conv = Convolutions(config.hidden_size, taps, group, place)
        self.mlp_conv = Convolutions(config.hidden_size, taps, group, place)

    def finish(self) -> None:
        """Norms never round here: convolutions read their rows."""

    def attend(self, y: Tensor | RoundedRows, shared: GroupPass, cache: Tensor) -> Tensor:
        """See `PreNormLayer.attend`, for blocks of equally many rows."""
        assert isinstance(y, Tensor)
        conv, rows = self.attention_conv, shared.rows_per_request
        taps = conv.taps(y)
        x = super().attend(conv.before(y, taps, rows), shared, cache)
        return conv.after(x, taps, rows)

    def transform(self, y: Tensor | RoundedRows, shared: GroupPass) -> Tensor:
        """See `PreNormLayer.transform`, for blocks of equally many rows."""
        assert isinstance(y, Tensor)
        conv, rows = self.mlp_conv, shared.rows_per_request
        taps = conv.taps(y)
        x = super().transform(conv.before(y, taps, rows), shared)
        return conv.after(x, taps, rows)

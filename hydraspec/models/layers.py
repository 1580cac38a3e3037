"""Parts of a decoder layer: where weights live, norms, the gated MLP, per-layer inputs.

Matrices are seen as [in, out] (`Place.matrix`). Every part allocates its weights empty, names them
as checkpoints do through `tensors` (name -> view of the checkpoint's shape), and is finished once
they are filled.

A model runs in one of two ways. "Folded" (float32 and float64 on the CPU): norm weights move into
the matrix that follows, or into one gain, which saves two operators a norm; parts are called.
Everywhere else the published order of operations is kept, and so its rounding; parts offer
`partials` and layers `advance`, over operations that are one kernel each on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hydraspec_kernels.activation import gated_activation
from hydraspec_kernels.linear import gated_linear, linear, linear_partials, scaled_gelu_linear
from hydraspec_kernels.norms import add_norm, rms_norm, unit_norm
from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass(slots=True, frozen=True)
class Place:
    """Where weights live, and in what type."""

    dtype: torch.dtype
    device: torch.device

    @property
    def folded(self) -> bool:
        return self.device.type == "cpu" and self.dtype in (torch.float32, torch.float64)

    def matrix(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An empty [..., k, n] for rows to be multiplied with.

        On a CPU it is contiguous, which spares `torch.mm` a microsecond a call. Elsewhere it is
        the view of [..., n, k] storage, as checkpoints hold it and the kernels read it.
        """
        if self.device.type == "cpu":
            return self.empty(*shape, dtype=dtype)
        *batch, k, n = shape
        return self.empty(*batch, n, k, dtype=dtype).transpose(-1, -2)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def number(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=self.dtype, device=self.device)


class Norm:
    """RMSNorm over the last dimension with a plain weight.

    The residual stream is held as h / c (see DecoderLayer), so a norm that reads it divides its
    eps by c^2, and one that adds to it divides its gain by c.
    """

    def __init__(self, size: int, eps: float, place: Place) -> None:
        self.weight = place.empty(size)
        self.eps, self.place = eps, place
        self.folded = place.folded
        self.floor: Tensor = place.number(math.sqrt(size * eps))

    def fold_into(self, *matrices: Tensor, stream_scale: float) -> None:
        """Move weight and sqrt(size) into matrices [..., size, out] that read the normed stream."""
        if self.folded:
            size = self.weight.shape[0]
            for matrix in matrices:
                matrix.mul_((self.weight * math.sqrt(size))[:, None])
            self.floor = self.place.number(math.sqrt(size * self.eps) / stream_scale)

    def fold_gain(self, *, stream_in: float = 1.0, stream_out: float = 1.0) -> None:
        """Make `scaled` and `add` read a stream of scale stream_in and write one of scale
        stream_out.
        """
        if self.folded:
            size = self.weight.shape[0]
            self.weight.mul_(math.sqrt(size) / stream_out)
            self.floor = self.place.number(math.sqrt(size * self.eps) / stream_in)

    def normed(self, x: Tensor) -> Tensor:
        """norm(x) for a matrix this norm was folded into."""
        return unit_norm(x, self.floor) if self.folded else rms_norm(x, self.weight, self.eps)

    def scaled(self, x: Tensor) -> Tensor:
        """norm(x), weight included."""
        if self.folded:
            return unit_norm(x, self.floor).mul_(self.weight)
        return rms_norm(x, self.weight, self.eps)

    def add(self, h: Tensor, x: Tensor) -> Tensor:
        """Folded: h + norm(x). Elsewhere see `join`."""
        return torch.addcmul(h, unit_norm(x, self.floor), self.weight)


def join(
    h: Tensor, x: Tensor, *, post: Norm | None, then: Norm | None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """(h + post(x)) * scale into the stream h [T, D] itself, and then(h): what the next part reads.

    x is a block's output [T, D] or partial sums of it [S, T, D]. post None adds it as it is
    (pre-norm decoders); then None: the next part reads the stream.
    """
    assert post is None or then is None or post.eps == then.eps, "one kernel takes one eps"
    norm = then or post
    joined = add_norm(
        h,
        x,
        post_weight=None if post is None else post.weight,
        next_weight=None if then is None else then.weight,
        eps=0.0 if norm is None else norm.eps,
        scale=scale,
        has_post_norm=post is not None,
    )
    return joined.h, joined.h if joined.y is None else joined.y


class GatedMLP:
    """down(gelu_tanh(gate(x)) * up(x))."""

    def __init__(self, size: int, inner: int, place: Place) -> None:
        self.inner = inner
        self.gate_up = place.matrix(size, 2 * inner)
        self.down = place.matrix(inner, size)

    def tensors(self) -> Tensors:
        return {
            "gate_proj.weight": self.gate_up[:, : self.inner].t(),
            "up_proj.weight": self.gate_up[:, self.inner :].t(),
            "down_proj.weight": self.down.t(),
        }

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(gated_activation(torch.mm(x, self.gate_up)), self.down)

    def whole(self, x: Tensor) -> Tensor:
        """x [T, D] -> [T, D]."""
        return linear(gated_linear(x, self.gate_up, activation="gelu_tanh"), self.down)

    def partials(self, x: Tensor) -> Tensor:
        """x [T, D] -> partial sums [S, T, D]."""
        return linear_partials(gated_linear(x, self.gate_up, activation="gelu_tanh"), self.down)


class PerLayerInput:
    """The part of a layer that mixes in its slice of the per-layer embeddings (PLE)."""

    def __init__(self, size: int, width: int, eps: float, place: Place) -> None:
        self.gate = place.matrix(size, width)
        self.projection = place.matrix(width, size)
        self.norm = Norm(size, eps, place)

    def tensors(self) -> Tensors:
        return {
            "per_layer_input_gate.weight": self.gate.t(),
            "per_layer_projection.weight": self.projection.t(),
            "post_per_layer_input_norm.weight": self.norm.weight,
        }

    def finish(self, stream_scale: float) -> None:
        if self.norm.folded:
            self.gate.mul_(stream_scale)  # the gate reads the stream without a norm
        self.norm.fold_gain(stream_out=stream_scale)

    def __call__(self, h: Tensor, inputs: Tensor) -> Tensor:
        """Folded: h [T, D] and this layer's inputs [T, width] -> [T, D]."""
        gate = torch.nn.functional.gelu(torch.mm(h, self.gate), approximate="tanh").mul_(inputs)
        return self.norm.add(h, torch.mm(gate, self.projection))

    def partials(self, h: Tensor, inputs: Tensor) -> Tensor:
        """h [T, D] and this layer's inputs [T, width] -> what `norm` takes, [S, T, D]."""
        return linear_partials(scaled_gelu_linear(h, self.gate, inputs), self.projection)

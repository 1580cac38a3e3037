"""Parts of a decoder layer that families share: norms, residual sum, gated MLP, pre-norm layer.

A layer carries the residual stream and its norm side by side: `forward(h, y, ...)` takes the stream
h and y = input_norm(h), and returns the stream after the layer and its norm for the next reader.
Residual sum and norms in between are one operation (`add_and_norm`), one kernel on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from hydraspec_kernels.linear import Activation
from hydraspec_kernels.norms import (
    AddNormOptions,
    NormGain,
    add_norm,
    add_norm_cpu,
    rms_norm,
    rms_norm_cpu,
)
from hydraspec_kernels.quantised import MOST_ROWS, RoundedRows, Rounding
from torch import Tensor

from hydraspec.models.kv_groups import GroupPass
from hydraspec.models.linear import Linear
from hydraspec.models.parts import Weights
from hydraspec.models.place import Place
from hydraspec.parallel.group import SOLO, TensorGroup


class Norm(Weights):
    """RMSNorm over the last dimension with a plain weight."""

    names: Mapping[str, str] = {"weight": "weight"}

    def __init__(self, size: int, eps: float, place: Place) -> None:
        self.weight = place.empty(size)
        self.eps, self.uses_cpu_norms = eps, place.uses_cpu_norms
        # Of the quantised map that alone reads what `add_and_norm` computes by this norm.
        self.rounding: Rounding | None = None

    @cached_property
    def gain(self) -> NormGain | None:
        """The gain for the CPU functions, computed at the first use; None if they do not run."""
        return NormGain.of(self.weight, self.eps) if self.uses_cpu_norms else None

    def forward(self, x: Tensor) -> Tensor:
        """Norm of x [..., size], a new tensor of the same shape."""
        if self.gain is not None:
            return rms_norm_cpu(x, self.gain)
        return rms_norm(x, self.weight, self.eps)


def add_and_norm(
    h: Tensor,
    x: Tensor,
    *,
    post: Norm | None,
    next_norm: Norm | None,
    scale: float | None = None,
    group: TensorGroup = SOLO,
) -> tuple[Tensor, Tensor | RoundedRows]:
    """Residual sum: sets the stream h [T, D] to (h + post(x)) * scale in place. Returns h, and
    next_norm(h) for the next part, rounded if the norm says how and the rows are few.

    x is a block's output [T, D] or its partial sums [S, T, D], of which every rank of `group` has
    some. post None: x is added as it is (pre-norm decoders); next_norm None: the next part reads
    the stream, so that h is returned twice.
    """
    norm = next_norm or post
    assert norm is None or post is None or post.eps == norm.eps, "one kernel takes one eps"
    if group.size > 1:
        summed = group.add_norm(h, x, **_kernel_options(post, next_norm, scale))
        if summed is not None:
            return summed.h, summed.h if summed.y is None else summed.y
        x = group.all_reduce(x.sum(0).to(h.dtype) if x.dim() == 3 else x)
    if norm is not None and norm.gain is not None:
        post_gain = None if post is None else post.gain
        next_gain = None if next_norm is None else next_norm.gain
        summed = add_norm_cpu(h, x, post=post_gain, next_norm=next_gain, scale=scale)
    else:
        rounding = None if next_norm is None or h.shape[0] > MOST_ROWS else next_norm.rounding
        summed = add_norm(h, x, rounding=rounding, **_kernel_options(post, next_norm, scale))
    return summed.h, summed.h if summed.y is None else summed.y


def _kernel_options(
    post: Norm | None, next_norm: Norm | None, scale: float | None
) -> AddNormOptions:
    norm = next_norm or post
    return {
        "post_weight": None if post is None else post.weight,
        "next_weight": None if next_norm is None else next_norm.weight,
        "eps": 0.0 if norm is None else norm.eps,
        "scale": scale,
        "has_post_norm": post is not None,
    }


class GatedMLP(Weights):
    """Gated MLP down(act(gate(x)) * up(x)). Ranks divide the inner width; their outputs add up."""

    names: Mapping[str, str] = {"gate_up": "", "down": ""}

    def __init__(
        self, size: int, inner: int, place: Place, *, activation: Activation, bias: bool = False
    ) -> None:
        self.activation, columns = activation, place.share(inner)
        self.gate_up = Linear(place, size, {"gate_proj": columns, "up_proj": columns}, bias=bias)
        self.down = Linear(place, columns, {"down_proj": size}, bias=bias)

    @property
    def rounding_before(self) -> Rounding | None:
        """See `Linear.rounding_before`."""
        return self.gate_up.rounding_before

    def forward(self, x: Tensor | RoundedRows) -> Tensor:
        """Output [T, D] for x [T, D]; a rank's addend where ranks divide the inner width."""
        return self.down.forward(self._inner(x))

    def partial_sums(self, x: Tensor | RoundedRows) -> Tensor:
        """Output [T, D] for x [T, D], or its partial sums [S, T, D]."""
        return self.down.partial_sums(self._inner(x))

    def _inner(self, x: Tensor | RoundedRows) -> Tensor | RoundedRows:
        return self.gate_up.gated(x, self.activation, self.down.rounding_before)


class PreNormLayer(Weights):
    """Pre-norm decoder layer: h -> h + attention(norm(h)), then h -> h + mlp(norm(h)).

    Attributes:
        attention: has `partial_sums(y, shared, cache)` and `tensors()`.
        mlp: has `partial_sums(y)` and `tensors()`.
        input_norm: None leaves the first norm out (EAGLE-1's Llama heads).
    """

    names: Mapping[str, str] = {
        "attention": "self_attn.",
        "mlp": "mlp.",
        "input_norm": "input_layernorm.",
        "post_attention_norm": "post_attention_layernorm.",
    }

    def __init__(
        self,
        kind: str,
        attention: Any,
        mlp: Any,
        *,
        size: int,
        eps: float,
        place: Place,
        has_input_norm: bool = True,
    ) -> None:
        self.kind, self.group, self.attention, self.mlp = kind, place.group, attention, mlp
        self.input_norm = Norm(size, eps, place) if has_input_norm else None
        self.post_attention_norm = Norm(size, eps, place)

    def finish(self) -> None:
        """Computes derived weights, if there are any; call once after the weights are filled."""

    def forward(
        self,
        h: Tensor,
        y: Tensor | RoundedRows,
        shared: GroupPass,
        cache: Tensor,
        next_norm: Norm | None,
    ) -> tuple[Tensor, Tensor | RoundedRows]:
        """The stream after the layer, and its norm by `next_norm`, for the stream h [T, D] (changed
        in place) and the attention's input y [T, ...], mostly input_norm(h).
        """
        attended = self.attend(y, shared, cache)
        norm, group = self.post_attention_norm, self.group
        h, y = add_and_norm(h, attended, post=None, next_norm=norm, group=group)
        m = self.transform(y, shared)
        return add_and_norm(h, m, post=None, next_norm=next_norm, group=group)

    def attend(self, y: Tensor | RoundedRows, shared: GroupPass, cache: Tensor) -> Tensor:
        """The attention's output [T, D] for its input y, or partial sums [S, T, D]."""
        out: Tensor = self.attention.partial_sums(y, shared, cache)
        return out

    def transform(self, y: Tensor | RoundedRows, shared: GroupPass) -> Tensor:
        """The MLP's output [T, D] for its input y, or partial sums [S, T, D]."""
        out: Tensor = self.mlp.partial_sums(y)
        return out

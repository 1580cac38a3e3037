"""Parts of a decoder layer that families share: where weights live, norms, the gated MLP.

Matrices are seen as [in, out] (`Place.matrix`). Every part allocates its weights empty and names
them as checkpoints do through `tensors` (name -> view of the checkpoint's shape).

A layer carries the residual stream and its norm side by side: `forward(h, y, ...)` takes the stream
h and y = input_norm(h), and returns the stream after the layer and its norm by whatever reads it
next. Residual sum and norms in between are one operation (`add_and_norm`), one kernel on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from hydraspec_kernels.linear import Activation, gated_linear, linear, linear_partials
from hydraspec_kernels.norms import (
    AddNormOptions,
    NormGain,
    add_norm,
    add_norm_cpu,
    rms_norm,
    rms_norm_cpu,
)
from hydraspec_kernels.rope import Frequencies, mirrored
from torch import Tensor

from hydraspec.models.parts import Part, Share, Tensors, Weight
from hydraspec.models.stages import WHOLE, Stage
from hydraspec.parallel.group import SOLO, TensorGroup
from hydraspec.parallel.vocabulary import Vocabulary


@dataclass(slots=True, frozen=True)
class Place:
    """Where weights live, in what type, which ranks share them, and which pipeline stage."""

    dtype: torch.dtype
    device: torch.device
    group: TensorGroup = SOLO
    stage: Stage = WHOLE

    def if_held(self, is_held: bool) -> Place:
        """This place for what its stage holds; otherwise one without memory, where weights have
        names and shapes alone.
        """
        return self if is_held else replace(self, device=torch.device("meta"))

    def share(self, size: int) -> Share:
        """This rank's share of a dimension that the ranks divide evenly."""
        count = size // self.group.size
        assert count * self.group.size == size, f"{size} does not divide by {self.group.size}"
        return Share(size, self.group.rank * count, count)

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[Share, Share]:
        """This rank's query heads and the KV heads that they read. Where there are fewer KV heads
        than ranks, several ranks hold the same one.
        """
        size, rank = self.group.size, self.group.rank
        queries = self.share(num_heads)
        if num_kv_heads % size == 0:
            return queries, self.share(num_kv_heads)
        assert size % num_kv_heads == 0, f"{num_kv_heads} KV heads on {size} ranks"
        return queries, Share(num_kv_heads, rank * num_kv_heads // size, 1)

    def part(self, tensor: Tensor, dim: int, share: Share, repeats: int = 1) -> Weight:
        """A weight of which this rank holds `share` of dimension `dim`; see `Part`."""
        is_whole = share.count == share.size
        return tensor if is_whole else Part(tensor, dim, share, repeats)

    @property
    def uses_cpu_norms(self) -> bool:
        """Returns whether norms run as the few operators of `cpu.py`. Narrow types keep the
        reference's order of rounding.
        """
        return self.device.type == "cpu" and self.dtype in (torch.float32, torch.float64)

    @property
    def wide(self) -> torch.dtype:
        """float32, or float64 of a float64 model: for sums that must not round to a narrow type."""
        return torch.promote_types(self.dtype, torch.float32)

    def frequencies(self, theta: Tensor) -> Frequencies:
        """Rotary frequencies theta [H/2] of a whole head, wide."""
        return mirrored(theta.to(self.device, self.wide))

    def matrix(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An empty [..., k, n] for rows to be multiplied with.

        On a CPU it is contiguous, which spares `torch.mm` a microsecond a call. Elsewhere it is
        the view of [..., n, k] storage, as checkpoints hold it and the kernels read it.
        """
        if self.device.type == "cpu":
            return self.empty(*shape, dtype=dtype)
        *batch, k, n = shape
        return self.empty(*batch, n, k, dtype=dtype).transpose(-1, -2)

    def table(self, vocabulary: Vocabulary, width: int) -> Tensor:
        """An empty [vocabulary.num_rows, width]; padding rows are zero."""
        table = self.empty(vocabulary.num_rows, width)
        table[vocabulary.num_tokens :] = 0.0
        return table

    def rows(self, table: Tensor, vocabulary: Vocabulary, columns: Share | None = None) -> Weight:
        """A table as a weight: this rank's tokens, without padding, and some columns (all if
        None)."""
        share = Share(vocabulary.size, vocabulary.first, vocabulary.num_tokens)
        if self.group.size == 1 and columns is None:
            return table
        return Part(table[: share.count], 0, share, columns=columns)

    def once(self, bias: Tensor | None) -> Tensor | None:
        """A bias of a sum over ranks, on the one rank that adds it."""
        return bias if self.group.rank == 0 else None

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor here, of this place's dtype unless another is given."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)


class Norm:
    """RMSNorm over the last dimension with a plain weight."""

    def __init__(self, size: int, eps: float, place: Place) -> None:
        self.weight = place.empty(size)
        self.eps, self.uses_cpu_norms = eps, place.uses_cpu_norms

    @cached_property
    def gain(self) -> NormGain | None:
        """What the CPU functions read, computed at the first use; None where they do not run."""
        return NormGain.of(self.weight, self.eps) if self.uses_cpu_norms else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape, a new tensor."""
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
) -> tuple[Tensor, Tensor]:
    """(h + post(x)) * scale into the stream h [T, D] itself, and next_norm(h): what the next part
    reads.

    x is a block's output [T, D] or partial sums of it [S, T, D], of which every rank of `group`
    has some. post None adds it as it is (pre-norm decoders); next_norm None: the next part reads
    the stream.
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
        summed = add_norm(h, x, **_kernel_options(post, next_norm, scale))
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


class GatedMLP:
    """down(act(gate(x)) * up(x)). Ranks divide the inner width: what each returns adds up to it."""

    def __init__(
        self, size: int, inner: int, place: Place, *, activation: Activation, bias: bool = False
    ) -> None:
        self.place, self.activation = place, activation
        self.columns = place.share(inner)
        self.inner = inner = self.columns.count
        self.gate_up = place.matrix(size, 2 * inner)
        self.down = place.matrix(inner, size)
        self.gate_up_bias = place.empty(2 * inner) if bias else None
        self.down_bias = place.empty(size) if bias else None

    def tensors(self) -> Tensors:
        """Weights by their names below `mlp.`."""
        part, columns = self.place.part, self.columns
        found: Tensors = {
            "gate_proj.weight": part(self.gate_up[:, : self.inner].t(), 0, columns),
            "up_proj.weight": part(self.gate_up[:, self.inner :].t(), 0, columns),
            "down_proj.weight": part(self.down.t(), 1, columns),
        }
        if self.gate_up_bias is not None and self.down_bias is not None:
            found["gate_proj.bias"] = part(self.gate_up_bias[: self.inner], 0, columns)
            found["up_proj.bias"] = part(self.gate_up_bias[self.inner :], 0, columns)
            found["down_proj.bias"] = self.down_bias
        return found

    def forward(self, x: Tensor) -> Tensor:
        """x [T, D] -> [T, D]."""
        inner = gated_linear(x, self.gate_up, self.gate_up_bias, activation=self.activation)
        return linear(inner, self.down, self.place.once(self.down_bias))

    def partial_sums(self, x: Tensor) -> Tensor:
        """The same as [T, D], or as partial sums of it [S, T, D]."""
        if self.down_bias is not None:
            return self.forward(x)
        inner = gated_linear(x, self.gate_up, self.gate_up_bias, activation=self.activation)
        return linear_partials(inner, self.down)


def prefixed(prefix: str, tensors: Tensors) -> Tensors:
    """The same tensors by longer names."""
    return {prefix + name: tensor for name, tensor in tensors.items()}

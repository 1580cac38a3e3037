"""Rotary position embedding (Su et al. 2021), rotating dimension i with dimension i + H/2.

theta_i = base^(-2i/H) / factor for the first `share` of the H/2 pairs, and 0 (no rotation) for
the rest: with share 1 this is the usual embedding, with share < 1 Gemma 4's "proportional" one,
whose exponent keeps the full H.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def rope_frequencies(head_dim: int, base: float, share: float = 1.0, factor: float = 1.0) -> Tensor:
    """Rotary frequencies theta [H/2] in float32: radians a position."""
    rotated = int(share * head_dim // 2)
    exponent = torch.arange(0, 2 * rotated, 2, dtype=torch.int64).float() / head_dim
    theta = torch.zeros(head_dim // 2)
    theta[:rotated] = 1.0 / base**exponent
    return theta / factor


class Frequencies(NamedTuple):
    """Frequencies of both halves of a head: theta twice for cosines; -theta, theta for sines."""

    cos: Tensor  # [H]
    sin: Tensor  # [H]


def mirrored(theta: Tensor) -> Frequencies:
    """Frequencies of both halves of a head from theta [H/2]."""
    return Frequencies(torch.cat((theta, theta)), torch.cat((-theta, theta)))


def rope_table_reference(
    positions: Tensor, frequencies: Frequencies, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `hydraspec_kernels.rope.rope_table`."""
    t = positions.to(frequencies.cos.dtype)[:, None, None]
    cos, sin = (t * frequencies.cos).cos_(), (t * frequencies.sin).sin_()
    return (cos, sin) if cos.dtype == dtype else (cos.to(dtype), sin.to(dtype))


def apply_rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `hydraspec_kernels.rope.apply_rope`."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return x.mul_(cos).addcmul_(swapped, sin)

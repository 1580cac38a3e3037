"""Rotary frequencies of checkpoints that stretch them: linear, dynamic, Llama 3 and YaRN scaling.

Both published layouts are read: `rope_theta` beside `rope_scaling`, and one `rope_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from hydraspec_kernels.rope import rope_frequencies
from torch import Tensor

from hydraspec.models.checkpoint.config_reader import ConfigReader

DEFAULT_THETA = 10_000.0
MIN_THETA = 2.0  # released ones are above 1,000; YaRN divides by the logarithm
MAX_GAIN = 1e4  # of cosines and sines: released ones are below 3, and scores have its square
BETA, LENGTH = "llama_4_scaling_beta", "original_max_position_embeddings"


class Rope(NamedTuple):
    """Rotary frequencies, and a factor of cosines and sines, as a config gives them."""

    theta: Tensor  # [H/2] float32 on the CPU: radians a position
    # YaRN's factor of cosines and sines. Query and key both carry it, so that folding its square
    # into the score scale leaves the table plain.
    gain: float
    query_beta: float = 0.0  # growth of queries with their positions; 0: none
    query_length: int = 1  # positions over which they keep their size

    def query_scale(self, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Factors [T, 1] of queries at positions p [T], as Llama 4 scales them for long contexts:
        1 + beta * log(1 + floor(p / length)); None if all are 1.
        """
        if not self.query_beta:
            return None
        steps = positions.div(self.query_length, rounding_mode="floor")
        return (steps.float().log1p_() * self.query_beta + 1).to(dtype)[:, None]


def read_rope(
    reader: ConfigReader,
    head_dim: int,
    max_position_embeddings: int,
    known: Collection[str] | None = None,
) -> Rope:
    """Rotary frequencies of a raw config. Raises CheckpointError for unsupported scalings.

    known: the rotary parameters of a family that has no others, and scales queries if BETA is among
    them; None: others are ignored.
    """
    key = "rope_scaling" if reader.get("rope_scaling") else "rope_parameters"
    values = reader.get(key, {})
    if not isinstance(values, Mapping) or any(isinstance(v, Mapping) for v in values.values()):
        raise reader.fail(key, "one set of rotary parameters for all layers")
    kind = values.get("rope_type", values.get("type", "default"))
    scaled = SCALINGS.get(kind)
    if scaled is None or values.get("partial_rotary_factor", 1.0) != 1.0:
        raise reader.fail(key, f"rope_type {', '.join(SCALINGS)}, turning the whole head")
    part = ConfigReader(
        {"rope_theta": reader.get("rope_theta", DEFAULT_THETA)} | dict(values), reader.where
    )
    part.defaults = {LENGTH: max_position_embeddings}
    rope, full = scaled(part, head_dim), reader.part(key, values)
    unknown = [] if known is None else [name for name in values if name not in known]
    if known is not None and unknown:
        raise full.fail(f"{key}.{unknown[0]}", f"only {', '.join(sorted(known))}")
    if not values.get(BETA):
        return rope
    if known is None or BETA not in known:
        raise full.fail(f"{key}.{BETA}", "0 or nothing: queries are not scaled")
    beta = full.number(f"{key}.{BETA}", most=MAX_GAIN)
    return rope._replace(query_beta=beta, query_length=full.count(f"{key}.{LENGTH}"))


def _plain(reader: ConfigReader, head_dim: int) -> Rope:
    # Dynamic scaling starts beyond max_position_embeddings, where no run goes.
    return Rope(rope_frequencies(head_dim, reader.number("rope_theta", least=MIN_THETA)), 1.0)


def _linear(reader: ConfigReader, head_dim: int) -> Rope:
    """Position interpolation (Chen et al. 2023): positions are divided by `factor`."""
    theta = rope_frequencies(
        head_dim, reader.number("rope_theta", least=MIN_THETA), factor=reader.number("factor")
    )
    return Rope(theta, 1.0)


def _llama3(reader: ConfigReader, head_dim: int) -> Rope:
    """Scaling of Llama 3.1: frequencies that turn fewer than low_freq_factor times in the original
    context are divided by `factor`, those above high_freq_factor kept, those between blended.
    """
    theta = rope_frequencies(head_dim, reader.number("rope_theta", least=MIN_THETA))
    factor, original = reader.number("factor"), reader.number(LENGTH)
    low, high = reader.number("low_freq_factor"), reader.number("high_freq_factor")
    if not low < high:
        raise reader.fail("high_freq_factor", f"a number above low_freq_factor, which is {low:g}")
    turns = original / (2 * math.pi / theta)  # within the original context
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return Rope((1 - smooth) * theta / factor + smooth * theta, 1.0)


def _yarn(reader: ConfigReader, head_dim: int) -> Rope:
    """YaRN (Peng et al. 2023), as transformers computes it: section 3.2's ramp over dimensions, and
    section 3.4's temperature as a gain of cosines and sines.
    """
    base, factor = reader.number("rope_theta", least=MIN_THETA), reader.number("factor")
    original = reader.number(LENGTH)
    if reader.get("attention_factor") is not None:
        gain = reader.number("attention_factor", most=MAX_GAIN)
    elif reader.get("mscale") and reader.get("mscale_all_dim"):
        mscale, all_dim = (
            reader.number(key, most=MAX_GAIN) for key in ("mscale", "mscale_all_dim")
        )
        gain = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    else:
        gain = yarn_mscale(factor)

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = (
        dimension(reader.number("beta_fast", 32.0)),
        dimension(reader.number("beta_slow", 1.0)),
    )
    if reader.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    keep = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    theta = rope_frequencies(head_dim, base)
    return Rope(theta / factor * (1 - keep) + theta * keep, gain)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's recommended gain for a context stretched by `factor` (paper, equation 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


SCALINGS: dict[Any, Callable[[ConfigReader, int], Rope]] = {
    "default": _plain,
    "linear": _linear,
    "dynamic": _plain,
    "llama3": _llama3,
    "yarn": _yarn,
}

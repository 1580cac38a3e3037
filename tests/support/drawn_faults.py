"""Damage drawn by chance in the files of the zoo's drafters: a weight, an operation on it and a
strength. A seed draws the same on every machine.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hydraspec.models.checkpoint.reader import resolve_folder

Rng = np.random.Generator


@dataclass(slots=True)
class Files:
    """A drafter's files: its configuration and its tensors by name."""

    config: dict  # type: ignore[type-arg]
    tensors: dict[str, Tensor]
    config_name: str
    weights_name: str
    folder: Path

    @classmethod
    def of(cls, checkpoint: str) -> Files:
        """The files of a checkpoint, such as "zoo:tiny_qwen3-eagle3"."""
        folder = resolve_folder(checkpoint)
        (weights,) = folder.glob("*.safetensors")
        (config,) = (p for p in (folder / "config.json", folder / "params.json") if p.is_file())
        return cls(
            json.loads(config.read_text()), load_file(weights), config.name, weights.name, folder
        )

    def drafters_weights(self) -> list[str]:
        """Names of the drafter's weights; a target's own layers are not among them."""
        found = [n for n, t in self.tensors.items() if t.is_floating_point() and t.numel() > 1]
        mtp = f"model.layers.{self.config.get('num_hidden_layers')}."
        return [n for n in found if n.startswith(mtp)] if self._has_mtp else found

    @property
    def unread(self) -> list[str]:
        """Copies of the target's tables beside an MTP layer, which no engine reads."""
        ends = ("embed_tokens.weight", "shared_head.head.weight")
        return [n for n in self.tensors if self._has_mtp and n.endswith(ends)]

    @property
    def _has_mtp(self) -> bool:
        return bool(self.config.get("num_nextn_predict_layers"))

    def write(self, folder: Path) -> None:
        """Write a whole checkpoint folder, without the card that says what the drafter reaches."""
        shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns("README.md"))
        (folder / self.config_name).write_text(json.dumps(self.config))
        (folder / self.weights_name).unlink()
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, folder / self.weights_name)


@dataclass(slots=True, frozen=True, kw_only=True)
class Drawn:
    """A fault.

    Attributes:
        says: operation and strength.
        names: the weights that were changed.
    """

    says: str
    names: tuple[str, ...]


# ------------------------------------------------------------------ operations on one weight


Operation = Callable[[Tensor, Rng, torch.Generator], tuple[Tensor, str] | None]


def noise(w: Tensor, rng: Rng, draw: torch.Generator) -> tuple[Tensor, str]:
    strength = float(rng.choice([0.1, 0.25, 0.5, 1.0]))
    return w + torch.randn(w.shape, generator=draw) * w.std() * strength, f"noise of {strength} std"


def zero(w: Tensor, rng: Rng, draw: torch.Generator) -> tuple[Tensor, str]:
    return torch.zeros_like(w), "zero"


def zero_block(w: Tensor, rng: Rng, draw: torch.Generator) -> tuple[Tensor, str]:
    dim, share = int(rng.integers(w.dim())), float(rng.choice([0.25, 0.5]))
    count = int(w.shape[dim] * share)
    first = int(rng.integers(w.shape[dim] - count + 1))
    w = w.clone()
    w.narrow(dim, first, count).zero_()
    return w, f"{share:.0%} of dimension {dim} zero"


def scale(w: Tensor, rng: Rng, draw: torch.Generator) -> tuple[Tensor, str]:
    factor = float(rng.choice([0.1, 0.3, 3.0, 10.0]))
    return w * factor, f"times {factor:g}"


def outliers(w: Tensor, rng: Rng, draw: torch.Generator) -> tuple[Tensor, str]:
    value, count = float(rng.choice([1e2, 1e3, 1e4])), int(rng.choice([1, 4]))
    w = w.clone()
    w.view(-1)[torch.randperm(w.numel(), generator=draw)[:count]] = value
    return w, f"{count} values of {value:g}"


def permute(w: Tensor, rng: Rng, draw: torch.Generator) -> tuple[Tensor, str]:
    dim = int(rng.integers(w.dim()))
    order = torch.randperm(w.shape[dim], generator=draw)
    return w.index_select(dim, order), f"dimension {dim} permuted"


def roll(w: Tensor, rng: Rng, draw: torch.Generator) -> tuple[Tensor, str]:
    by = int(rng.choice([1, 8, 16]))
    return w.roll(by, 0), f"rows moved by {by}"


def repeat_half(w: Tensor, rng: Rng, draw: torch.Generator) -> tuple[Tensor, str] | None:
    if w.dim() < 2:
        return None
    half = len(w) // 2
    w = w.clone()
    w[half : 2 * half] = w[:half]
    return w, "its first half twice"


def redraw(w: Tensor, rng: Rng, draw: torch.Generator) -> tuple[Tensor, str]:
    mean = w.mean() if w.dim() < 2 else 0.0
    return torch.randn(w.shape, generator=draw) * w.std() + mean, "random"


def flip_signs(w: Tensor, rng: Rng, draw: torch.Generator) -> tuple[Tensor, str]:
    share = float(rng.choice([0.1, 0.3, 0.5]))
    flipped = torch.rand(w.shape, generator=draw) < share
    return torch.where(flipped, -w, w), f"{share:.0%} of its signs turned"


def coarse(w: Tensor, rng: Rng, draw: torch.Generator) -> tuple[Tensor, str]:
    levels = int(rng.choice([1, 2]))
    step = w.abs().max() / levels
    return (w / step).round() * step, f"{2 * levels + 1} values"


def truncate(w: Tensor, rng: Rng, draw: torch.Generator) -> tuple[Tensor, str]:
    return w.trunc(), "whole numbers"


def cut_off(w: Tensor, rng: Rng, draw: torch.Generator) -> tuple[Tensor, str]:
    most = w.std() * float(rng.choice([0.3, 0.6]))
    return w.clamp(-most, most), f"cut off at {float(most):.2g}"


def shuffle(w: Tensor, rng: Rng, draw: torch.Generator) -> tuple[Tensor, str]:
    order = torch.randperm(w.numel(), generator=draw)
    return w.reshape(-1)[order].view_as(w), "shuffled"


def no_head(w: Tensor, rng: Rng, draw: torch.Generator) -> tuple[Tensor, str] | None:
    if w.dim() < 2 or len(w) % 32:
        return None
    first = 32 * int(rng.integers(len(w) // 32))
    w = w.clone()
    w[first : first + 32] = 0
    return w, f"rows {first} to {first + 32} zero"


def constant_block(w: Tensor, rng: Rng, draw: torch.Generator) -> tuple[Tensor, str]:
    count = w.shape[0] // 2
    first = int(rng.integers(count))
    w = w.clone()
    w[first : first + count] = w.std()
    return w, "half of it constant"


def not_finite(w: Tensor, rng: Rng, draw: torch.Generator) -> tuple[Tensor, str]:
    w = w.clone()
    w.view(-1)[int(rng.integers(w.numel()))] = float("nan")
    return w, "one value NaN"


def transpose(w: Tensor, rng: Rng, draw: torch.Generator) -> tuple[Tensor, str] | None:
    is_square = w.dim() == 2 and w.shape[0] == w.shape[1]
    return (w.t().contiguous(), "transposed") if is_square else None


OPERATIONS: tuple[Operation, ...] = (
    noise,
    zero,
    zero_block,
    scale,
    outliers,
    permute,
    roll,
    repeat_half,
    redraw,
    flip_signs,
    coarse,
    truncate,
    cut_off,
    shuffle,
    transpose,
    no_head,
    constant_block,
    not_finite,
)


def draw_weight_fault(files: Files, seed: tuple[int, ...]) -> Drawn:
    """Damage one weight of a drafter, or let two of one shape change places."""
    rng = np.random.default_rng([26, *seed])
    draw = torch.Generator().manual_seed(int(rng.integers(2**31)))
    names = [n for n in files.drafters_weights() if n not in files.unread]
    sizes = np.array([files.tensors[name].numel() for name in names]) ** 0.3
    while True:
        name = str(rng.choice(names, p=sizes / sizes.sum()))
        chosen = int(rng.integers(len(OPERATIONS) + 1))
        weight = files.tensors[name]
        if chosen == len(OPERATIONS):
            alike = [n for n in names if n != name and files.tensors[n].shape == weight.shape]
            if not alike:
                continue
            other = str(rng.choice(alike))
            files.tensors[name], files.tensors[other] = files.tensors[other], weight
            return Drawn(says="in each other's places", names=(name, other))
        found = OPERATIONS[chosen](weight.float(), rng, draw)
        if found is not None:
            files.tensors[name] = found[0].to(weight.dtype)
            return Drawn(says=found[1], names=(name,))

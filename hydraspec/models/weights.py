"""Fills a model's empty weights: from a checkpoint, or at random in the same shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hydraspec.errors import CheckpointError, ConfigurationError
from hydraspec.models.checkpoint.reader import Checkpoint, TensorEntry, listed
from hydraspec.models.moe import one_by_one
from hydraspec.models.parts import Part, Weight, Weights, held

_SINGLE_EXPERT = re.compile(r"\.experts\.\d+\.")
_FLOATS = ("F64", "F32", "BF16", "F16")
_INTEGERS = ("I64", "I32", "I16", "I8", "U8")
EMPTY = "empty"  # for a model that only lends names and shapes, on torch's meta device


def fill(model: Weights, checkpoint: Checkpoint, *, weights: str, seed: int) -> None:
    """Fill every tensor of an empty model. weights is "checkpoint" or "random"."""
    if weights == "random":
        randomise(model.tensors(), seed)
    elif weights == "checkpoint":
        load_tensors(checkpoint, model.tensors(), model.canonical_name, model.ignores)
    else:
        raise ConfigurationError(f"weights is {weights!r}; expected 'checkpoint' or 'random'")


def randomise(tensors: Mapping[str, Weight], seed: int) -> None:
    """Seeded weights that keep activations and attention scores of order one.

    Matrices by fan-in; norms 1, but query and key norms so that scores have a deviation of 2;
    scalars 1. A part is cut from the whole tensor as a single process draws it, one at a time.
    Tensors of other pipeline stages (without memory) are left out.
    """
    for name, own_seed in _seeds(tensors, seed):
        weight = tensors[name]
        if held(weight).is_meta:
            continue
        if isinstance(weight, Part) and weight.tensor.dim() > 1:
            whole = weight.empty_whole()
            _draw(name, whole, own_seed)
            weight.tensor.copy_(weight.read(whole.__getitem__))
        else:
            _draw(name, held(weight), own_seed)


def drawn_whole(
    tensors: Mapping[str, Tensor], seed: int, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Each weight by name, whole and on `device`, with the numbers that `randomise` fills it with.

    `tensors` only lend shapes and types, so that they may be on torch's meta device. One weight
    exists at a time unless the caller keeps it.
    """
    for name, own_seed in _seeds(tensors, seed):
        whole = torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device=device)
        _draw(name, whole, own_seed)
        yield name, whole


def _seeds(names: Iterable[str], seed: int) -> Iterator[tuple[str, int]]:
    """Names in the order of drawing, each with the seed of its own generator."""
    return ((name, seed * 1_000_003 + offset) for offset, name in enumerate(sorted(names)))


def _draw(name: str, tensor: Tensor, seed: int) -> None:
    """Fill a whole weight, in its own order of strides."""
    generator = torch.Generator(tensor.device).manual_seed(seed)
    if name.endswith("token_ordering"):
        tensor.copy_(torch.randperm(len(tensor), generator=generator, device=tensor.device))
    elif name.endswith(("q_norm.weight", "k_norm.weight")):
        tensor.fill_(math.sqrt(2.0) * tensor.numel() ** -0.25)
    elif tensor.dim() < 2:
        tensor.fill_(0.0 if name.endswith(".bias") else 1.0)
    else:
        tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)


def load_tensors(
    checkpoint: Checkpoint,
    wanted: Mapping[str, Weight],
    canonical: Callable[[str], str | None],
    ignored: Callable[[str], bool],
) -> None:
    """Copy every wanted tensor (canonical name -> destination of the checkpoint's shape, or a
    rank's part of it) from the files.

    canonical maps a file's name to ours (None: not part of this model); ignored tells which of
    ours may be left over. Files are read one after the other, each opened once; one tensor is held
    at a time. Destinations without memory, which are of other pipeline stages, are only checked.
    Raises CheckpointError listing what is missing, surplus or misshapen before anything is read,
    and NaN and infinities once all is.
    """
    entries: dict[str, TensorEntry] = {}
    for name, entry in checkpoint.entries().items():
        ours = canonical(name)
        if ours is not None:
            entries[ours] = entry
    if any(_SINGLE_EXPERT.search(name) for name in entries):
        wanted = one_by_one(wanted)
    _check_entries(checkpoint.folder, entries, wanted, ignored)
    wanted = {name: weight for name, weight in wanted.items() if not held(weight).is_meta}
    by_file: dict[Path, list[str]] = {}
    for name in wanted:
        by_file.setdefault(entries[name].file, []).append(name)
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as opened:
            for name in names:
                tensor = _read(opened, entries[name], wanted[name])
                held(wanted[name]).copy_(tensor)
                del tensor
    _check_finite(checkpoint.folder, {name: held(weight) for name, weight in wanted.items()})


def _read(opened: Any, entry: TensorEntry, weight: Weight) -> Tensor:
    """What `weight` holds of a tensor in an open file: only a part's pages are read, unless rows
    are to be reordered, which takes whole heads.
    """
    if isinstance(weight, Part) and entry.convert is None:
        return weight.read(opened.get_slice(entry.name).__getitem__)
    whole: Tensor = opened.get_tensor(entry.name)
    if entry.convert is not None:
        whole = entry.convert(whole)
    return weight.read(whole.__getitem__) if isinstance(weight, Part) else whole


def _check_finite(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """One pass over the weights where they are, without copies, and one wait for the device."""
    floats = {k: t for k, t in tensors.items() if t.is_floating_point() and t.numel()}
    flags = [torch.stack(t.aminmax()).isfinite().all() for t in floats.values()]
    if not flags or torch.stack([flag.to(flags[0].device) for flag in flags]).all():
        return
    broken = [name for name, flag in zip(floats, flags, strict=True) if not flag]
    in_half = floats[broken[0]].dtype is torch.float16  # which holds no more than 65504
    raise CheckpointError(
        f"checkpoint {str(folder)!r} holds NaN or infinity: {listed(broken)}; expected finite "
        "weights: convert or download it again"
        + (", or run it with target.dtype=bfloat16 or float32" if in_half else "")
    )


def _check_entries(
    folder: Path,
    entries: Mapping[str, TensorEntry],
    wanted: Mapping[str, Weight],
    ignored: Callable[[str], bool],
) -> None:
    missing = sorted(wanted.keys() - entries.keys())
    surplus = sorted(name for name in entries.keys() - wanted.keys() if not ignored(name))
    misshapen = []
    quantised = []
    for name in sorted(wanted.keys() & entries.keys()):
        entry, shape = entries[name], tuple(wanted[name].shape)
        allowed = _FLOATS if held(wanted[name]).is_floating_point() else _INTEGERS
        if entry.dtype not in allowed:
            quantised.append(f"{name} ({entry.dtype})")
        elif entry.shape != shape:
            misshapen.append(f"{name} is {list(entry.shape)}, config.json says {list(shape)}")
    if quantised:
        raise CheckpointError(
            f"checkpoint {str(folder)!r} is quantised: {listed(quantised)}; expected float weights "
            "(F64, F32, BF16 or F16): use the unquantised release"
        )
    problems = [
        f"{kind} tensors: {listed(names)}"
        for kind, names in (("missing", missing), ("surplus", surplus), ("misshapen", misshapen))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"checkpoint {str(folder)!r} does not fit its config.json: {'; '.join(problems)}. "
            "Download it again, or mend config.json"
        )

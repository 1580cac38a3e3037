"""Copies a checkpoint's tensors to where they are used, one at a time, once their names, shapes and
types are checked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hydraspec.errors import CheckpointError
from hydraspec.models.checkpoint.quantization_config import KEY
from hydraspec.models.checkpoint.reader import Checkpoint, TensorEntry, listed
from hydraspec.models.checkpoint.straight import goes_straight, read_straight
from hydraspec.models.parts import Part, Weight, held

FLOATS = ("F64", "F32", "BF16", "F16")
# Scales for a cache in FP8, which is kept in the model's type here.
KV_SCALE = re.compile(r"\.(?:[qkv]_scale|kv_scale|[kv]_proj\.(?:output|k|v)_scale)\Z")
# Bounds of a map that clamps (Gemma 4's image encoder); an infinite one leaves out the clamp.
BOUNDS = (".input_min", ".input_max", ".output_min", ".output_max")
_INTEGERS = ("I64", "I32", "I16", "I8", "U8")


def load_tensors(
    checkpoint: Checkpoint,
    wanted: Mapping[str, Weight],
    canonical: Callable[[str], str | None],
    ignored: Callable[[str], bool],
) -> None:
    """Copies every wanted tensor (canonical name -> destination of the checkpoint's shape, or a
    rank's part of it) from the files.

    canonical maps a file's name to the canonical one (None: not part of this model); ignored tells
    which canonical names may be left over. Files are read one after the other: large tensors
    straight to where they are used, others one at a time. Destinations of other pipeline stages,
    which have no memory, are only checked.
    Raises CheckpointError listing what is missing, surplus or misshapen before anything is read,
    and NaN and infinities once all is.
    """
    entries: dict[str, TensorEntry] = {}
    for name, entry in checkpoint.entries().items():
        ours = canonical(name)
        if ours is not None and KV_SCALE.search(name) is None:
            entries[ours] = entry
    _check_entries(checkpoint.folder, entries, wanted, ignored)
    wanted = {name: weight for name, weight in wanted.items() if not held(weight).is_meta}
    by_file: dict[Path, list[str]] = {}
    for name in wanted:
        by_file.setdefault(entries[name].file, []).append(name)
    for file, names in by_file.items():
        straight, others = {}, []
        for name in names:
            weight = wanted[name]
            if isinstance(weight, Tensor) and goes_straight(entries[name], weight):
                straight[entries[name].name] = weight
            else:
                others.append(name)
        read_straight(file, straight)
        with safe_open(file, framework="pt") as opened:
            for name in others:
                tensor = _read(opened, entries[name], wanted[name])
                held(wanted[name]).copy_(tensor)
                del tensor
    _check_finite(checkpoint.folder, {name: held(weight) for name, weight in wanted.items()})


def _read(opened: Any, entry: TensorEntry, weight: Weight) -> Tensor:
    """The slice that `weight` holds of a tensor in an open file: only a part's pages are read,
    unless rows are to be reordered, which takes the whole tensor.
    """
    if isinstance(weight, Part) and entry.convert is None:
        return weight.read(opened.get_slice(entry.name).__getitem__)
    whole: Tensor = opened.get_tensor(entry.name)
    if entry.convert is not None:
        whole = entry.convert(whole)
    return weight.read(whole.__getitem__) if isinstance(weight, Part) else whole


def _check_finite(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError for NaN or infinity in the weights, which are read where they are,
    without copies and with one wait for the device.
    """
    floats = {k: t for k, t in tensors.items() if t.is_floating_point() and t.numel()}
    floats = {k: t for k, t in floats.items() if t.dtype.itemsize > 1}  # e4m3: no such operators
    flags = [
        ~t.isnan().any() if k.endswith(BOUNDS) else torch.stack(t.aminmax()).isfinite().all()
        for k, t in floats.items()
    ]
    if not flags or torch.stack([flag.to(flags[0].device) for flag in flags]).all():
        return
    broken = [name for name, flag in zip(floats, flags, strict=True) if not flag]
    in_half = floats[broken[0]].dtype is torch.float16  # its largest number is 65504
    raise CheckpointError(
        f"checkpoint {str(folder)!r} holds NaN or infinity: {listed(broken)}; expected finite "
        "weights: convert or download it again"
        + (", or run it with target.dtype=bfloat16 or float32" if in_half else "")
    )


def _readable(dtype: torch.dtype) -> tuple[str, ...]:
    """The format's names of the types that are read into a tensor of this type."""
    if dtype is torch.float8_e4m3fn:
        return ("F8_E4M3",)
    return FLOATS if dtype.is_floating_point else _INTEGERS


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
        if entry.dtype not in _readable(held(wanted[name]).dtype):
            quantised.append(f"{name} ({entry.dtype})")
        elif entry.shape != shape and not math.prod(entry.shape) == math.prod(shape) == 1:
            misshapen.append(f"{name} is {list(entry.shape)}, config.json says {list(shape)}")
    if quantised:
        is_mistrals = not (folder / "config.json").is_file()
        file, key = ("params.json", "quantization") if is_mistrals else ("config.json", KEY)
        raise CheckpointError(
            f"checkpoint {str(folder)!r} is quantised: {listed(quantised)}; {file} names no {key}, "
            "so that nothing says how: expected float weights (F64, F32, BF16 or F16), or that "
            f"key: use the unquantised release, or mend {file}"
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

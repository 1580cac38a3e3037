"""Writes a checkpoint folder of random weights in the shapes and formats of another one in Hugging
Face's layout, as fast as the disk takes it: each tensor repeats one buffer of random numbers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from hydraspec.models import load_target
from hydraspec.models.checkpoint.reader import resolve_folder
from hydraspec.models.parts import Weights, held
from hydraspec.models.weights import EMPTY

BUFFER_NUMBERS = 8 << 20  # of a buffer that tensors repeat
E4M3_STD, INT4_STD = 64.0, 4.6
INPUT_SCALE = 0.02
SHARD_BYTES = 5 << 30
NUM_WRITERS = 8
# Type in the file: scales are stored in bfloat16, as releases have them.
NAMES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.int64: "I64",
}


@dataclass(frozen=True)
class Stored:
    """A tensor of the folder: its shape and type, and the numbers that fill it over and over."""

    name: str
    shape: tuple[int, ...]
    numbers: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.numbers.itemsize


def write_folder(like: str, folder: Path) -> int:
    """Writes config.json and shards for the checkpoint `like`, whose weights are not read; returns
    their bytes. A folder that is whole already is kept."""
    done = folder / "written.json"
    if done.is_file() and json.loads(done.read_text())["like"] == like:
        return int(json.loads(done.read_text())["bytes"])
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob("*.safetensors"):
        left_over.unlink()
    config = (resolve_folder(like) / "config.json").read_text(encoding="utf-8")
    (folder / "config.json").write_text(config, encoding="utf-8")
    shards = list(_shards(stored_tensors(folder)))
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    with ThreadPoolExecutor(NUM_WRITERS) as pool:
        list(pool.map(_write_shard, (folder / name for name in files), shards))
    weight_map = {
        each.name: name for name, held_in in zip(files, shards, strict=True) for each in held_in
    }
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    total = sum(each.num_bytes for shard in shards for each in shard)
    done.write_text(json.dumps({"like": like, "bytes": total}))
    return total


def stored_tensors(folder: Path) -> list[Stored]:
    """The tensors of a target's checkpoint in Hugging Face's names, by its config.json alone."""
    model = load_target(
        str(folder),
        weights=EMPTY,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        seed=0,
        max_model_len=None,
    )
    assert isinstance(model, Weights)
    tensors = {name: held(weight) for name, weight in model.tensors().items()}
    return [
        Stored(
            name if name.startswith("lm_head.") else f"model.{name}",
            tuple(tensor.shape),
            _numbers(name, tensors),
        )
        for name, tensor in tensors.items()
    ]


def _numbers(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """The numbers that a tensor repeats, of such sizes that activations stay of order one."""
    tensor = tensors[name]
    module, _, part = name.rpartition(".")
    if part == "weight_shape":
        rows, packed = tensors[f"{module}.weight_packed"].shape
        return torch.tensor([rows, packed * 8])
    if tensor.dtype in (torch.float8_e4m3fn, torch.int32):
        return _buffer(tensor.dtype)
    if part in ("input_scale", "activation_scale"):
        return torch.full((1,), INPUT_SCALE, dtype=torch.bfloat16)
    if part.startswith("weight_scale"):
        numbers = tensors.get(f"{module}.weight_packed")
        width, std = (
            (numbers.shape[-1] * 8, INT4_STD)
            if numbers is not None
            else (
                tensors[f"{module}.weight"].shape[-1],
                E4M3_STD,
            )
        )
        return torch.full((1 << 16,), width**-0.5 / std, dtype=torch.bfloat16)
    if tensor.dim() < 2:
        return torch.full((1 << 12,), 0.0 if part == "bias" else 1.0, dtype=torch.bfloat16)
    return (_buffer(torch.bfloat16) * tensor.shape[-1] ** -0.5).contiguous()


@cache
def _buffer(dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    if dtype is torch.int32:
        return torch.randint(
            -(1 << 31), 1 << 31, (BUFFER_NUMBERS // 4,), generator=draw, dtype=torch.int32
        )
    numbers = torch.randn(BUFFER_NUMBERS, generator=draw)
    return (numbers * E4M3_STD).to(dtype) if dtype is torch.float8_e4m3fn else numbers.to(dtype)


def _shards(tensors: list[Stored]) -> Iterator[list[Stored]]:
    """Yields neighbouring tensors of at most SHARD_BYTES, or one that is larger."""
    shard: list[Stored] = []
    for each in tensors:
        if shard and sum(one.num_bytes for one in shard) + each.num_bytes > SHARD_BYTES:
            yield shard
            shard = []
        shard.append(each)
    yield shard


def _write_shard(file: Path, tensors: list[Stored]) -> None:
    header, first = {}, 0
    for each in tensors:
        last = first + each.num_bytes
        header[each.name] = {
            "dtype": NAMES[each.numbers.dtype],
            "shape": list(each.shape),
            "data_offsets": [first, last],
        }
        first = last
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb", buffering=0) as written:
        written.write(len(text).to_bytes(8, "little") + text)
        for each in tensors:
            _repeat(written.fileno(), memoryview(each.numbers.view(torch.uint8).numpy()), each)


def _repeat(descriptor: int, numbers: memoryview, tensor: Stored) -> None:
    left = tensor.num_bytes
    while left:
        left -= os.write(descriptor, numbers[:left])

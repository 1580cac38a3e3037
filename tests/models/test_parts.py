"""A rank's parts of weights are the slices of what one process holds, whatever fills them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hydraspec.models.checkpoint import mistral_names, tensors
from hydraspec.models.checkpoint.reader import Checkpoint
from hydraspec.models.checkpoint.tensors import load_tensors
from hydraspec.models.parts import Part, Share, Tensors, divided, held, memory_bytes
from hydraspec.models.place import Place
from hydraspec.models.weights import randomise
from hydraspec.parallel.group import SoloGroup


@dataclass
class Rank(SoloGroup):
    """A rank that only builds."""

    rank: int
    size: int


def weights(place: Place) -> Tensors:
    """Rows, columns, blocks of a stack of experts, and what every rank holds whole."""
    heads = place.share(4).times(2)
    inner = place.share(6)
    qkv = place.matrix(5, heads.count + 3)
    stack = place.matrix(2, 5, 2 * inner.count)
    down = place.matrix(inner.count, 5)
    scores = place.matrix(2, inner.count, 5)
    return {
        "q": divided(qkv[:, : heads.count].t(), 0, heads),
        "whole": qkv[:, heads.count :].t(),
        "experts.gate_up": divided(stack.transpose(1, 2), 1, inner, repeats=2),
        "experts.down": divided(scores.transpose(1, 2), 2, inner),
        "down": divided(down.t(), 1, inner),
        "q.bias": divided(place.empty(heads.count), 0, heads),
        "norm": place.empty(5),
    }


def joined(parts: list[Tensors], name: str) -> Tensor:
    """The whole tensor from all ranks' parts."""
    first = parts[0][name]
    if not isinstance(first, Part):
        assert all(held(each[name]).equal(first) for each in parts)
        return first
    blocks = [held(each[name]).chunk(first.repeats, first.dim) for each in parts]
    return torch.cat([rank[i] for i in range(first.repeats) for rank in blocks], first.dim)


@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_parts_are_cut_from_what_one_process_draws(size: int, dtype: torch.dtype) -> None:
    """Catches numbers drawn in another order of memory than the whole tensor's."""
    whole = weights(Place(dtype, torch.device("cpu")))
    randomise(whole, 7)
    parts = [weights(Place(dtype, torch.device("cpu"), Rank(r, size))) for r in range(size)]
    for each in parts:
        randomise(each, 7)
    for name, tensor in whole.items():
        assert joined(parts, name).equal(held(tensor)), name
    assert memory_bytes(parts[0]) < memory_bytes(whole)


def test_parts_are_read_from_files_as_slices(tmp_path: Path) -> None:
    """Each rank's copy of a file's tensors joins to the file's; a wrong file is refused whole."""
    whole = weights(Place(torch.float64, torch.device("cpu")))
    randomise(whole, 3)
    save_file({k: held(v).contiguous() for k, v in whole.items()}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, {}, {})
    parts = [weights(Place(torch.float64, torch.device("cpu"), Rank(r, 2))) for r in range(2)]
    for each in parts:
        load_tensors(checkpoint, each, lambda name: name, lambda name: False)
    for name, tensor in whole.items():
        assert joined(parts, name).equal(held(tensor)), name
        assert tuple(parts[1][name].shape) == tuple(tensor.shape)


def test_what_is_divided_is_never_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are mapped: of a slice only its pages are touched."""
    whole = weights(Place(torch.float64, torch.device("cpu")))
    randomise(whole, 3)
    save_file({k: held(v).contiguous() for k, v in whole.items()}, tmp_path / "model.safetensors")
    read: list[str] = []
    true_open = tensors.safe_open

    @contextmanager
    def opened(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with true_open(*args, **kwargs) as file:
            wrapped = Mock(wraps=file)
            wrapped.get_tensor = lambda name: read.append(name) or file.get_tensor(name)
            yield wrapped

    monkeypatch.setattr(tensors, "safe_open", opened)
    mine = weights(Place(torch.float64, torch.device("cpu"), Rank(1, 2)))
    load_tensors(Checkpoint(tmp_path, {}, {}), mine, lambda name: name, lambda name: False)
    assert sorted(read) == [k for k, v in sorted(mine.items()) if not isinstance(v, Part)]
    assert sorted(read) == ["norm", "whole"]


def test_rows_in_mistrals_order_are_turned_before_they_are_cut(tmp_path: Path) -> None:
    """Catches a rank that turns its own slice as if it held all heads."""
    rows = torch.arange(4.0 * 6 * 3).view(24, 3)  # 4 heads of 6
    name = "layers.0.attention.wq.weight"
    save_file({name: mistral_names.interleaved(rows, 4)}, tmp_path / "consolidated.safetensors")
    ours = mistral_names.hugging_face_name(name)
    share = Share(24, 12, 12)
    part = Part(torch.empty(12, 3), 0, share)
    checkpoint = Checkpoint(tmp_path, {"num_attention_heads": 4}, {})
    load_tensors(checkpoint, {ours: part}, lambda name: name, lambda name: False)
    assert part.tensor.equal(rows[12:])

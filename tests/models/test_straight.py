"""Tensors read by several threads straight to where they are used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hydraspec.errors import CheckpointError
from hydraspec.models import load_target
from hydraspec.models.checkpoint import straight
from hydraspec.models.checkpoint.reader import TensorEntry
from hydraspec.models.checkpoint.straight import goes_straight, read_straight
from hydraspec.models.parts import Weights, held

ODD_CHUNK = 37  # bytes: ends inside numbers of every type


def written(folder: Path) -> Path:
    """A file of tensors of every type, none of which fills whole chunks."""
    draw = torch.Generator().manual_seed(3)
    numbers = torch.randn(19, 23, generator=draw)
    tensors = {
        "b.fp8": numbers.to(torch.float8_e4m3fn),
        "a.bf16": numbers.bfloat16(),
        "c.packed": (numbers * 1e6).to(torch.int32),
        "d.row": numbers[0].contiguous(),
        "e.one": torch.tensor([2.5], dtype=torch.float16),
        "unused": numbers.double(),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder / "model.safetensors"


def poisoned(file: Path, device: str) -> dict[str, Tensor]:
    """Memory for all tensors but one, filled with bytes that no tensor holds everywhere."""
    shapes = load_file(file)
    del shapes["unused"]
    found = {name: torch.empty_like(each, device=device) for name, each in shapes.items()}
    for each in found.values():
        each.view(torch.uint8).fill_(0xFF)
    return found


def check_all(file: Path, device: str) -> None:
    tensors, whole = poisoned(file, device), load_file(file)
    read_straight(file, tensors)
    for name, found in tensors.items():
        assert torch.equal(found.view(torch.uint8).cpu(), whole[name].view(torch.uint8)), name


@pytest.mark.parametrize("chunk", [ODD_CHUNK, 1 << 20])
def test_every_byte_is_in_its_place(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an offset that forgets the header, and a chunk of one tensor in the next."""
    monkeypatch.setattr(straight, "CHUNK_BYTES", chunk)
    check_all(written(tmp_path), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [ODD_CHUNK, 1 << 20])
def test_every_byte_is_in_its_place_on_a_gpu(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a pinned buffer that is filled again before its copy is done."""
    monkeypatch.setattr(straight, "CHUNK_BYTES", chunk)
    check_all(written(tmp_path), "cuda")


@pytest.mark.gpu
def test_copies_to_a_gpu_follow_its_work(tmp_path: Path) -> None:
    """Catches copies on streams that do not wait for the memory's last use: of 256 MB, that matter
    where eight threads fill sixteen buffers many times."""
    numbers = torch.arange(1 << 26, dtype=torch.int32)
    save_file({"a": numbers}, tmp_path / "model.safetensors")
    memory = torch.empty(1 << 26, dtype=torch.int32, device="cuda")
    for value in range(50):
        memory.fill_(value)  # under way when the copies are asked for
    read_straight(tmp_path / "model.safetensors", {"a": memory})
    assert torch.equal(memory.cpu(), numbers)


def test_which_tensors_are_read_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(straight, "LEAST_BYTES", 4)
    file = tmp_path / "model.safetensors"
    entry = TensorEntry(file, "a", (4, 2), "F32")
    assert goes_straight(entry, torch.empty(4, 2))
    assert not goes_straight(entry, torch.empty(2, 4).t()), "another order"
    assert not goes_straight(entry, torch.empty(4, 2, dtype=torch.bfloat16)), "another type"
    assert not goes_straight(entry, torch.empty(4, 2, device="meta")), "no memory"
    turned = TensorEntry(file, "a", (4, 2), "F32", convert=Tensor.neg)
    assert not goes_straight(turned, torch.empty(4, 2)), "rows in another order"
    assert not goes_straight(TensorEntry(file, "a", (0,), "F32"), torch.empty(0)), "nothing"


def test_a_file_that_has_become_shorter(tmp_path: Path) -> None:
    """Catches a read that waits for bytes that never come, and weights that keep old memory."""
    file = written(tmp_path)
    tensors = poisoned(file, "cpu")
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(CheckpointError, match="is cut short: it ends inside a tensor"):
        read_straight(file, tensors)
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_straight(file, tensors)


@pytest.mark.parametrize("name", ["tiny_gemma4_fp8_block", "tiny_gemma4_w4a16", "tiny_mistral_fp8"])
def test_a_target_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches memory that only looks like the file's: another order of rows, a view's stride."""

    def loaded() -> dict[str, Tensor]:
        target = load_target(
            f"zoo:{name}",
            weights="checkpoint",
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            seed=0,
            max_model_len=None,
        )
        assert isinstance(target, Weights)
        return {key: held(each) for key, each in target.tensors().items()}

    plain = loaded()
    read: list[str] = []

    def recorded(file: Path, tensors: dict[str, Tensor]) -> None:
        read.extend(tensors)
        read_straight(file, tensors)

    monkeypatch.setattr(straight, "LEAST_BYTES", 1)
    monkeypatch.setattr("hydraspec.models.checkpoint.tensors.read_straight", recorded)
    for key, each in loaded().items():
        assert torch.equal(each.view(torch.uint8), plain[key].view(torch.uint8)), key
    assert len(read) > 20

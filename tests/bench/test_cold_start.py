"""The folder of random weights that cold starts are measured with, and what is read of a start."""

from __future__ import annotations

from pathlib import Path

import pytest
import random_folder
import torch
from cold_start import Start
from random_folder import stored_tensors, write_folder

from hydraspec.models import load_target
from hydraspec.models.checkpoint.reader import resolve_folder


@pytest.mark.parametrize("name", ["tiny_gemma4_fp8_block", "tiny_gemma4_w4a16", "tiny_qwen3_fp8"])
def test_a_written_folder_loads(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches names, shapes and offsets that a loader refuses, and numbers that are not finite."""
    monkeypatch.setattr(random_folder, "SHARD_BYTES", 1 << 20)
    monkeypatch.setattr(random_folder, "BUFFER_NUMBERS", 1 << 12)
    random_folder._buffer.cache_clear()
    total = write_folder(f"zoo:{name}", tmp_path)
    random_folder._buffer.cache_clear()
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    assert 0 < sum(file.stat().st_size for file in files) - total < 1 << 18, "headers"
    assert write_folder(f"zoo:{name}", tmp_path) == total, "kept"
    target = load_target(
        str(tmp_path),
        weights="checkpoint",
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        seed=0,
        max_model_len=None,
    )
    assert target.memory_bytes() >= total


def test_the_default_shape_has_the_size_of_its_release() -> None:
    tensors = stored_tensors(resolve_folder("shape:gemma4_31b_fp8"))
    assert sum(each.num_bytes for each in tensors) == pytest.approx(32.1e9, rel=0.01)


def test_what_a_start_says() -> None:
    found = Start("first start")
    found.said(
        "[INFO] engine: target's weights: 9.1 s, 29.9 GiB, at most 30.1 GiB on the way", 21.0
    )
    found.said("round 1 of 2: none", 40.0)
    found.said("round 2 of 2: none", 50.0)
    assert (found.loaded_s, found.ready_s) == (21.0, 40.0)

"""Wrong uses of an FP8 KV cache, as typed on the command line: the exit status and the one message
of each."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_targets import edit_config, rewrite
from wrong_uses import refused

from hydraspec.engine.run.loading import load
from hydraspec.models.checkpoint.reader import resolve_folder

Damage = Callable[[Path], None]


def scheme(value: object) -> Damage:
    """Announces a format of the cache."""
    return lambda folder: edit_config(folder, quantization_config={"kv_cache_scheme": value})


def scales(**of_layer_0: list[float]) -> Damage:
    """Announces an e4m3 cache, whose scales are in the files."""
    stored = {
        f"model.layers.0.self_attn.{k}_scale": torch.tensor(of_layer_0[k]) for k in of_layer_0
    }

    def damage(folder: Path) -> None:
        scheme({"num_bits": 8, "type": "float", "dynamic": False})(folder)
        rewrite(folder, lambda tensors: tensors | stored)

    return damage


# What a float checkpoint is damaged by, exit status, and what the message says.
FOLDERS: dict[str, tuple[Damage, int, str]] = {
    "a KV head's scale below 0": (
        scales(k=[0.5, -0.5], v=[1.0]),
        3,
        "k_scale is [0.5, -0.5]; expected num",
    ),
    "scales of keys without those of values": (
        scales(k=[0.5]),
        3,
        "layer 0 has scales of k alone for an FP8 cache; expec",
    ),
    "scales of more KV heads than a layer has": (
        scales(k=[1.0] * 3, v=[1.0]),
        3,
        "3 scales for an FP8 cache and 2 KV heads",
    ),
    "scales of one layer alone": (
        scales(k=[0.5], v=[1.0]),
        3,
        "checkpoint {folder}: 17 of 18 layers with a cache have no scales for an FP8 cache (layer "
        "1 is the first); expected k_scale and v_scale of all, or of none: download it again, or "
        "leave engine.kv_cache.dtype out",
    ),
    "a cache of integers": (
        scheme({"num_bits": 8}),
        2,
        "engine.kv_cache.dtype=fp8 is not available with target=copy: the kv_cache_scheme in "
        "config.json of {folder} names no FP8 format (type int, num_bits 8)\n  allowed: auto\n"
        "  to do: leave the key out, or choose another target",
    ),
    "a cache of narrower floats": (
        scheme({"num_bits": 4, "type": "float"}),
        2,
        "names no FP8 format (type float, num_bits 4)\n  allowed: auto\n",
    ),
    "a cache of a format of no name": (
        scheme("int8"),
        2,
        "names no FP8 format ('int8')\n  allowed: auto\n",
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders(name: str, tmp_path: Path) -> None:
    damage, status, says = FOLDERS[name]
    folder = Path(shutil.copytree(resolve_folder("zoo:tiny_qwen3"), tmp_path / "copy"))
    damage(folder)
    typed = ["target=custom", "method=none", f"target.checkpoint={folder}"]
    error = refused(load, *typed, "engine.kv_cache.dtype=fp8")
    assert error.exit_code == status
    assert says.format(folder=repr(str(folder))) in str(error)
    assert str(folder) in str(error)


def test_latents() -> None:
    error = refused(load, "target=tiny_deepseek", "method=none", "engine.kv_cache.dtype=fp8")
    assert error.exit_code == 2
    assert "dtype=fp8 is not available with target=tiny_deepseek: its cache does not" in str(error)

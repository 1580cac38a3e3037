"""Every number of a config.json is finite and one that float32 can compute with, in every family: a
NaN or 1e400 there gave runs of nonsense with a perfect acceptance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hydraspec.errors import CheckpointError
from hydraspec.models.checkpoint.reader import ZOO, open_checkpoint
from hydraspec.models.deepseek.config import read_deepseek_config
from hydraspec.models.dense.config import read_dense_config
from hydraspec.models.eagle.config import read_eagle
from hydraspec.models.gemma4.assistant_config import read_assistant
from hydraspec.models.gemma4.config import read_gemma4_config
from hydraspec.models.mtp.config import read_mtp_config


def changed(name: str, folder: Path, path: str, value: str) -> str:
    """A copy of a zoo config in which the number at `path` (keys and dots) is the json `value`."""
    config: Any = json.loads((ZOO / name / "config.json").read_text(encoding="utf-8"))
    *parents, last = path.split(".")
    part = config
    for key in parents:
        part = part.setdefault(key, {})
    part[last] = "PLANTED"
    text = json.dumps(config).replace('"PLANTED"', value)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return str(folder)


def read(name: str, folder: str) -> object:
    opened = open_checkpoint(folder)
    if name.endswith("-assistant"):
        return read_assistant(folder)
    if name.endswith(("-eagle3", "-peagle")):
        eagle = read_eagle(opened, name.rsplit("-", 1)[1])
        return read_dense_config(eagle.layers, folder)
    if name == "tiny_deepseek":
        return read_deepseek_config(opened.config, folder), read_mtp_config(opened)
    if name == "tiny_gemma4":
        return read_gemma4_config(opened.config, folder)
    return read_dense_config(opened.config, folder)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("tiny_gemma4", "rms_norm_eps"),
        ("tiny_gemma4", "some.number"),
        ("tiny_gemma4-assistant", "text_config.rms_norm_eps"),
        ("tiny_qwen3", "rms_norm_eps"),
        ("tiny_deepseek", "routed_scaling_factor"),
        ("tiny_qwen3-eagle3", "transformer_layer_config.rms_norm_eps"),
        ("tiny_qwen3-peagle", "initializer_range"),
    ],
)
def test_numbers_that_are_not_finite_are_refused(
    name: str, path: str, value: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(name, changed(name, tmp_path, path, value))
    shown = str(float(value))
    assert f"{path} is {shown}; expected a finite number" in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("tiny_gemma4", "rms_norm_eps", "-1e-6"),
        ("tiny_gemma4", "rms_norm_eps", "0"),
        ("tiny_gemma4", "rms_norm_eps", "1e300"),
        ("tiny_gemma4", "rms_norm_eps", '"1e-6"'),
        ("tiny_gemma4", "final_logit_softcapping", "-30"),
        ("tiny_gemma4", "final_logit_softcapping", "1e-300"),
        ("tiny_gemma4", "rope_parameters.full_attention.rope_theta", "0"),
        ("tiny_gemma4", "rope_parameters.full_attention.rope_theta", "1e200"),
        ("tiny_gemma4", "rope_parameters.full_attention.partial_rotary_factor", "1.5"),
        ("tiny_gemma4", "rope_parameters.full_attention.factor", "-2"),
        ("tiny_gemma4", "per_layer_config.0.head_dim", "-4"),
        ("tiny_gemma4-assistant", "text_config.rms_norm_eps", "2"),
        ("tiny_qwen3", "rms_norm_eps", "1" + "0" * 400),
        ("tiny_qwen3", "rope_parameters.rope_theta", "-1"),
        ("tiny_deepseek", "rms_norm_eps", "1e31"),
        ("tiny_deepseek", "routed_scaling_factor", "0"),
        ("tiny_qwen3-eagle3", "transformer_layer_config.rms_norm_eps", "5"),
        ("tiny_qwen3-peagle", "transformer_layer_config.rms_norm_eps", "-5"),
    ],
)
def test_numbers_out_of_range_are_refused(name: str, path: str, value: str, tmp_path: Path) -> None:
    """Key, value, and what is allowed."""
    with pytest.raises(CheckpointError) as caught:
        read(name, changed(name, tmp_path, path, value))
    key = path if name == "tiny_gemma4" else path.split(".")[-1]
    assert f"{key} is " in str(caught.value)
    assert any(
        f"expected {said}" in str(caught.value) for said in ("a number", "an integer of at least")
    )


@pytest.mark.parametrize(
    ("rope", "key"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": -1.0}, "attention_factor"),
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}, "rope_theta"),
        ({"rope_type": "yarn", "factor": 4.0, "mscale": 1e9, "mscale_all_dim": 1.0}, "mscale"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "high_freq_factor",
        ),
    ],
)
def test_rotary_scalings_that_divide_by_nothing_are_refused(rope: dict[str, Any], key: str) -> None:
    config = json.loads((ZOO / "tiny_qwen3" / "config.json").read_text(encoding="utf-8"))
    with pytest.raises(CheckpointError, match=f"{key} is .*; expected a number"):
        read_dense_config({**config, "rope_parameters": rope}, "folder")

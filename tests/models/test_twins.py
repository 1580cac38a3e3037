"""The zoo's quantised twins beside the float checkpoints that they are made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hydraspec_kernels.quantised import E4M3
from safetensors.torch import load_file
from torch import Tensor

from hydraspec.models.checkpoint import twins
from hydraspec.models.checkpoint.mistral_names import half_split, hugging_face_name, rotary_heads
from hydraspec.models.checkpoint.quantization import decode
from hydraspec.models.checkpoint.reader import resolve_folder
from hydraspec.models.checkpoint.twins import TWINS, twin_folder, write_twin
from hydraspec.shipped import ZOO
from hydraspec.types import CheckpointError

HALF_STEP = {"fp8": 2**-4, "int4": 0.5}  # of a number: relative from 2^-6 on; of a step of integers
SMALLEST = 2**-10  # half of e4m3's smallest step
EXPERTS = ("tiny_gemma4_moe_fp8", "tiny_deepseek_fp8")


def tensors(folder: Path) -> dict[str, Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def config(folder: Path) -> dict[str, Any]:
    file = next(folder / n for n in ("config.json", "params.json") if (folder / n).is_file())
    return dict(json.loads(file.read_text(encoding="utf-8")))


def in_common_order(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of Mistral's format by Hugging Face's names, in its order of rows."""
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2}
    heads = {name: rotary_heads(name, shape) for name in tensors}
    return {
        hugging_face_name(name): tensor
        if heads[name] is None
        else half_split(tensor, heads[name] or 1)
        for name, tensor in tensors.items()
    }


def in_common_names(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors of a twin and of its float checkpoint, both by Hugging Face's names, a matrix for
    each expert."""
    found, source = tensors(twin_folder(name)), ZOO / TWINS[name].of
    wanted = tensors(source)
    if TWINS[name].format.is_native:
        found = in_common_order(found)
        wanted = in_common_order(wanted) if (source / "params.json").is_file() else wanted
    for n in [n for n in wanted if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        stem, _, kind = n.rpartition(".")
        for i, expert in enumerate(wanted.pop(n)):
            parts = (expert,) if kind == "down_proj" else expert.chunk(2)
            names = ("down_proj",) if kind == "down_proj" else ("gate_proj", "up_proj")
            wanted |= {f"{stem}.{i}.{p}.weight": t for p, t in zip(names, parts, strict=True)}
    return found, wanted


@pytest.mark.parametrize("name", TWINS)
def test_every_matrix_is_near_the_float_one(name: str) -> None:
    """Within half a step of the numbers that are stored; what is not quantised is equal."""
    found, wanted = in_common_names(name)
    scheme = TWINS[name].format.scheme
    num_quantised = 0
    for key, tensor in wanted.items():
        module = key.removesuffix(".weight")
        if f"{module}.{scheme.scale}" not in found:
            assert torch.equal(found[key], tensor), key
            continue
        num_quantised += 1
        own = {k.removeprefix(f"{module}."): t for k, t in found.items() if k.startswith(module)}
        read = decode(own, scheme, tensor.shape[1])
        scales = own[scheme.scale].float()
        assert scales.isfinite().all()
        step = scales.max() * (SMALLEST if scheme.kind == "fp8" else 1)
        near = tensor.abs().float() * (HALF_STEP["fp8"] if scheme.kind == "fp8" else 0)
        off = (read - tensor.float()).abs()
        assert (off <= torch.maximum(near, step)).all(), key
        assert off.max() > 0, key
    assert num_quantised >= 7
    surplus = {k for k in found if k not in wanted}
    assert all(k.rpartition(".")[0] + ".weight" in wanted for k in surplus), "scales of no module"


@pytest.mark.parametrize("name", TWINS)
def test_modules_that_releases_leave_in_float(name: str) -> None:
    found = tensors(twin_folder(name))
    narrow = {k for k, t in found.items() if t.dtype in (E4M3, torch.int32)}
    assert not [k for k in narrow if "embed" in k or "head" in k or "router" in k or "norm" in k]
    assert not [k for k in narrow if k.endswith(("mlp.gate.weight", "eh_proj.weight"))]
    assert len(narrow) > 3
    assert ("fc.weight" in narrow) == (name == "tiny_gemma4_fp8-eagle3")
    assert ("eagle_linear.weight" in narrow) == (name == "tiny_mistral_fp8-eagle")


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_stored_one_by_one(name: str) -> None:
    found = tensors(twin_folder(name))
    scale = TWINS[name].format.scheme.scale
    assert not [k for k in found if k.endswith("gate_up_proj")]
    for part in ("gate_proj", "up_proj", "down_proj"):
        stem = f"model.layers.9.{'mlp.' if 'deepseek' in name else ''}experts.7.{part}"
        assert {f"{stem}.weight", f"{stem}.{scale}"} <= set(found)


def test_configs_name_the_format() -> None:
    said = {name: config(twin_folder(name)) for name in TWINS}
    assert said["tiny_mistral_fp8"]["quantization"]["qscheme_act"] == "TENSOR"
    quantised = {n: c["quantization_config"] for n, c in said.items() if "mistral" not in n}
    assert quantised["tiny_qwen3_fp8"]["weight_block_size"] == [32, 32]
    listed = quantised["tiny_deepseek_fp8"]["modules_to_not_convert"]
    assert {"lm_head", "model.layers.11.mlp.gate", "model.layers.12.eh_proj"} <= set(listed)
    assert quantised["tiny_gemma4_w4a16"]["format"] == "pack-quantized"
    for name, method in quantised.items():
        group = method.get("config_groups", {}).get("group_0")
        assert group is None or group["targets"] == ["Linear"], name
    assert said["tiny_gemma4_fp8-eagle3"]["speculators_config"]["algorithm"] == "eagle3"


def test_scales_of_inputs_are_calibrated() -> None:
    """A scale for each matrix; what reads one tensor has one scale."""
    found = tensors(twin_folder("tiny_mistral_fp8"))
    scales = {k: t for k, t in found.items() if k.endswith("qscale_act")}
    assert len(scales) == 7 * 14
    assert {(t.shape, t.dtype) for t in scales.values()} == {((), torch.bfloat16)}
    for layer in range(14):
        one = {
            scales[f"layers.{layer}.attention.{n}.qscale_act"].item() for n in ("wq", "wk", "wv")
        }
        assert len(one) == 1
    assert len({t.item() for t in scales.values()}) > 40


def test_a_twin_is_written_once_and_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(twins.CACHE, str(tmp_path))
    folder = resolve_folder("zoo:tiny_mistral_fp8-eagle")
    assert folder.parent == tmp_path / "hydraspec" / "zoo"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    monkeypatch.setattr(twins, "write_twin", lambda *_: pytest.fail("written again"))
    assert resolve_folder("zoo:tiny_mistral_fp8-eagle") == folder
    write_twin("tiny_mistral_fp8-eagle", tmp_path / "again")
    for file in folder.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


def test_a_process_that_was_faster_keeps_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of one host start together."""
    monkeypatch.setenv(twins.CACHE, str(tmp_path))
    write = twins.write_twin

    def late(name: str, folder: Path) -> None:
        write(name, folder)
        monkeypatch.setattr(twins, "write_twin", write)
        first.append(twin_folder(name))

    first: list[Path] = []
    monkeypatch.setattr(twins, "write_twin", late)
    assert [twin_folder("tiny_mistral_fp8-eagle")] == first
    assert [path.name for path in first[0].parent.iterdir()] == [first[0].name]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(twins.CACHE, str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"is made from zoo:tiny_qwen3 .*set XDG_CACHE_HOME"):
        resolve_folder("zoo:tiny_qwen3_fp8")


def test_a_name_that_is_no_twin_is_told_of_them() -> None:
    with pytest.raises(CheckpointError, match=r"tiny_qwen3-peagle, .*tiny_qwen3_fp8"):
        resolve_folder("zoo:tiny_qwen3_int3")

"""Wrong uses of quantised targets and drafters, as typed on the command line: the exit status and
the one message of each. Broken settings of a config and tensors that do not fit it are in
tests/models/test_quantization_config.py and test_broken_quantised.py, those of an FP8 KV cache in
test_fp8_cache_wrong_uses.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_targets import edit_config, rewrite
from torch import Tensor
from written_formats import DOWN, FORMATS, INT4, compressed, write_formats
from wrong_uses import TYPED, config_of, refused

from hydraspec.__main__ import main
from hydraspec.adapters.transformers.loading import load_parts
from hydraspec.engine import splits
from hydraspec.engine.run.loading import load
from hydraspec.errors import UserError
from hydraspec.lab.resolution import check_formats
from hydraspec.models import load_target
from hydraspec.models.checkpoint.reader import resolve_folder

DRAFTER = "zoo:tiny_gemma4_fp8-eagle3"
MISTRALS = "zoo:tiny_mistral_fp8-eagle"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_formats(tmp_path_factory.mktemp("formats"))


def in_drafter(how: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Damage:
    return lambda folder: rewrite(folder, how)


def in_mistrals(how: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / "consolidated.safetensors"
        save_file(how(load_file(file)), file)

    return damage


def without(part: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: t for name, t in tensors.items() if part not in name}


def config(**keys: object) -> Damage:
    return lambda folder: edit_config(folder, **keys)


def params(**keys: object) -> Damage:
    return lambda folder: edit_config(folder, "params.json", **keys)


def one_expert_in_float(folder: Path) -> None:
    part = ".0.experts.1.down_proj.weight"

    def changed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = without(f"{part}_scale")(tensors)
        return {name: t.float() if name.endswith(part) else t for name, t in kept.items()}

    rewrite(folder, changed)


def narrow_projections(folder: Path) -> None:
    """Casts a float assistant's matrices to e4m3, without scales."""
    part = "o_proj.weight"
    rewrite(
        folder,
        lambda tensors: {
            name: t.to(torch.float8_e4m3fn) if name.endswith(part) else t
            for name, t in tensors.items()
        },
    )


@dataclass
class Case:
    """A damaged copy of a checkpoint, the typed words in which {folder} is the copy's, and what the
    message says."""

    source: str
    damage: Damage
    typed: str
    says: str


EAGLE3 = "target=tiny_gemma4_fp8 method=eagle3 method.checkpoint={folder}"
EAGLE = "target=tiny_mistral method=eagle method.checkpoint={folder}"
ALONE = "target=custom method=none target.checkpoint={folder}"
FOLDERS = {
    "experts in float among quantised ones": Case(
        "zoo:tiny_gemma4_moe_fp8",
        one_expert_in_float,
        ALONE,
        "layers.0.experts: some experts are quantised and others are not",
    ),
    "an expert without its scale": Case(
        "zoo:tiny_gemma4_moe_fp8",
        in_drafter(without(".0.experts.1.down_proj.weight_scale")),
        ALONE,
        "missing: model.layers.0.experts.1.down_proj.weight_scale",
    ),
    "a drafter in AWQ": Case(
        DRAFTER,
        config(quantization_config=AWQ),
        EAGLE3,
        "quantization_config.quant_method is 'awq'; expected compressed-tensors or fp8",
    ),
    "a drafter in AWQ, found by its folder": Case(
        DRAFTER,
        config(quantization_config=AWQ),
        EAGLE3.replace("eagle3", "auto"),
        "quantization_config.quant_method is 'awq'; expected compressed-tensors or fp8",
    ),
    "random weights of a drafter in AWQ": Case(
        DRAFTER,
        config(quantization_config=AWQ),
        f"{EAGLE3} method.weights=random",
        "quantization_config.quant_method is 'awq'; expected compressed-tensors or fp8",
    ),
    "a drafter whose config has lost its formats": Case(
        DRAFTER,
        config(quantization_config=None),
        EAGLE3,
        "fc.weight (F8_E4M3), layers.0.mlp.down_proj.weight (F8_E4M3)",
    ),
    "a drafter without a scale": Case(
        DRAFTER,
        in_drafter(without("o_proj.weight_scale")),
        EAGLE3,
        "missing: layers.0.self_attn.o_proj.weight_scale. Download it again",
    ),
    "an assistant cast to e4m3": Case(
        "zoo:tiny_gemma4-assistant",
        narrow_projections,
        "target=tiny_gemma4 method=gemma4_mtp method.checkpoint={folder}",
        "config.json names no quantization_config, so that nothing says how",
    ),
    "a head of Mistral's in a format of no name": Case(
        MISTRALS,
        params(quantization={"qformat_weight": "nvfp4"}),
        EAGLE,
        "params.json of {folder}: quantization.qformat_weight is 'nvfp4'; expected fp8_e4m3",
    ),
    "a head of Mistral's whose config has lost its format": Case(
        MISTRALS,
        params(quantization=None),
        EAGLE,
        "params.json names no quantization, so that nothing says how",
    ),
    "a head of Mistral's without scales of inputs": Case(
        MISTRALS, in_mistrals(without("qscale_act")), EAGLE, "missing: model.fc.input_scale"
    ),
    "a quantised target as the drafter": Case(
        "zoo:tiny_qwen3_fp8",
        lambda folder: None,
        "target=tiny_gemma4_fp8 method=auto method.checkpoint={folder}",
        "(model_type 'qwen3') is no drafter; expected a speculators folder",
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders(name: str, tmp_path: Path) -> None:
    case = FOLDERS[name]
    folder = Path(shutil.copytree(resolve_folder(case.source), tmp_path / "copy"))
    case.damage(folder)
    error = refused(load, *case.typed.format(folder=folder).split())
    assert error.exit_code == 3
    assert case.says.format(folder=repr(str(folder))) in str(error)
    assert str(folder) in str(error)


KEYS = {
    "a format as a type": (
        ["target.dtype=fp8"],
        "target.dtype=fp8 is no choice\n  allowed: bfloat16, float16, float32, float64\n  to do: ",
    ),
    "a format as a key": (
        ["+target.quantization=fp8"],
        "target.quantization=fp8 is no key\n  allowed: keys of target are checkpoint, ",
    ),
    "a format as weights": (
        ["target.weights=fp8"],
        "target.weights=fp8 is no choice\n  allowed: checkpoint, random\n  to do: ",
    ),
    "a format of the cache": (
        ["engine.kv_cache.dtype=fp8_e5m2"],
        "dtype=fp8_e5m2 is no choice\n  allowed: auto, fp8\n  to do: did you mean engine.kv_cache.",
    ),
    "a format of the drafter's cache": (["+method.kv_cache.dtype=fp8"], "dtype=fp8 is no key\n"),
    "a format that no target has": (
        ["target=tiny_gemma4_nvfp4"],
        "to do: did you mean target=tiny_gemma4_fp8?",
    ),
    "formats to compare, by name": (
        ["metrics.compare_formats=fp8"],
        "metrics.compare_formats=fp8 is text\n  allowed: true or false\n  to do: ",
    ),
    "no drafter for the method": (
        ["target=tiny_gemma4_fp8", "method=eagle"],
        "allowed: a folder or a hub id (drafters the target names: gemma4_mtp: zoo:",
    ),
    "auto without a drafter": (
        ["target=custom", "target.checkpoint=zoo:tiny_gemma4_fp8", "method=auto"],
        "method.checkpoint=null leaves method=auto without a drafter",
    ),
    "a drafter that another engine does not run": (
        ["target=tiny_gemma4_fp8", "method=eagle3", "engine=transformers"],
        "method=eagle3 is not available with engine=transformers\n  allowed: gemma4_mtp, none",
    ),
}


@pytest.mark.parametrize("name", KEYS)
def test_keys(name: str) -> None:
    typed, says = KEYS[name]
    error = refused(lambda config: None, *typed)
    assert error.exit_code == 2
    assert says in str(error)


def test_formats_of_two_models(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Catches two models whose speeds are compared as if they differed in their formats alone."""
    typed = ["experiment=formats", "method=eagle3", *TYPED, f"hydra.sweep.dir={tmp_path / 'out'}"]
    assert main([*typed, "target=tiny_gemma4,tiny_gemma4_fp8,tiny_qwen3"]) == 2
    said = capsys.readouterr().err
    assert said.count("hydraspec:") == 1
    assert "target=tiny_qwen3 is another model than tiny_gemma4: model_type is qwen3, not " in said
    assert not list(tmp_path.rglob("summary.json"))


@pytest.mark.parametrize(
    "targets",
    [
        ["tiny_gemma4", "tiny_gemma4_fp8", "tiny_gemma4_fp8_block", "tiny_gemma4_w4a16"],
        ["tiny_mistral", "tiny_mistral_fp8"],
        ["gemma4_31b", "gemma4_31b_fp8", "gemma4_31b_w4a16"],
        ["gemma4_26b_a4b", "gemma4_26b_a4b_fp8"],
    ],
    ids=lambda targets: targets[0],
)
def test_formats_of_one_model(targets: list[str]) -> None:
    compared = ("metrics.compare_formats=true", "method=none")
    configs = [config_of(f"target={name}", *compared) for name in targets]
    check_formats(configs)
    with pytest.raises(UserError, match="is another model than"):
        check_formats([*configs, config_of("target=qwen3_8b", *compared)])
    check_formats([*configs, config_of("target=qwen3_8b", "method=none")])


def test_files_of_llama_cpp(written: Path, tmp_path: Path) -> None:
    """Catches "fetch it again" for a folder that is whole, and a file whose folder is no better."""
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    says = f"{str(tmp_path / 'model-Q4_K_M.gguf')!r} is in llama.cpp's format (GGUF); expected a"
    for given in (tmp_path, tmp_path / "model-Q4_K_M.gguf"):
        assert says in str(refused(load, *ALONE.format(folder=given).split()))
    shutil.copy(written / "float" / "config.json", tmp_path)
    assert says in str(refused(load, *ALONE.format(folder=tmp_path).split()))


@pytest.mark.parametrize(
    ("format_name", "ranks", "says"),
    [
        ("block", 4, "the 64 inputs of the quantised module 'o_proj' inside a group of 32"),
        ("packed", 2, "the 48 inputs of the quantised module 'down_proj' inside a group of 16"),
    ],
)
def test_ranks_that_cut_a_group(written: Path, format_name: str, ranks: int, says: str) -> None:
    """Catches a split that is refused after every rank has started, and scales of another group."""
    typed = [*ALONE.format(folder=written / format_name).split(), f"parallelism.tensor={ranks}"]
    error = refused(splits.check, *typed)
    assert error.exit_code == 2
    assert f"parallelism.tensor={ranks} cuts {says}, which share a scale\n  allowed: 1" in str(
        error
    )


def misfit(folder: Path) -> None:
    edit_config(
        folder, quantization_config=compressed(INT4 | {"group_size": 128}, None, "pack-quantized")
    )


def test_transformers_gets_no_folder_that_does_not_fit(written: Path, tmp_path: Path) -> None:
    """Catches a traceback from inside the library's first product."""
    folder = Path(shutil.copytree(written / "packed", tmp_path / "copy"))
    misfit(folder)
    typed = ALONE.format(folder=folder).split()
    error = refused(load_parts, *typed, "engine=transformers")
    assert error.exit_code == 3
    assert f"{DOWN}.weight_scale is [32, 3], the config makes it [32, 1]" in str(error)


def notes(folder: Path) -> tuple[str, ...]:
    target = load_target(
        str(folder),
        weights="checkpoint",
        dtype=torch.float32,
        device=torch.device("cpu"),
        seed=0,
        max_model_len=None,
    )
    return target.quantization_notes


def test_a_misspelt_list_of_ignored_modules_is_a_warning(written: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written / "channel", tmp_path / "copy"))
    kept = load_file(written / "float" / "model.safetensors")[f"{DOWN}.weight"]
    rewrite(folder, lambda tensors: without(DOWN)(tensors) | {f"{DOWN}.weight": kept})
    spelt = FORMATS["channel"][1]
    edit_config(folder, quantization_config=spelt | {"ignore": ["lm_head", "re:.*1.mlp.down_porj"]})
    (note,) = notes(folder)
    assert f"names a format for {DOWN}, and the files hold these in float" in note
    edit_config(folder, quantization_config=spelt | {"ignore": ["lm_head", "re:.*1.mlp.down_proj"]})
    assert notes(folder) == ()


def test_a_format_of_float_files_is_a_warning(written: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written / "float", tmp_path / "copy"))
    edit_config(folder, quantization_config=AWQ)
    (note,) = notes(folder)
    assert note.endswith(f"of {str(folder)!r} is not applied: all weights of its files are float")


def test_a_drafter_that_repeats_its_targets_format_is_a_warning(tmp_path: Path) -> None:
    """Catches notes of a drafter that are kept only where its own matrices are quantised."""
    folder = Path(shutil.copytree(resolve_folder("zoo:tiny_gemma4-eagle3"), tmp_path / "copy"))
    edit_config(folder, quantization_config=FORMATS["channel"][1])
    warnings = load(config_of(*EAGLE3.format(folder=folder).split())).info.warnings
    assert [each for each in warnings if "all weights of its files are float" in each]

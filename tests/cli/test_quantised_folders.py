"""Quantised folders from the command line: what a run records of them, and exit status 3."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_targets import edit_config, rewrite
from written_formats import DOWN, FORMATS, write_formats

from hydraspec.models.checkpoint.quantization import encode
from hydraspec.shipped import ZOO

KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TYPED = ("target=custom", "method=none", "tracker=none", "sampling.max_tokens=4")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_formats(tmp_path_factory.mktemp("formats"))


@pytest.fixture
def run(command: Callable[..., int], tmp_path: Path) -> Callable[..., int]:
    """A function that runs a folder over one prompt of token ids; returns the exit status."""
    workload = tmp_path / "workload.jsonl"
    workload.write_text(json.dumps({"prompt_token_ids": [3, 1, 4, 1, 5]}))
    asked = ("workload=jsonl", f"workload.path={workload}", f"hydra.run.dir={tmp_path}/out")
    return lambda folder, *more: command(
        f"target.checkpoint={folder}", "target.dtype=float32", *TYPED, *asked, *more
    )


@pytest.mark.parametrize(
    ("engine", "format_name", "stored"),
    [
        ("native", "packed", "int4 group 16"),
        ("native", "transformers", "fp8 32x16, inputs per 16"),
        ("transformers", "static", "fp8 per tensor, inputs static"),
    ],
)
def test_a_run_records_how_the_target_is_stored(
    run: Callable[..., int],
    written: Path,
    tmp_path: Path,
    engine: str,
    format_name: str,
    stored: str,
) -> None:
    if engine == "transformers":
        pytest.importorskip("compressed_tensors")
    assert run(written / format_name, f"engine={engine}") == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["quantization"] == {"target": dict.fromkeys(KINDS, stored), "drafter": None}
    says = any("reads quantised weights its own way" in each for each in summary["warnings"])
    assert says == (engine == "transformers")


def test_a_cache_format_that_is_not_applied_is_a_warning(
    run: Callable[..., int], written: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(written / "channel", tmp_path / "with_cache")
    settings = FORMATS["channel"][1] | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    edit_config(folder, quantization_config=settings)
    assert run(folder) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [each for each in summary["warnings"] if "kv_cache_scheme" in each]


def test_a_float_folder_records_nothing(
    run: Callable[..., int], written: Path, tmp_path: Path
) -> None:
    assert run(written / "float") == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["quantization"] == {"target": None, "drafter": None}


def test_a_format_that_float_files_do_not_have_is_a_warning(
    run: Callable[..., int], written: Path, tmp_path: Path
) -> None:
    """Catches notes that are kept only where something is quantised."""
    folder = shutil.copytree(written / "float", tmp_path / "announced")
    edit_config(folder, quantization_config={"quant_method": "awq", "bits": 4})
    assert run(folder) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["quantization"] == {"target": None, "drafter": None}
    assert [each for each in summary["warnings"] if "all weights of its files are float" in each]


def quantised_head(folder: Path) -> Path:
    """The EAGLE head of tiny_mistral in Mistral's FP8, its fusion layer in float."""
    shutil.copytree(ZOO / "tiny_mistral-eagle", folder)
    edit_config(folder, "params.json", quantization={"qformat_weight": "fp8_e4m3"})
    file, found = folder / "consolidated.safetensors", {}
    for name, tensor in load_file(file).items():
        module, _, last = name.rpartition(".")
        if tensor.dim() != 2 or module == "eagle_linear":
            found[name] = tensor
            continue
        encoded = encode(tensor, FORMATS["static"][0])
        found[name] = encoded["weight"]
        found[f"{module}.qscale_weight"] = encoded["weight_scale"].reshape(())
        found[f"{module}.qscale_act"] = torch.tensor(0.05)
        assert last == "weight"
    save_file(found, file)
    return folder


def test_a_run_records_how_the_drafter_is_stored(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a drafter that takes its target's formats, and a target that takes its drafter's."""
    head = quantised_head(tmp_path / "head")
    assert run("zoo:tiny_mistral", "method=eagle", f"method.checkpoint={head}") == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    found = summary["quantization"]
    assert found["target"] is None
    assert found["drafter"] == dict.fromkeys(KINDS, "fp8 per tensor, inputs static")
    assert "quantization={'down_proj': 'fp8 per tensor, inputs static'" in capsys.readouterr().err
    assert summary["lossless"]["verdict"] == "identical"


def no_scale(folder: Path) -> None:
    rewrite(folder, lambda t: {k: v for k, v in t.items() if k != f"{DOWN}.weight_scale"})


def zero_scale(folder: Path) -> None:
    rewrite(folder, lambda t: t | {f"{DOWN}.weight_scale": torch.zeros(32, 1)})


def nvfp4(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})


def no_config(folder: Path) -> None:
    edit_config(folder, quantization_config=None)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (no_scale, f"missing: {DOWN}.weight_scale"),
        (zero_scale, "layers.1.mlp.down_proj.weight_scale"),
        (nvfp4, "quant_method is 'modelopt'; expected compressed-tensors or fp8"),
        (no_config, "is quantised: layers.0.mlp.down_proj.weight (F8_E4M3)"),
    ],
)
def test_a_broken_folder_ends_the_run_with_one_message(
    run: Callable[..., int],
    written: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    words: str,
) -> None:
    folder = Path(shutil.copytree(written / "channel", tmp_path / "checkpoint"))
    damage(folder)
    assert run(folder) == 3
    printed = capsys.readouterr().err
    assert words in printed
    assert str(folder) in printed
    assert "Traceback" not in printed


def test_transformers_draws_no_quantised_weights(
    run: Callable[..., int], written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(written / "channel", "engine=transformers", "target.weights=random") == 3
    assert "transformers draws random weights in float only" in capsys.readouterr().err

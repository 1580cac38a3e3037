"""Gemma 4's image encoders: features are transformers', wrong configs are refused, and files
without an encoder leave the model without one.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_targets import load
from vision_oracle import SHAPES, make_wrapper, oracle_features, random_image, random_wrapper

from hydraspec.errors import CheckpointError
from hydraspec.models import image_batch
from hydraspec.models.gemma4.vision import ClippedLinear
from hydraspec.models.gemma4.vision_config import read_vision
from hydraspec.models.place import Place
from hydraspec.types import Image

TOLERANCE = 1e-4  # of features of order one to four: float32 sums in another order
SEEDS = range(24)


def images_of(config: dict[str, Any], seed: int) -> list[Image]:
    return [random_image(shape, config, 10 * seed + i) for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("seed", SEEDS)
def test_features_are_transformers(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve towers and twelve projections without one, over images of four sizes, batched with
    padding; every third in several passes."""
    if seed % 3 == 0:
        monkeypatch.setattr(image_batch, "MOST_VALUES", 60 * 12)
    config = random_wrapper(seed)
    oracle = make_wrapper(config, seed)
    oracle.save_pretrained(tmp_path)
    encoder: Any = load(tmp_path).encoder  # type: ignore[attr-defined]
    images = images_of(config, seed)
    assert [encoder.fault(image) for image in images] == [None] * 4
    with torch.inference_mode():
        ours = encoder.encode(images)
    for mine, theirs in zip(ours, oracle_features(oracle, images), strict=True):
        assert mine.shape == theirs.shape
        assert (mine - theirs).abs().max() < TOLERANCE


def test_the_random_shapes_cover_every_field() -> None:
    towers = [random_wrapper(seed)["vision_config"] for seed in SEEDS if seed % 2 == 0]
    for key in ("use_clipped_linears", "standardize"):
        assert 2 <= sum(tower[key] for tower in towers) <= 10, key
    assert any(t["num_key_value_heads"] < t["num_attention_heads"] for t in towers)
    assert len({t["pooling_kernel_size"] for t in towers}) == 2
    assert len({t["head_dim"] for t in towers}) == 2


def test_random_weights_encode(tmp_path: Path) -> None:
    """Bounds of clipped maps do not clamp everything to one number."""
    config = random_wrapper(0) | {}
    config["vision_config"] |= {"use_clipped_linears": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    encoder: Any = load(tmp_path, weights="random").encoder  # type: ignore[attr-defined]
    first, second = encoder.encode([random_image((2, 2), config, seed) for seed in (1, 2)])
    assert torch.isfinite(first).all()
    assert (first - second).abs().mean() > 0.01
    assert first.std(0).mean() > 0.01


@pytest.mark.parametrize("clipped", [False, True])
def test_bounds_that_are_not_read_yet_are_no_absence_of_bounds(clipped: bool) -> None:
    place = Place(torch.float32, torch.device("cpu"))
    linear = ClippedLinear(2, 3, place, clipped=clipped)
    with pytest.raises(AssertionError, match="call finish") if clipped else nullcontext():
        linear.forward(torch.ones(1, 2))


def test_infinite_bounds_are_no_bounds_and_nan_is_refused(tmp_path: Path) -> None:
    config = random_wrapper(0)
    config["vision_config"] |= {"use_clipped_linears": True}
    oracle = make_wrapper(config, 0)
    for name, tensor in oracle.named_buffers():
        if name.endswith(("_min", "_max")):
            tensor.data.fill_(-torch.inf if name.endswith("_min") else torch.inf)
    oracle.save_pretrained(tmp_path)
    image = random_image((2, 2), config, 3)
    encoder: Any = load(tmp_path).encoder  # type: ignore[attr-defined]
    assert (encoder.encode([image])[0] - oracle_features(oracle, [image])[0]).abs().max() < 1e-4
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    bound = next(name for name in tensors if name.endswith(".output_max"))
    save_file(tensors | {bound: torch.tensor(torch.nan)}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"holds NaN or infinity: vision_tower\."):
        load(tmp_path)


@pytest.mark.parametrize("seed", [0, 1])
def test_files_without_images_leave_the_model_without_an_encoder(seed: int, tmp_path: Path) -> None:
    make_wrapper(random_wrapper(seed), seed).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    text = {k: v for k, v in load_file(file).items() if "vision" not in k}
    save_file(text, file, metadata={"format": "pt"})
    assert load(tmp_path).encoder is None  # type: ignore[attr-defined]
    broken = text | {"model.embed_vision.embedding_projection.weight": torch.zeros(2, 2)}
    save_file(broken, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="missing tensors: vision_"):
        load(tmp_path)


@pytest.mark.parametrize("own_names", [False, True])
def test_the_projection_is_read_by_both_of_its_names(own_names: bool, tmp_path: Path) -> None:
    """Released files have `vision_embedder.`, transformers' modules `embed_vision.`."""
    config = random_wrapper(1)
    oracle = make_wrapper(config, 1)
    oracle.save_pretrained(tmp_path)
    if own_names:
        named = {k: v for k, v in oracle.state_dict().items() if k != "lm_head.weight"}
        named = {k: v.clone().contiguous() for k, v in named.items()}
        if not config["tie_word_embeddings"]:
            named["lm_head.weight"] = oracle.lm_head.weight.detach().clone()
        save_file(named, tmp_path / "model.safetensors", metadata={"format": "pt"})
    image = random_image((2, 2), config, 3)
    encoder: Any = load(tmp_path).encoder  # type: ignore[attr-defined]
    with torch.inference_mode():
        ours = encoder.encode([image])[0]
    assert (ours - oracle_features(oracle, [image])[0]).abs().max() < TOLERANCE


# ------------------------------------------------------------------ what is refused

TOWER = {"model_type": "gemma4", "vision_config": {}}
UNIFIED = {"model_type": "gemma4_unified", "vision_config": {}}
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another encoder": (
        TOWER,
        {"model_type": "siglip"},
        r"model_type is 'siglip'; expected gemma4_",
    ),
    "the other's": (UNIFIED, {"model_type": "gemma4_vision"}, r"expected gemma4_unified_vision, s"),
    "no layers": (TOWER, {"num_hidden_layers": 0}, r"layers is 0; expected an integer of at least"),
    "half a head": (
        TOWER,
        {"head_dim": 6},
        r"vision_config.head_dim is 6; expected a multiple of 4",
    ),
    "kv heads": (
        TOWER,
        {"num_key_value_heads": 5},
        r"heads is nothing; expected a multiple of the 5",
    ),
    "activation": (TOWER, {"hidden_activation": "silu"}, r"is 'silu'; expected gelu_pytorch_tanh"),
    "biases": (TOWER, {"attention_bias": True}, r"attention_bias is True; expected false"),
    "a word": (TOWER, {"standardize": "yes"}, r"standardize is 'yes'; expected true or false"),
    "rope": (TOWER, {"rope_parameters": {"rope_type": "yarn"}}, r"expected an object with rope_th"),
    "theta": (
        TOWER,
        {"rope_parameters": {"rope_theta": -1}},
        r"vision_config.rope_parameters.rope_theta is -1; expected a number above 0",
    ),
    "pixels": (
        TOWER,
        {"patch_size": 5000},
        r"patch_size is 5000; expected an integer from 1 to 10",
    ),
    "eps": (TOWER, {"rms_norm_eps": 0}, r"rms_norm_eps is 0; expected a number above 0"),
    "width": (
        UNIFIED,
        {"mm_embed_dim": 8, "output_proj_dims": 16},
        r"output_proj_dims is 16; expected 8, as mm_embed_dim",
    ),
    "positions": (UNIFIED, {"mm_posemb_size": -3}, r"mm_posemb_size is -3; expected an integer of"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_configs_are_refused(case: str) -> None:
    config, changes, message = WRONG[case]
    with pytest.raises(CheckpointError, match=message) as raised:
        read_vision(config | {"vision_config": changes}, "x")
    assert str(raised.value).startswith("config.json of 'x': vision_config.")


def test_an_encoder_that_is_no_object_is_refused() -> None:
    with pytest.raises(CheckpointError, match="vision_config is 'big'; expected an object"):
        read_vision({"model_type": "gemma4", "vision_config": "big"}, "x")


def test_released_sizes_are_the_defaults() -> None:
    tower = read_vision(TOWER, "x")
    assert tower is not None
    assert (tower.patch_values, tower.pool, tower.num_positions) == (768, 3, 10240)
    unified = read_vision(UNIFIED, "x")
    assert unified is not None
    assert (unified.patch_values, unified.pool, unified.num_positions) == (6912, 1, 1120)


def test_faulty_images_have_one_message(tmp_path: Path) -> None:
    """Each of these would read outside a table, or mix up patches."""
    config = random_wrapper(0)
    make_wrapper(config, 0).save_pretrained(tmp_path)
    encoder: Any = load(tmp_path).encoder  # type: ignore[attr-defined]
    good = random_image((2, 2), config, 0)
    pool = config["vision_config"]["pooling_kernel_size"]
    faulty = {
        "patches have the shape": replace(good, patches=good.patches[:, 1:]),
        "positions have the shape": replace(good, positions=good.positions[1:]),
        "positions are outside 0 to 23": replace(good, positions=good.positions + 24),
        "no grid in raster order": replace(good, positions=good.positions[::-1].copy()),
        f"of multiples of {pool}": random_image((2, 2), _with_pool(config, pool + 1), 0),
        "num_tokens is 5; expected 4": replace(good, num_tokens=5),
        "expected [0, 2]": Image(
            patches=good.patches[:0], positions=np.zeros((0, 2), np.int64), num_tokens=0
        ),
    }
    for words, image in faulty.items():
        assert words in str(encoder.fault(image)), words


def _with_pool(config: dict[str, Any], pool: int) -> dict[str, Any]:
    return config | {"vision_config": config["vision_config"] | {"pooling_kernel_size": pool}}


FP8 = {
    **{"quant_method": "compressed-tensors", "format": "float-quantized"},
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
            "input_activations": {
                **{"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
                "symmetric": True,
            },
        }
    },
}


@pytest.mark.parametrize("is_ignored", [True, False])
def test_an_encoder_of_a_quantised_checkpoint(is_ignored: bool, tmp_path: Path) -> None:
    """Releases leave the tower in float; one that does not is read all the same."""
    ignored = ["lm_head", "re:.*embed.*", *(["re:.*vision_tower.*"] if is_ignored else [])]
    config = random_wrapper(0) | {"quantization_config": FP8 | {"ignore": ignored}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    target: Any = load(tmp_path, weights="random")
    layer = target.encoder.layers[0]
    assert (layer.q.linear.slab is None) == (layer.down.linear.slab is None) == is_ignored
    assert target.layers[0].mlp.gate_up.slab is not None
    with torch.inference_mode():
        (rows,) = target.encoder.encode([random_image((2, 2), config, 1)])
    assert torch.isfinite(rows).all()

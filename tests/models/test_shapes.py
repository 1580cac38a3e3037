"""The public shapes that ship without weights, and when they stand for a hub id."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hydraspec import factory
from hydraspec.cli.compose import plan
from hydraspec.config.choices import choices_of, shipped_shapes
from hydraspec.config.derive import BESIDE
from hydraspec.config.schema import RunConfig, Weights
from hydraspec.errors import CheckpointError, ConfigurationError
from hydraspec.models.checkpoint.quantization_config import read_schemes
from hydraspec.models.checkpoint.reader import SHAPES, open_checkpoint, resolve_folder
from hydraspec.models.dense.config import read_dense_config
from hydraspec.models.gemma4.assistant_config import read_assistant
from hydraspec.models.gemma4.config import FULL, Gemma4Config, read_gemma4_config

TARGETS = [n for n in shipped_shapes() if n.startswith("gemma4") and "-" not in n]
# layers, of them full, of them reading another's cache; hidden width; experts
PUBLISHED = {
    "gemma4_e2b": (35, 7, 20, 1536, 0),
    "gemma4_e4b": (42, 7, 18, 2560, 0),
    "gemma4_12b": (48, 8, 0, 3840, 0),
    "gemma4_26b_a4b": (30, 5, 0, 2816, 128),
    "gemma4_26b_a4b_fp8": (30, 5, 0, 2816, 128),
    "gemma4_31b": (60, 10, 0, 5376, 0),
    "gemma4_31b_fp8": (60, 10, 0, 5376, 0),
    "gemma4_31b_w4a16": (60, 10, 0, 5376, 0),
}


def read(name: str) -> Gemma4Config:
    return read_gemma4_config(open_checkpoint(f"shape:{name}").config, name)


def one(*overrides: str) -> RunConfig:
    return plan(overrides).jobs[0].config


@pytest.mark.parametrize("name", TARGETS)
def test_a_shape_is_that_of_the_release(name: str) -> None:
    config = read(name)
    full = sum(layer.kind == FULL for layer in config.layers)
    shared = sum(layer.shares_kv for layer in config.layers)
    found = (len(config.layers), full, shared, config.hidden_size, config.num_experts)
    assert found == PUBLISHED[name]
    assert config.layers[-1].kind == FULL
    assert (config.vocab_size, config.softcap, config.tied) == (262144, 30.0, True)
    assert {layer.head_dim for layer in config.layers} == {256, 512}


@pytest.mark.parametrize("name", TARGETS)
def test_its_assistant_fits(name: str) -> None:
    """Its queries read the target's cache: heads must be as wide, and share as many KV heads."""
    target = read(name)
    _, assistant = read_assistant(
        f"shape:{name.removesuffix('_fp8').removesuffix('_w4a16')}-assistant"
    )
    assert assistant.backbone_hidden_size == target.hidden_size
    assert assistant.text.vocab_size == target.vocab_size
    assert assistant.text.sliding_window == target.sliding_window
    for layer in assistant.text.layers:
        owner = target.last_owner(layer.kind)
        assert owner is not None
        source = target.layers[owner]
        assert (layer.head_dim, layer.num_kv_heads) == (source.head_dim, source.num_kv_heads)


def test_every_shape_is_a_target_choice_or_a_drafter_of_one() -> None:
    assert set(TARGETS) == set(PUBLISHED)
    targets = {name for name in shipped_shapes() if "-" not in name}
    assert targets - {"deepseek_v3_6_layers"} <= set(choices_of("target"))  # few GPUs hold all 61
    for name in set(shipped_shapes()) - targets:
        target, _, kind = name.partition("-")
        assert target in targets
        assert kind in BESIDE.values()
    for name in shipped_shapes():
        folder = resolve_folder(f"shape:{name}")
        assert [path.name for path in folder.iterdir()] == ["config.json"]
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
        assert folder.parent == SHAPES


def test_an_unknown_shape_names_the_others() -> None:
    with pytest.raises(CheckpointError, match=r"its shapes are .*gemma4_26b_a4b, "):
        resolve_folder("shape:gemma5")


# ------------------------------------------------------------------ in a configuration


def test_random_weights_need_no_download() -> None:
    config = one("target=gemma4_e4b", "target.weights=random")
    assert (config.target.name, config.target.checkpoint) == ("gemma4_e4b", "shape:gemma4_e4b")
    assert config.method.checkpoint == "shape:gemma4_e4b-assistant"
    assert config.method.weights is Weights.random
    hub, drawn = config.warnings
    assert "google/gemma-4-E4B-it is not read" in hub
    assert "recorded as random" in drawn
    factory.resolve_drafter(config)
    assert config.method.checkpoint == "shape:gemma4_e4b-assistant"
    assert len(one("target=gemma4_e4b", "target.weights=random", "method=none").warnings) == 1


def test_what_the_user_names_is_what_is_read() -> None:
    config = one("target=gemma4_e4b")
    assert config.target.checkpoint == "google/gemma-4-E4B-it"
    config = one("target=gemma4_e4b", "target.weights=random", "method.checkpoint=/my/drafter")
    assert (config.method.checkpoint, config.method.weights) == ("/my/drafter", Weights.checkpoint)
    config = one("target=gemma4_e4b", "target.weights=random", "target.checkpoint=/my/e4b")
    assert config.target.checkpoint == "/my/e4b"


@pytest.mark.parametrize("method", ["mtp", "auto"])
def test_layers_of_the_target_itself_come_with_its_shape(method: str) -> None:
    config = one("target=mimo_7b", "target.weights=random", f"method={method}")
    assert (config.target.checkpoint, config.method.checkpoint) == ("shape:mimo_7b",) * 2
    assert config.method.weights is Weights.random
    factory.resolve_drafter(config)
    assert (config.method.name, config.method.checkpoint) == ("mtp", "shape:mimo_7b")


def test_a_drafter_that_is_not_public_comes_with_the_shape() -> None:
    """No EAGLE-1 head for a Mistral of 7B is released."""
    with pytest.raises(ConfigurationError, match=r"add target\.weights=random, which draws"):
        one("target=mistral_7b", "method=eagle")
    config = one("target=mistral_7b", "method=eagle", "target.weights=random")
    assert config.method.checkpoint == "shape:mistral_7b-eagle"


@pytest.mark.parametrize("target", ["deepseek_v3", "mistral_medium_3_5"])
def test_a_quantised_release_is_planned_as_any_other(target: str) -> None:
    assert one(f"target={target}").target.weights is Weights.checkpoint
    assert one(f"target={target}", "target.weights=random").target.checkpoint == f"shape:{target}"
    conversion = one(f"target={target}", "target.checkpoint=/models/bf16").target
    assert conversion.checkpoint == "/models/bf16"


def test_the_release_of_mistral_medium_is_the_shape_in_fp8() -> None:
    """Hugging Face's files: a wrapper around ministral3, and the keys of its quantisation."""
    shape = open_checkpoint("shape:mistral_medium_3_5").config
    text = dict(shape)
    kept = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
    formats = text.pop("quantization_config") | {"modules_to_not_convert": kept}
    config = {"model_type": "mistral3", "text_config": text, "quantization_config": formats}
    found, expected = (read_dense_config(each, "release") for each in (config, shape))
    assert replace(found, rope=expected.rope) == expected
    assert found.rope.theta.equal(expected.rope.theta)
    assert found.rope.gain == pytest.approx(1.41589, abs=1e-5)  # mscale_all_dim is 0
    assert (found.rope.query_beta, found.tied) == (0.0, False)
    schemes = read_schemes(config, "release")
    assert schemes is not None
    module = "model.language_model.layers.0.mlp.up_proj"
    assert str(schemes.of(module)) == "fp8 per tensor, inputs static"
    for module in ("lm_head", "model.vision_tower.transformer.layers.0.attention.q_proj"):
        assert schemes.of(module) is None


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("gemma4_31b_fp8", "float-quantized"),
        ("gemma4_31b_w4a16", "pack-quantized"),
        ("gemma4_26b_a4b_fp8", "float-quantized"),
    ],
)
def test_a_quantised_shape_has_the_drafters_of_the_float_one(name: str, form: str) -> None:
    drafters = one(f"target={name}", "target.weights=random").target.drafters
    base = name.removesuffix("_fp8").removesuffix("_w4a16")
    assert drafters == one(f"target={base}", "target.weights=random").target.drafters
    float_, quantised = (open_checkpoint(f"shape:{n}").config for n in (base, name))
    assert quantised.pop("quantization_config")["format"] == form
    assert quantised == float_


def test_a_shape_may_be_given_as_it_is() -> None:
    typed = ["target=custom", "target.checkpoint=shape:gemma4_31b", "target.weights=random"]
    config = one(*typed, "method=gemma4_mtp")
    assert (config.target.name, config.method.checkpoint) == (
        *("gemma4_31b", "shape:gemma4_31b-assistant"),
    )


@pytest.mark.parametrize(
    ("typed", "parts"),
    [
        (["target.checkpoint=shape:gemma4_e2b"], ["target.weights is checkpoint", "=random"]),
        (
            ["target.checkpoint=shape:gemma4_e2", "target.weights=random"],
            ["is no shape", "did you mean target.checkpoint=shape:gemma4_e2b?"],
        ),
        (
            ["method=gemma4_mtp", "method.checkpoint=shape:gemma4_e2b-assistant"],
            ["method.weights is checkpoint", "add method.weights=random"],
        ),
    ],
    ids=["with weights", "misspelt", "a drafter with weights"],
)
def test_a_shape_without_random_weights_is_refused(typed: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        one(*typed)
    for part in parts:
        assert part in str(caught.value)

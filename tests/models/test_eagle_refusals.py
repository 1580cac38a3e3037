"""Drafter folders that do not fit: one message that names both sides; and what is taken as it is
meant.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eagle_folders import (
    LAYER,
    ROWS,
    SIZE,
    draw_eagle1,
    make_head,
    make_target,
    saved,
    speculators_config,
    write,
    write_authors,
    write_consolidated,
)
from eagle_rows import load
from safetensors.torch import save_file
from tiny_targets import assistant_config, gemma4_config, write_folder

from hydraspec.models.detect import Detected, detect, open_draft
from hydraspec.types import CheckpointError

Mend = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def folder(path: Path, method: str, change: Mend) -> Path:
    """A whole speculators folder with one thing changed."""
    head = make_head(method, norm_before_residual=True)
    config, tensors = speculators_config(head), saved(head)
    change(config, tensors)
    return write(path, config, tensors)


def keys(**values: Any) -> Mend:
    return lambda config, tensors: config.update(values)


def drop(*names: str) -> Mend:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name in names:
            config.pop(name, None)
            tensors.pop(name, None)

    return change


def tensor(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Mend:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = make(tensors[name]).contiguous()

    return change


# what is wrong -> method, the change, what the message says
REFUSED: dict[str, tuple[str, Mend, list[str]]] = {
    "images as a word": (
        "eagle3",
        keys(supports_mm_inputs="yes"),
        ["supports_mm_inputs is 'yes'", "true or false"],
    ),
    "hidden size as stated": ("eagle3", keys(target_hidden_size=64), ["size 64", "is 16"]),
    "fc for four aux layers, three ids": (
        "eagle3",
        tensor("fc.weight", lambda x: torch.cat((x, x[:, :SIZE]), 1)),
        ["reads 64 values", "names 3 aux layers [1, 2, 4]", "makes 48"],
    ),
    "fc for two aux layers by default": (
        "eagle3",
        lambda c, t: (
            drop("eagle_aux_hidden_state_layer_ids")(c, t),
            tensor("fc.weight", lambda x: x[:, : 2 * SIZE])(c, t),
        ),
        ["reads 32 values", "leaves to the default 3 aux layers [2, 3, 3]"],
    ),
    "count of aux states": ("eagle3", keys(num_aux_hidden_states=4), ["counts 4", "the 3 layers"]),
    "aux layers the target lacks": (
        "eagle3",
        keys(eagle_aux_hidden_state_layer_ids=[1, 2, 7]),
        ["[1, 2, 7]", "has 6 layers"],
    ),
    "an aux layer twice": (
        "eagle3",
        keys(eagle_aux_hidden_state_layer_ids=[1, 2, 2]),
        ["[1, 2, 2]", "0 to 6"],
    ),
    "two lists of aux layers": (
        "eagle3",
        keys(target_layer_ids=[1, 2, 4]),
        ["means [1, 2, 4]", "means [2, 3, 5]"],
    ),
    "d2t too short": ("eagle3", tensor("d2t", lambda x: x[:-1]), ["32 entries", "33 tokens"]),
    "d2t outside the vocabulary": ("eagle3", tensor("d2t", lambda x: x + 9), ["below 40"]),
    "d2t not one to one": (
        "eagle3",
        tensor("d2t", lambda x: x - torch.arange(ROWS)),
        ["different ids"],
    ),
    "t2d of another d2t": ("eagle3", tensor("t2d", lambda x: ~x), ["t2d and d2t"]),
    "no d2t": ("eagle3", drop("d2t", "t2d"), ["33 tokens", "vocabulary of 40"]),
    "no head of its own": ("eagle3", drop("lm_head.weight"), ["no lm_head.weight", "33"]),
    "both norms before fc": (
        "eagle3",
        keys(norm_before_fc=True, fc_norm=True),
        ["norm_before_fc and fc_norm"],
    ),
    "a flag that is none": ("eagle3", keys(norm_output="yes"), ["norm_output is 'yes'"]),
    "norm of fc missing": ("eagle3", keys(norm_before_fc=True), ["missing", "input_norm.weight"]),
    "no layers": ("eagle3", drop("transformer_layer_config"), ["transformer_layer_config"]),
    "another vocabulary": (
        "eagle3",
        keys(transformer_layer_config=LAYER | {"vocab_size": 48}),
        ["vocabulary of 48", "has 40"],
    ),
    "no mask token": ("peagle", drop("mask_token_id"), ["no mask token", "ptd_token_id"]),
    "two mask tokens": ("peagle", keys(pard_token=4), ["mask_token_id 3", "pard_token 4"]),
    "mask token outside": ("peagle", keys(mask_token_id=40), ["is 40", "ends at 39"]),
    "no mask state": ("peagle", drop("mask_hidden"), ["no mask_hidden"]),
    "mask state of another width": (
        "peagle",
        tensor("mask_hidden", lambda x: x[..., :-1]),
        ["[1, 1, 47]", "48 values"],
    ),
    "quantised weights": (
        "eagle3",
        tensor("fc.weight", lambda x: x.to(torch.float8_e4m3fn)),
        ["is quantised", "fc.weight"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_both_sides(name: str, tmp_path: Path) -> None:
    method, change, says = REFUSED[name]
    where = folder(tmp_path / "d", method, change)
    with pytest.raises(CheckpointError) as refused:
        load(where, method, make_target())
    message = str(refused.value)
    assert all(part in message for part in [*says, str(where)]), message


def test_a_head_for_another_hidden_size_is_refused_by_its_shapes(tmp_path: Path) -> None:
    where = folder(tmp_path / "d", "eagle3", drop())
    with pytest.raises(CheckpointError, match=r"reads 48 values.*hidden size is 24"):
        load(where, "eagle3", make_target(hidden_size=24))


def test_an_eagle1_head_for_another_hidden_size_is_refused(tmp_path: Path) -> None:
    target = make_target()
    head = draw_eagle1(np.random.default_rng(3), target, is_mistral=True)
    where = write_consolidated(tmp_path / "d", head)
    with pytest.raises(CheckpointError, match=r"hidden size 16.*has 24"):
        load(where, "eagle", make_target(hidden_size=24))


@pytest.mark.parametrize(
    ("holds", "asked"), [("eagle3", "peagle"), ("peagle", "eagle3"), ("eagle3", "eagle")]
)
def test_another_method_than_the_folder_is_for_is_refused(
    tmp_path: Path, holds: str, asked: str
) -> None:
    where = folder(tmp_path / "d", holds, drop())
    with pytest.raises(CheckpointError, match=f"method={asked}, but .* method={holds}"):
        load(where, asked, make_target())


def test_an_assistant_offered_as_eagle3_is_refused(tmp_path: Path) -> None:
    where = write_folder(tmp_path / "a", assistant_config(gemma4_config()))
    with pytest.raises(CheckpointError, match=r"method=eagle3, but .*method=gemma4_mtp"):
        load(where, "eagle3", make_target())


def test_an_authors_head_without_a_mask_is_refused_for_peagle(tmp_path: Path) -> None:
    where = write_authors(tmp_path / "d", make_head())
    with pytest.raises(CheckpointError, match="no mask token"):
        load(where, "peagle", make_target())


# ------------------------------------------------------------------ what is taken as meant


@pytest.mark.parametrize(
    "spelt",
    [
        {"mask_token_id": 7},
        {"pard_token": 7},
        {"ptd_token_id": 7},
        {"dflash_config": {"mask_token_id": 7}},
    ],
    ids=lambda spelt: next(iter(spelt)),
)
def test_every_spelling_of_the_mask_token(tmp_path: Path, spelt: dict[str, Any]) -> None:
    where = folder(tmp_path / "d", "peagle", lambda c, t: (c.pop("mask_token_id"), c.update(spelt)))
    assert load(where, "peagle", make_target()).spec.mask_token_id == 7


@pytest.mark.parametrize(
    "spelt",
    [
        {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}},
        {"target_layer_ids": [0, 2, 4]},
        {"dflash_config": {"target_layer_ids": [0, 2, 4]}},
    ],
    ids=["top", "nested", "layer outputs", "dflash"],
)
def test_every_spelling_of_the_aux_layers(tmp_path: Path, spelt: dict[str, Any]) -> None:
    where = write_authors(tmp_path / "d", make_head(), ids=spelt)
    assert load(where, "eagle3", make_target()).spec.aux_layer_ids == (1, 3, 5)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, False),
        ({"supports_mm_inputs": True}, True),
        ({"eagle_config": {"supports_mm_inputs": True}}, True),
        ({"supports_mm_inputs": False}, False),
    ],
)
def test_heads_say_whether_they_read_images(
    tmp_path: Path, said: dict[str, Any], expected: bool
) -> None:
    head = load(folder(tmp_path, "eagle3", keys(**said)), "eagle3", make_target())
    assert head.spec.supports_mm_inputs is expected


def test_a_head_of_another_width_reads_no_images(tmp_path: Path) -> None:
    """Its embeddings have another width than the encoder's outputs."""

    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["supports_mm_inputs"] = True
        tensors["fc.weight"] = torch.zeros(SIZE, 3 * (SIZE + 8), dtype=torch.float64)

    where = folder(tmp_path, "eagle3", change)
    with pytest.raises(CheckpointError) as caught:
        load(where, "eagle3", make_target(hidden_size=SIZE + 8))
    words = f"supports_mm_inputs is true, and the head's hidden size {SIZE} is not the target's 24"
    assert words in str(caught.value)


def test_aux_layers_default_to_the_authors(tmp_path: Path) -> None:
    target = make_target()
    target.num_layers = 12
    where = folder(tmp_path / "d", "eagle3", drop("eagle_aux_hidden_state_layer_ids"))
    assert load(where, "eagle3", target).spec.aux_layer_ids == (2, 6, 9)


@pytest.mark.parametrize("method", ["eagle3", "peagle"])
def test_a_folder_that_says_all_is_not_noted(tmp_path: Path, method: str) -> None:
    assert load(folder(tmp_path / "d", method, drop()), method, make_target()).spec.notes == ()


def test_a_drafter_made_for_fewer_positions_says_so(tmp_path: Path) -> None:
    target = make_target()
    target.max_position_embeddings = 4096
    (note,) = load(folder(tmp_path / "d", "eagle3", drop()), "eagle3", target).spec.notes
    assert "256 positions" in note
    assert "4096" in note


def test_quantisation_of_the_target_does_not_leak(tmp_path: Path) -> None:
    """Drafters often carry their target's settings; their own float weights decide."""
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    where = folder(
        tmp_path / "d",
        "eagle3",
        keys(**quantised, transformer_layer_config=LAYER | quantised),
    )
    head = load(where, "eagle3", make_target())
    assert head.combine is not None
    assert head.combine.fc.weight.dtype == torch.float64


# ------------------------------------------------------------------ detection


def found(where: Path) -> Detected | None:
    return detect(open_draft(str(where)))


def test_heads_are_known_by_their_tensors_where_the_config_is_silent(tmp_path: Path) -> None:
    """The authors' own files say only `LlamaForCausalLM`."""
    head = make_head()
    plain = {**LAYER, "architectures": ["LlamaForCausalLM"]}
    with_mask = saved(make_head("peagle"))
    eagle1 = draw_eagle1(np.random.default_rng(3), make_target(), is_mistral=False)
    for name, tensors, method in (
        ("eagle-dflash", saved(head), "eagle3"),
        ("eagle3-a", with_mask, "peagle"),
        ("eagle3-b", saved(eagle1), "eagle"),
    ):
        detected = found(write(tmp_path / name, plain, tensors))
        assert detected is not None
        assert detected.method == method


def test_formats_are_detected(tmp_path: Path) -> None:
    mistral = draw_eagle1(np.random.default_rng(3), make_target(), is_mistral=True)
    cases = {
        "eagle": write_consolidated(tmp_path / "a", mistral),
        "eagle3": write_authors(tmp_path / "b", make_head()),
        "peagle": write_authors(tmp_path / "c", make_head("peagle")),
        "gemma4_mtp": write_folder(tmp_path / "d", assistant_config(gemma4_config())),
        "mtp": write_folder(tmp_path / "e", {"model_type": "x", "num_nextn_predict_layers": 1}),
    }
    for method, where in cases.items():
        detected = found(where)
        assert detected is not None
        assert detected.method == method
    assert found(write_folder(tmp_path / "f", gemma4_config())) is None


def test_a_mistral_target_in_its_own_format_is_no_drafter(tmp_path: Path) -> None:
    where = tmp_path / "t"
    where.mkdir()
    (where / "params.json").write_text(json.dumps({"dim": 16, "n_layers": 1, "n_heads": 2}))
    save_file({"layers.0.attention.wq.weight": torch.ones(16, 16)}, where / "a.safetensors")
    assert found(where) is None
    with pytest.raises(CheckpointError, match="is no drafter"):
        load(where, "eagle", make_target())


def test_k_is_that_of_the_default_proposal(tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        other = {"proposal_type": "tree", "speculative_tokens": 60}
        config["speculators_config"]["proposal_methods"].insert(0, other)

    detected = found(folder(tmp_path / "d", "eagle3", change))
    assert detected is not None
    assert detected.num_speculative_tokens == 3

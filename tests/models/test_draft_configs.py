"""What a drafter's config may say in several ways: notes on the reading that was chosen, refusals
of contradictions and of what is not computed, and folders that hold something else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eagle_folders import (
    LAYER,
    ROWS,
    FakeTarget,
    authors_names,
    draw_eagle1,
    make_head,
    make_target,
    saved,
    speculators_config,
    write,
    write_consolidated,
)
from eagle_rows import load
from safetensors.torch import save_file

from hydraspec.models.checkpoint.mistral_names import config_of_params
from hydraspec.models.dense.config import read_dense_config
from hydraspec.models.detect import Detected, detect, open_draft, resolve
from hydraspec.models.draft_spec import DraftSpec
from hydraspec.models.gemma4.assistant import load_assistant
from hydraspec.models.mtp.loading import load_mtp
from hydraspec.types import CheckpointError

AUX = "eagle_aux_hidden_state_layer_ids"


def deep_target() -> FakeTarget:
    target = make_target()
    target.num_layers = 12
    return target


def authors(path: Path, config: dict[str, Any], method: str = "eagle3") -> Path:
    """A folder as EAGLE's authors publish it, which names no aux layers and no flags."""
    raw = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": ROWS}
    return write(path, raw | config, authors_names(saved(make_head(method))))


def speculators(path: Path, config: dict[str, Any], method: str = "eagle3") -> Path:
    head = make_head(method)
    raw = speculators_config(head) | {"norm_before_residual": False}
    return write(path, raw | config, saved(head))


def refusal(where: Path, method: str = "eagle3") -> str:
    with pytest.raises(CheckpointError) as refused:
        load(where, method, deep_target())
    assert str(where) in str(refused.value)
    return str(refused.value)


# ------------------------------------------------------------------ notes

SAID = {"norm_before_residual": False}
# config -> the aux layers that are read, and what each note says
READ: dict[str, tuple[dict[str, Any], tuple[int, ...], list[str]]] = {
    "nested from 2": ({"eagle_config": {AUX: [2, 6, 9]}}, (2, 6, 9), []),
    "nested from 1": (
        {"eagle_config": {AUX: [1, 5, 8]}},
        (1, 5, 8),
        ["[1, 5, 8] is read as the target's states after that many layers.*add .* [2, 6, 9]"],
    ),
    "top level from 1": ({AUX: [1, 5, 8]}, (1, 5, 8), []),
    "both from 1": ({AUX: [1, 5, 8], "eagle_config": {AUX: [1, 5, 8]}}, (1, 5, 8), []),
    "no ids": ({}, (2, 6, 9), ["names no aux layers.*[2, 6, 9] of the target's 12"]),
    "empty lists": (
        {AUX: [], "eagle_config": {AUX: []}, "target_layer_ids": []},
        (2, 6, 9),
        ["names no aux layers"],
    ),
    "dspark's outputs of layers": ({"dspark_target_layer_ids": [1, 5, 8]}, (2, 6, 9), []),
}


@pytest.mark.parametrize("name", READ)
def test_aux_layers_and_the_notes_on_them(name: str, tmp_path: Path) -> None:
    config, ids, notes = READ[name]
    spec = load(authors(tmp_path / "d", config | SAID), "eagle3", deep_target()).spec
    assert spec.aux_layer_ids == ids
    assert len(spec.notes) == len(notes)
    for note, says in zip(spec.notes, notes, strict=True):
        assert all(part in note for part in says.split(".*")), note


# what a folder without norm_before_residual means: (format, method, config) -> flag, and why
SILENT_NORM: dict[str, tuple[Any, str, dict[str, Any], bool, str]] = {
    "authors": (authors, "eagle3", {}, False, "EAGLE's authors"),
    "authors, null": (
        *(authors, "eagle3", {"norm_before_residual": None, "eagle_config": {}}),
        *(False, "EAGLE's authors"),
    ),
    "speculators eagle3": (speculators, "eagle3", {}, True, "vLLM's default; the class that"),
    "speculators eagle3, null": (
        *(speculators, "eagle3", {"norm_before_residual": None}, False, "vLLM's loader reads null"),
    ),
    "speculators peagle": (speculators, "peagle", {}, False, "the class that writes the format"),
}


@pytest.mark.parametrize("name", SILENT_NORM)
def test_a_silent_norm_is_what_vllm_takes_and_noted(name: str, tmp_path: Path) -> None:
    """Catches a head whose first residual is another than the engine it was published for computes:
    it shows only as low acceptance.
    """
    make, method, config, value, why = SILENT_NORM[name]
    where = make(tmp_path / "d", {AUX: [2, 3, 4]}, method)
    raw = json.loads((where / "config.json").read_text())
    raw.pop("norm_before_residual", None)
    (where / "config.json").write_text(json.dumps(raw | config))
    spec = load(where, method, deep_target()).spec
    (note,) = spec.notes
    assert f"norm_before_residual; taken as {str(value).lower()}" in note
    assert why in note
    assert spec.norm_before_residual is value


def test_null_at_the_top_leaves_the_nested_flag(tmp_path: Path) -> None:
    config = {"norm_before_residual": None, "eagle_config": {"norm_before_residual": True}}
    assert load(authors(tmp_path / "d", config), "eagle3", deep_target()).spec.norm_before_residual


@pytest.mark.parametrize(
    ("verifier", "target", "agrees"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", True),
        ("Qwen/Qwen3-8B", "/models/qwen3-8b/", True),
        ("zoo:tiny_qwen3", "here/tiny_qwen3", True),
        ("Qwen/Qwen3-8B", "/hub/models--Qwen--Qwen3-8B/snapshots/0a1b", True),
        ("", "Qwen/Qwen3-8B", True),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-FP8", True),
        ("google/gemma-4-31B-it", "RedHatAI/gemma-4-31B-it-FP8-block", True),
        ("google/gemma-4-E2B-it", "google/gemma-4-E2B-it-qat-w4a16-ct", True),
        ("zoo:tiny_gemma4", "zoo:tiny_gemma4_fp8", True),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-4B-FP8", False),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-4B", False),
    ],
)
def test_another_verifier_than_the_target_is_noted(
    verifier: str, target: str, agrees: bool, tmp_path: Path
) -> None:
    config = speculators_config(make_head(), verifier=verifier)
    where = write(tmp_path / "d", config, saved(make_head()))
    spec: DraftSpec = load(where, "eagle3", deep_target()).spec
    note = spec.note_on_target(target)
    assert (note is None) is agrees
    assert note is None or (repr(verifier) in note and repr(target) in note)


# ------------------------------------------------------------------ refusals

NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    **{
        f"{key} twice": (
            {key: True, "eagle_config": {key: False}},
            [f"eagle_config.{key} is False; expected the same as {key}, True"],
        )
        for key in NORMS
    },
    **{
        f"{key} {value}": (
            {"eagle_config": {key: value}},
            [f"{key} is {value}; expected {str(not value).lower()}"],
        )
        for key, value in (
            ("use_input_layernorm_in_first_layer", False),
            ("use_last_layernorm", False),
            ("use_mtp_layernorm", True),
            ("next_layer_regular", False),
        )
    },
    "logit_scale": ({"logit_scale": 0.5}, ["logit_scale is 0.5; expected 1"]),
    "logit_scale nested": (
        {"eagle_config": {"logit_scale": 2}},
        ["eagle_config.logit_scale is 2; expected 1"],
    ),
    "uncounted aux ids": (
        {"aux_hidden_state_layer_ids": [1, 2]},
        ["aux_hidden_state_layer_ids is [1, 2]", AUX, "target_layer_ids"],
    ),
    "uncounted aux ids nested": (
        {"eagle_config": {"aux_hidden_state_layer_ids": [1, 2]}},
        ["eagle_config.aux_hidden_state_layer_ids is [1, 2]"],
    ),
    "aux ids that are none": ({AUX: 3}, [f"{AUX} is 3; expected a list"]),
    "eagle_config": ({"eagle_config": "x"}, ["eagle_config is 'x'; expected an object"]),
    "dflash_config": ({"dflash_config": [1]}, ["dflash_config is [1]; expected an object"]),
    "layer_types": ({"layer_types": 3}, ["layer_types is 3; expected"]),
    "rope_parameters": ({"rope_parameters": 3}, ["rope_parameters is 3; expected"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_contradictions_and_what_is_not_computed_are_refused(name: str, tmp_path: Path) -> None:
    config, says = REFUSED[name]
    message = refusal(authors(tmp_path / "d", config))
    assert all(part in message for part in says), message


def test_keys_that_ask_for_what_is_computed_pass(tmp_path: Path) -> None:
    nested = {
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
    }
    config = {"eagle_config": nested, "logit_scale": 1.0, AUX: [2, 3, 4], "norm_output": None}
    load(authors(tmp_path / "d", config | SAID), "eagle3", deep_target())


SPECULATORS_CONFIGS: dict[str, tuple[Any, str]] = {
    "another algorithm": (
        {"algorithm": "peagle"},
        "speculators_model_type is 'eagle3', speculators_config.algorithm is 'peagle'",
    ),
    "no object": ("greedy", "speculators_config is 'greedy'; expected an object"),
    "proposals": (
        {"proposal_methods": ["greedy"]},
        "speculators_config.proposal_methods is ['greedy']; expected a list of objects",
    ),
    "verifier": ({"verifier": "x"}, "speculators_config.verifier is 'x'; expected an object"),
}


@pytest.mark.parametrize("name", SPECULATORS_CONFIGS)
def test_a_speculators_config_that_is_none(name: str, tmp_path: Path) -> None:
    settings, says = SPECULATORS_CONFIGS[name]
    assert says in refusal(speculators(tmp_path / "d", {"speculators_config": settings}))


@pytest.mark.parametrize("drop", ["mask_token_id", "mask_hidden"])
def test_method_eagle3_is_advised_only_where_it_would_run(drop: str, tmp_path: Path) -> None:
    head = make_head("peagle")
    config, tensors = speculators_config(head), saved(head)
    config.pop(drop, None)
    tensors.pop(drop, None)
    assert "method=eagle3" not in refusal(write(tmp_path / "a", config, tensors), "peagle")
    mask = {} if drop == "mask_token_id" else {"ptd_token_id": 3}
    advised = refusal(authors(tmp_path / "b", {AUX: [1, 2, 4]} | mask), "peagle")
    assert "use method=eagle3" in advised


DENSE: dict[str, Any] = {
    "partial_rotary_factor": 0.5,
    "rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1},
    "attn_logit_softcapping": 50.0,
    "no_rope_layers": [1, 0],
    "residual_multiplier": 0.2,
}
PLAIN_DENSE: dict[str, Any] = {
    "partial_rotary_factor": 1.0,
    "rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0},
    "attn_logit_softcapping": None,
    "no_rope_layers": [1, 1],
    "residual_multiplier": 1,
}


@pytest.mark.parametrize("key", DENSE)
def test_dense_keys_that_are_not_computed(key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"'x': {key}.* is .*; expected"):
        read_dense_config(LAYER | {key: DENSE[key]}, "x")
    assert read_dense_config(LAYER | PLAIN_DENSE, "x").head_dim == 8


MISTRAL: dict[str, Any] = {
    "rope_scaling": {"rope_type": "linear", "factor": 2},
    "softmax_scale": 0.3,
    "use_biases": True,
    "logit_scale": 0.5,
    "yarn": 4,
}


@pytest.mark.parametrize("key", MISTRAL)
def test_mistral_keys_that_are_not_computed(key: str, tmp_path: Path) -> None:
    head = draw_eagle1(np.random.default_rng(3), make_target(), is_mistral=True)
    where = write_consolidated(tmp_path / "d", head)
    params = json.loads((where / "params.json").read_text())
    (where / "params.json").write_text(json.dumps(params | {key: MISTRAL[key]}))
    assert f"{key} is {MISTRAL[key]!r}; expected" in refusal(where, "eagle")
    plain = {"rope_scaling": None, "use_biases": False, "logit_scale": 1, "yarn": None}
    config_of_params(params | plain | {"softmax_scale": params["head_dim"] ** -0.5}, "x")


# ------------------------------------------------------------------ what a folder holds

SILENT = {**LAYER, "architectures": ["Qwen3ForCausalLM"]}
HOLDS: dict[str, tuple[dict[str, Any], str | None]] = {
    "null keys of a target": ({"draft_vocab_size": None, "speculators_model_type": None}, None),
    "a mask that is null": ({"draft_vocab_size": 9, "mask_token_id": None}, "eagle3"),
    "pard_token null": ({"draft_vocab_size": 9, "pard_token": None}, "eagle3"),
    "a mask": ({"draft_vocab_size": 9, "mask_token_id": 1}, "peagle"),
    "EAGLE-3 of an MTP target": (
        {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "num_nextn_predict_layers": 1},
        "eagle3",
    ),
    "EAGLE-1 of an MTP target": (
        {"architectures": ["EagleDeepSeekMTPModel"], "num_nextn_predict_layers": 1},
        "eagle",
    ),
    "MTP": ({"num_nextn_predict_layers": 1}, "mtp"),
    "one architecture as a string": ({"architectures": "LlamaForCausalLMEagle3"}, "eagle3"),
}


@pytest.mark.parametrize("name", HOLDS)
def test_what_a_config_announces(name: str, tmp_path: Path) -> None:
    config, method = HOLDS[name]
    (tmp_path / "config.json").write_text(json.dumps(SILENT | config))
    found: Detected | None = detect(open_draft(str(tmp_path)))
    assert (None if found is None else found.method) == method


@pytest.mark.parametrize("name", ["DFlash3", "DSpark"])
def test_drafters_that_are_not_built_are_named(name: str, tmp_path: Path) -> None:
    config = {
        "architectures": [f"{name}DraftModel"],
        "dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 2, 3]},
    }
    message = refusal(authors(tmp_path / "d", config))
    assert f"{name}DraftModel" in message
    assert "a block drafter, which is not built" in message


def test_a_folder_of_pickles_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SILENT))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    for method in ("eagle", "eagle3"):
        assert "only pickle files (pytorch_model.bin)" in refusal(tmp_path, method)
    with pytest.raises(CheckpointError, match="only pickle files"):
        resolve("some/target", str(tmp_path))


@pytest.mark.parametrize("kind", ["deepseek_v3", "mimo"])
@pytest.mark.parametrize("announced", [{}, {"num_nextn_predict_layers": 0}])
def test_a_target_without_mtp_layers_says_which_key(
    kind: str, announced: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **announced}))
    save_file({"norm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"num_nextn_predict_layers 0 or absent"):
        load_mtp(
            str(tmp_path),
            weights="checkpoint",
            target=deep_target(),  # type: ignore[arg-type]
            num_drafts=1,
            seed=0,
        )


def test_an_eagle3_folder_offered_as_assistant_says_what_it_holds(tmp_path: Path) -> None:
    where = speculators(tmp_path / "d", {})
    with pytest.raises(CheckpointError, match=r"method=gemma4_mtp, but .* method=eagle3"):
        load_assistant(
            str(where),
            weights="checkpoint",
            target=deep_target(),  # type: ignore[arg-type]
            seed=0,
        )

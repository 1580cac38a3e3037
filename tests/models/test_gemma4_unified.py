"""Gemma 4 unified (the 12B): text model and assistant compute what transformers' classes compute,
tensors of sounds are left out, and configs that are not understood are refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gemma4_oracle import FULL, SLIDING, PagedRun, load, oracle_logits, run_in_chunks
from tiny_targets import write_folder
from unified_oracle import (
    draft_config,
    make_unified,
    make_unified_assistant,
    other_tensors,
    random_prompts,
    random_unified_config,
    to_wrapper,
    unified_config,
)

from hydraspec.errors import CheckpointError
from hydraspec.models.gemma4.assistant import Gemma4Assistant, load_assistant
from hydraspec.models.gemma4.assistant_config import read_assistant
from hydraspec.models.gemma4.config import read_gemma4_config

# Share of the logit range: float32 sums in another order, through up to seven layers.
TOLERANCE = 1e-4
SEEDS = range(6, 18)  # which draw every field at least twice
CENTROIDS = {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 3}


def assistant_in(folder: Path, target: Any) -> Gemma4Assistant:
    return load_assistant(str(folder), weights="checkpoint", target=target, seed=0)


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours - theirs).abs().max() <= TOLERANCE * (theirs.max() - theirs.min())


@pytest.mark.parametrize("seed", SEEDS)
def test_target_and_assistant_are_transformers(seed: int, tmp_path: Path) -> None:
    """Every second shape is a text model's folder, every other the wrapper of the release; every
    third assistant has a centroid head."""
    config = random_unified_config(seed)
    oracle = make_unified(config, seed)
    oracle.save_pretrained(tmp_path / "target")
    if seed % 2:
        to_wrapper(tmp_path / "target", config)
    run = PagedRun(load(tmp_path / "target"), 3, block_size=(1, 4, 16)[seed % 3], seed=seed)
    prompts = random_prompts(seed)
    for prompt, logits in zip(prompts, run_in_chunks(run, prompts, seed), strict=True):
        assert_near(logits, oracle_logits(oracle, prompt))

    head = CENTROIDS if seed % 3 == 2 else {}
    width = config["hidden_size"]
    text = draft_config(config, seed)
    draft = make_unified_assistant(text, seed + 100, backbone_hidden_size=width, **head)
    draft.save_pretrained(tmp_path / "assistant")
    ours = assistant_in(tmp_path / "assistant", run.target)
    lens = torch.tensor(run.lengths)
    tokens = torch.tensor([5, 9, 11])
    hidden = torch.randn(3, width, generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        context = ours.begin(lens - 1, lens, run.tables, int(lens.max()), run.caches)
        d, feedback = ours.step(context, tokens, hidden)
        logits, greedy = ours.compute_logits(d), ours.greedy_tokens(d)
        embedded = run.target.embed(tokens)
    for r, prompt in enumerate(prompts):
        with torch.no_grad():
            theirs = draft(
                inputs_embeds=torch.cat((embedded[r], hidden[r]))[None, None],
                position_ids=torch.tensor([[len(prompt) - 1]]),
                shared_kv_states=run.shared_kv(r, len(prompt), SLIDING, FULL),
            )
        assert_near(feedback[r], theirs.last_hidden_state[0, 0])
        chosen = logits[r] > torch.finfo(logits.dtype).min
        assert chosen.sum() == (3 * 8 if head else 96)
        assert_near(logits[r][chosen], theirs.logits[0, 0][chosen])
        assert int(greedy[r]) == int(theirs.logits[0, 0].argmax())


def test_the_random_shapes_cover_every_field() -> None:
    configs = [random_unified_config(seed) for seed in SEEDS]
    for key in (
        *("attention_k_eq_v", "num_kv_shared_layers", "use_double_wide_mlp"),
        *("attention_bias", "final_logit_softcapping", "tie_word_embeddings"),
    ):
        assert 2 <= sum(bool(config.get(key)) for config in configs) <= len(SEEDS) - 2, key


def test_tensors_of_sounds_are_left_out(tmp_path: Path) -> None:
    """Released names: `vision_embedder.`, which no other Gemma 4 has, beside `embed_vision.` and
    `embed_audio.`."""
    config = unified_config()
    make_unified(config, 1).save_pretrained(tmp_path)
    plain = load(tmp_path)
    to_wrapper(tmp_path, config)
    others = other_tensors(tmp_path)
    assert len(others) == 11  # as the 12B has
    wrapped = load(tmp_path).tensors().keys()  # type: ignore[attr-defined]
    of_images = {name.removeprefix("model.") for name in others if "audio" not in name}
    assert wrapped == plain.tensors().keys() | of_images  # type: ignore[attr-defined]


def test_defaults_are_those_of_the_unified_text_config() -> None:
    """Files leave out what equals transformers' defaults, and these are not Gemma 4's."""
    text = {
        **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48},
        **{"num_hidden_layers": 6, "num_attention_heads": 8},
    }
    gemma4, unified = (
        read_gemma4_config({"model_type": kind} | text, "x")
        for kind in ("gemma4_text", "gemma4_unified_text")
    )
    wrapper = {"model_type": "gemma4_unified", "text_config": text}
    assert read_gemma4_config(wrapper, "x") == unified
    assert (gemma4.sliding_window, gemma4.max_position_embeddings, gemma4.ple_size) == (
        *(512, 131072, 256),
    )
    assert (unified.sliding_window, unified.max_position_embeddings, unified.ple_size) == (
        *(1024, 262144, 0),
    )


# ------------------------------------------------------------------ what is refused

TEXT_KEYS = {"model_type": "gemma4_unified_text", **unified_config()}
WRONG_TEXTS: dict[str, tuple[dict[str, Any], str]] = {
    "per-layer inputs": (
        {"hidden_size_per_layer_input": 256},
        r"hidden_size_per_layer_input is 256; expected 0 or null: a unified model has no per-layer",
    ),
    "experts": ({"enable_moe_block": True}, r"enable_moe_block is True; .* is dense .*mend the"),
    "a number of experts": ({"num_experts": 128}, r"num_experts is 128; expected false, 0 or null"),
    "bidirectional text": (
        {"use_bidirectional_attention": "all"},
        r"use_bidirectional_attention is 'all'; expected null or vision: text is decoded causally",
    ),
    "another attention": (
        {"use_bidirectional_attention": "audio"},
        r"use_bidirectional_attention is 'audio'; expected null or vision",
    ),
    "a switch in words": (
        {"attention_k_eq_v": "yes"},
        r"attention_k_eq_v is 'yes'; expected true or false: mend the config",
    ),
    "another activation": (
        {"hidden_activation": "silu"},
        r"hidden_activation is 'silu'; expected gelu_pytorch_tanh",
    ),
    "an unknown kind of layer": (
        {"layer_types": [SLIDING, FULL, "linear_attention", FULL]},
        r"layer_types is .*; expected 4 names \(num_hidden_layers\), each sliding",
    ),
    "too few kinds": ({"layer_types": [FULL]}, r"layer_types is .*; expected 4 names"),
    "no window": ({"sliding_window": 0}, r"sliding_window is 0; expected an integer of at least 1"),
    "an odd head": ({"global_head_dim": 33}, r"global_head_dim is 33; expected even"),
    "heads that do not divide": (
        {"num_key_value_heads": 3},
        r"num_attention_heads is 4; expected a multiple of layer 0's 3 KV heads",
    ),
    "sharing without an owner": (
        {"num_kv_shared_layers": 4},
        r"num_kv_shared_layers is 4; expected a count that leaves a sliding_attention layer",
    ),
    "another rope": (
        {"rope_parameters": {SLIDING: {"rope_type": "yarn"}, FULL: {"rope_type": "default"}}},
        r"rope_parameters is .*; expected sliding_attention with rope_type default or proport",
    ),
    "a soft cap below 0": (
        {"final_logit_softcapping": -30.0},
        r"final_logit_softcapping is -30.0; expected a number above 0",
    ),
}
WRONG_WRAPPERS: dict[str, tuple[dict[str, Any], str]] = {
    "no text": (
        {"model_type": "gemma4_unified", "hidden_size": 32},
        r"text_config is nothing; expected an object with the keys of the text model",
    ),
    "a text that is a name": (
        {"model_type": "gemma4_unified", "text_config": "gemma"},
        r"text_config is 'gemma'; expected an object .*: download config.json again",
    ),
    "the text of another wrapper": (
        {"model_type": "gemma4_unified", "text_config": {"model_type": "gemma4_text"}},
        r"text_config.model_type is 'gemma4_text'; expected gemma4_unified_text, since model_type",
    ),
    "its text in another wrapper": (
        {"model_type": "gemma4", "text_config": TEXT_KEYS},
        r"text_config.model_type is 'gemma4_unified_text'; expected gemma4_text, since model_type",
    ),
}


@pytest.mark.parametrize("case", WRONG_TEXTS)
def test_wrong_text_configs_are_refused(case: str, tmp_path: Path) -> None:
    changes, message = WRONG_TEXTS[case]
    wrapper = {"model_type": "gemma4_unified", "text_config": TEXT_KEYS | changes}
    for config in (TEXT_KEYS | changes, wrapper):
        with pytest.raises(CheckpointError, match=message) as caught:
            load(write_folder(tmp_path, config), weights="random")
        assert str(tmp_path) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", WRONG_WRAPPERS)
def test_wrong_wrappers_are_refused(case: str, tmp_path: Path) -> None:
    config, message = WRONG_WRAPPERS[case]
    with pytest.raises(CheckpointError, match=message):
        load(write_folder(tmp_path, config), weights="random")


def assistant_config(**changes: Any) -> dict[str, Any]:
    text = {"model_type": "gemma4_unified_text", **draft_config(unified_config(), 1)}
    whole = {"model_type": "gemma4_unified_assistant", "backbone_hidden_size": 32}
    return whole | {"text_config": text} | changes


WRONG_ASSISTANTS = {
    "no text": ({"text_config": None}, r"text_config is None; expected an object"),
    "the text of Llama": (
        {"text_config": {"model_type": "llama"}},
        r"text_config.model_type is 'llama'; expected gemma4_unified_text or gemma4_text",
    ),
    "centroids that do not divide": (
        {"use_ordered_embeddings": True, "num_centroids": 7},
        r"num_centroids is 7; expected a divisor of vocab_size 96",
    ),
    "a target": ({"model_type": "gemma4_unified"}, r"'gemma4_unified'.*as target\.checkpoint"),
}


@pytest.mark.parametrize("case", WRONG_ASSISTANTS)
def test_wrong_assistants_are_refused(case: str, tmp_path: Path) -> None:
    changes, message = WRONG_ASSISTANTS[case]
    folder = write_folder(tmp_path, assistant_config(**changes))
    with pytest.raises(CheckpointError, match=message):
        read_assistant(str(folder))


def test_an_assistant_may_leave_out_its_width_and_its_text_type(tmp_path: Path) -> None:
    config = assistant_config()
    del config["backbone_hidden_size"], config["text_config"]["model_type"]
    _, shape = read_assistant(str(write_folder(tmp_path, config)))
    assert shape.backbone_hidden_size == 3840
    config["text_config"]["model_type"] = "gemma4_text"
    assert read_assistant(str(write_folder(tmp_path, config)))[1] == shape


def test_target_and_assistant_swapped_or_of_another_target(tmp_path: Path) -> None:
    target = load(write_folder(tmp_path / "t", TEXT_KEYS), weights="random")
    folder = write_folder(tmp_path / "a", assistant_config(backbone_hidden_size=40))
    with pytest.raises(CheckpointError, match=r"gemma4_unified_assistant.*as method\.checkpoint"):
        load(folder, weights="random")
    with pytest.raises(CheckpointError, match=r"backbone_hidden_size\) is 40 .* and 32"):
        load_assistant(str(folder), weights="random", target=target, seed=0)
    assert json.loads((folder / "config.json").read_text())["backbone_hidden_size"] == 40

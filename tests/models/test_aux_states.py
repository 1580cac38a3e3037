"""Aux hidden states: ids count layers passed, values are the true un-normed residual stream."""

import json
from pathlib import Path

import pytest
import torch
from dense_oracle import make_dense, oracle, small
from gemma4_oracle import FULL, SLIDING, PagedRun, load, make_target, stir, text_config
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from hydraspec.errors import CheckpointError
from hydraspec.models.aux_states import (
    AuxCollector,
    check_aux_layer_ids,
    default_aux_layer_ids,
    ids_of_layer_outputs,
)

# Of the largest value: float32 sums in another order, through up to six layers.
TOLERANCE = 1e-4
# Of the largest value: bfloat16 has 8 bits, and four layers round once or twice each.
NARROW_TOLERANCE = 0.03
NUM_LAYERS = 4
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]
GEMMA = text_config(
    num_hidden_layers=6,
    layer_types=[SLIDING, FULL] * 3,
    num_kv_shared_layers=2,
    hidden_size_per_layer_input=4,
    vocab_size_per_layer_input=96,
    attention_k_eq_v=True,
)


def states_in_chunks(folder: Path, ids: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Aux states [A, len, D] of PROMPT, fed in chunks over a paged cache."""
    run = PagedRun(load(folder, dtype), 1, block_size=4)
    parts = []
    with torch.inference_mode():
        for first, last in ((0, 5), (5, 6), (6, 12)):
            batch = run.batch({0: PROMPT[first:last]})
            _, aux = run.target.forward(batch, run.caches, ids)
            parts.append(torch.stack(aux))
    return torch.cat(parts, 1)


def save_adding_target(folder: Path) -> Tensor:
    """A Llama target whose layer i adds a known vector to its input, whatever that is.

    Returns the stream [num_layers + 1, len, D] after 0, 1, ... layers.
    """
    model = make_dense("llama", small(num_hidden_layers=NUM_LAYERS, mlp_bias=True), 1)
    vectors = torch.randn(NUM_LAYERS, 32)
    with torch.no_grad():
        for layer, vector in zip(model.model.layers, vectors, strict=True):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            layer.mlp.down_proj.bias.copy_(vector)
    model.save_pretrained(folder)
    start = model.model.embed_tokens.weight.detach()[PROMPT]
    added = torch.cat((torch.zeros(1, 32), vectors.cumsum(0)))
    return start + added[:, None]


def save_scaling_target(folder: Path) -> Tensor:
    """A Gemma 4 target whose layer i multiplies its input by a known layer scalar."""
    scalars = [0.5, 3.0, 0.01, 100.0]
    model = make_target(text_config(), 1)
    with torch.no_grad():
        for layer, scalar in zip(model.model.layers, scalars, strict=True):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            layer.layer_scalar.fill_(scalar)
    model.save_pretrained(folder)
    start = model.model.embed_tokens.weight.detach()[PROMPT] * 32**0.5
    return start * torch.tensor([1.0, *scalars]).cumprod(0)[:, None, None]


SYNTHETIC = {"layer i adds a vector": save_adding_target, "layer i scales": save_scaling_target}


@pytest.mark.parametrize("name", SYNTHETIC)
def test_an_id_counts_the_layers_passed(name: str, tmp_path: Path) -> None:
    expected = SYNTHETIC[name](tmp_path)
    torch.testing.assert_close(states_in_chunks(tmp_path, list(range(NUM_LAYERS + 1))), expected)
    some = [4, 0, 2, 2]
    torch.testing.assert_close(states_in_chunks(tmp_path, some), expected[some])


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("name", SYNTHETIC)
def test_an_off_by_one_would_show(
    name: str, shift: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    see = AuxCollector.see
    monkeypatch.setattr(AuxCollector, "see", lambda self, i, h: see(self, i + shift, h))
    expected, inner = SYNTHETIC[name](tmp_path), [1, 2, 3]
    for i, state in zip(inner, states_in_chunks(tmp_path, inner), strict=True):
        with pytest.raises(AssertionError):
            torch.testing.assert_close(state, expected[i])


def save_dense(family: str, folder: Path) -> PreTrainedModel:
    windows = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
    model = make_dense(family, small(num_hidden_layers=6, **windows), 2)
    model.save_pretrained(folder)
    return model


def save_gemma(folder: Path) -> PreTrainedModel:
    model = make_target(GEMMA, 2)
    model.save_pretrained(folder)
    return model


def assert_states_match(model: PreTrainedModel, folder: Path) -> None:
    _, expected = oracle(model, PROMPT)
    states = states_in_chunks(folder, list(range(7)))
    for state, h in zip(states[:-1], expected[:-1], strict=True):
        assert (state - h).abs().max() <= TOLERANCE * h.abs().max()
    with torch.no_grad():  # transformers' last entry is normed, ours is what the norm reads
        normed = model.model.norm(states[-1])
    assert (normed - expected[-1]).abs().max() <= TOLERANCE * expected[-1].abs().max()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_dense_states_are_transformers_hidden_states(family: str, tmp_path: Path) -> None:
    assert_states_match(save_dense(family, tmp_path), tmp_path)


def test_gemma_states_are_transformers_hidden_states(tmp_path: Path) -> None:
    model = save_gemma(tmp_path)
    assert_states_match(model, tmp_path)
    stir(model, 3)
    with torch.no_grad():
        for layer in model.model.layers:  # small scalars: the stream's scale leaves its bounds
            layer.layer_scalar.mul_(0.2)
    model.save_pretrained(tmp_path)
    assert_states_match(model, tmp_path)


def test_asking_changes_nothing_else(tmp_path: Path) -> None:
    for family in ("gemma", "qwen3"):
        folder = tmp_path / family
        save_gemma(folder) if family == "gemma" else save_dense(family, folder)
        runs = [PagedRun(load(folder), 1) for _ in range(2)]
        with torch.inference_mode():
            plain, none = runs[0].target.forward(runs[0].batch({0: PROMPT}), runs[0].caches)
            asked, some = runs[1].target.forward(
                runs[1].batch({0: PROMPT}), runs[1].caches, (0, 3, 6)
            )
        assert torch.equal(plain, asked)
        assert (len(none), len(some)) == (0, 3)


@pytest.mark.parametrize("name", SYNTHETIC)
def test_narrow_types_hold_the_true_stream_too(name: str, tmp_path: Path) -> None:
    expected = SYNTHETIC[name](tmp_path)
    states = states_in_chunks(tmp_path, list(range(NUM_LAYERS + 1)), torch.bfloat16)
    assert states.dtype == torch.bfloat16
    for state, h in zip(states, expected, strict=True):
        assert (state - h).abs().max() <= NARROW_TOLERANCE * h.abs().max()


def test_a_multimodal_wrapper_without_image_token_id(tmp_path: Path) -> None:
    """The wrapper's prefixes, its config layout, and no image_token_id anywhere: a text run."""
    for name, prefix in (
        ("gemma4", "model.language_model."),
        ("mistral3", "language_model.model."),
    ):
        folder = tmp_path / name
        save_gemma(folder) if name == "gemma4" else save_dense("mistral", folder)
        expected = states_in_chunks(folder, [0, 3, 6])
        raw = json.loads((folder / "config.json").read_text())
        whole = {"model_type": name, "text_config": raw}
        whole["tie_word_embeddings"] = raw["tie_word_embeddings"]
        (folder / "config.json").write_text(json.dumps(whole))
        file = folder / "model.safetensors"
        named = {
            k.replace("model.", prefix, 1) if k.startswith("model.") else f"language_model.{k}": v
            for k, v in load_file(file).items()
        }
        save_file(named | {"vision_tower.a.weight": torch.zeros(2, 2)}, file)
        assert torch.equal(states_in_chunks(folder, [0, 3, 6]), expected)


def test_layer_outputs_are_converted_by_name() -> None:
    assert ids_of_layer_outputs([0, 1, 14, 31]) == (1, 2, 15, 32)
    assert default_aux_layer_ids(36) == (2, 18, 33)


def test_ids_beyond_the_target_are_refused() -> None:
    check_aux_layer_ids((0, 36), 36, "draft")
    with pytest.raises(CheckpointError, match=r"'draft' .*\[2, 37\]; the target has 36 layers"):
        check_aux_layer_ids((2, 37), 36, "draft")

"""Block drafters that do not fit their config or their target: one message, which names the key or
tensor, what it is and what to do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from block_folders import draw_block, draw_dflash2, draw_dspark, write_block
from block_rows import load
from eagle_folders import FakeTarget
from safetensors.torch import load_file, save_file

from hydraspec.models.block_drafter.config import spread_layers
from hydraspec.types import CheckpointError

Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


def keys(**values: Any) -> Edit:
    return lambda config, tensors: config.update(values)


def within(part: str, **values: Any) -> Edit:
    return lambda config, tensors: config[part].update(values)


def drop(name: str, part: str | None = None) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(name, None)
        (config if part is None else config[part]).pop(name, None)

    return edit


def made(folder: Path, form: str, edit: Edit, method: str = "dflash") -> tuple[Path, FakeTarget]:
    """A head of two aux states whose config and tensors were edited."""
    target = FakeTarget(np.random.default_rng(1), hidden_size=16, vocab_size=40)
    draw = {"dspark": draw_dspark, "dflash2": draw_dflash2}.get(method, draw_block)
    for seed in range(99):
        plain = draw(np.random.default_rng(seed), target, form)
        if len(plain.aux_layer_ids) == 2:
            break
    written = write_block(folder, plain, target, form)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    edit(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return written, target


DFLASH = "dflash_config"
WRONG: dict[str, tuple[str, Edit, list[str]]] = {
    "no block size": ("z-lab", drop("block_size"), ["block_size is nothing", "at least 2"]),
    "block of one": ("speculators", keys(block_size=1), ["block_size is 1", "at least 2"]),
    "no mask token": ("z-lab", drop("mask_token_id", DFLASH), ["mask_token_id is nothing"]),
    "two mask tokens": (
        "z-lab",
        lambda c, t: c.update(mask_token_id=(c[DFLASH]["mask_token_id"] + 1) % 40),
        ["mask_token_id is", "the same as dflash_config.mask_token_id"],
    ),
    "mask token outside": ("deepseek-ai", keys(mask_token_id=40), ["is 40", "ends at 39"]),
    "layers as text": ("z-lab", within(DFLASH, target_layer_ids="1, 2"), ["is '1, 2'", "layer"]),
    "a layer twice": ("deepseek-ai", keys(target_layer_ids=[2, 2]), ["[2, 2]", "different"]),
    "layer beyond": ("speculators", keys(aux_hidden_state_layer_ids=[1, 7]), ["[7]", "6 layers"]),
    "layer below": ("z-lab", within(DFLASH, target_layer_ids=[-1, 2]), ["[-1, 2]", "from 0 on"]),
    "no layers": ("speculators", drop("aux_hidden_state_layer_ids"), ["is nothing", "download"]),
    "three layers": (
        *("z-lab", within(DFLASH, target_layer_ids=[0, 1, 2])),
        ["fc.weight is [16, 32]", "reads 3 layers", "48"],
    ),
    "is_causal as text": ("z-lab", keys(is_causal="no"), ["is_causal is 'no'", "true or false"]),
    "causal twice": (
        *("z-lab", lambda c, t: (c.update(is_causal=True), c[DFLASH].update(causal=False))),
        ["is_causal is True", "the same as dflash_config.causal, False"],
    ),
    "no hidden_norm": ("deepseek-ai", drop("hidden_norm.weight"), ["no hidden_norm.weight"]),
    "another depth": ("z-lab", keys(num_target_layers=9), ["number of layers is 9", "is 6"]),
    "another width": ("speculators", keys(target_hidden_size=24), ["hidden size is 24", "is 16"]),
    "attention sinks": (
        *("z-lab", within(DFLASH, attention_sink_bias=True)),
        ["attention_sink_bias is True", "no other drafter is computed"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_head_is_refused(name: str, tmp_path: Path) -> None:
    form, edit, says = WRONG[name]
    folder, target = made(tmp_path / "d", form, edit)
    with pytest.raises(CheckpointError) as refused:
        load(folder, "dflash", target)
    message = str(refused.value)
    assert all(part in message for part in (*says, str(folder))), message
    assert "\n" not in message


MARKOV: dict[str, tuple[Edit, list[str]]] = {
    "unknown kind": (keys(markov_head_type="lstm"), ["markov_head_type is 'lstm'", "vanilla"]),
    "no Markov head for confidence": (
        keys(markov_rank=0, enable_confidence_head=True, confidence_head_with_markov=True),
        ["markov_rank is 0", "confidence_head_with_markov"],
    ),
    "a rank that the files do not have": (keys(markov_rank=5), ["markov_w1"]),
}


@pytest.mark.parametrize("name", MARKOV)
def test_a_wrong_markov_head_is_refused(name: str, tmp_path: Path) -> None:
    edit, says = MARKOV[name]
    folder, target = made(tmp_path / "d", "deepseek-ai", edit, "dspark")
    with pytest.raises(CheckpointError) as refused:
        load(folder, "dspark", target)
    assert all(part in str(refused.value) for part in says), refused.value


SELECTOR: dict[str, tuple[str, Edit, list[str]]] = {
    "a group that divides nothing": (
        *("z-lab", within(DFLASH, conv_group_size=5)),
        ["dflash_config.conv_group_size is 5", "a divisor of hidden_size, 16"],
    ),
    "more taps than rows": (
        *("speculators", keys(conv_kernel_size=99)),
        ["conv_kernel_size is 99", "at most block_size"],
    ),
    "more candidates than tokens": (
        *("z-lab", within(DFLASH, selector_top_k=41)),
        ["selector_top_k is 41", "at most the vocabulary's size, 40"],
    ),
    "a narrower vocabulary": (
        *("speculators", keys(draft_vocab_size=33)),
        ["draft_vocab_size is 33", "the vocabulary's size, 40"],
    ),
    "a factor as text": (
        *("z-lab", within(DFLASH, output_multiplier="0.2")),
        ["output_multiplier is '0.2'", "a number above 0"],
    ),
    "no codebook": (
        *("z-lab", drop("candidate_selector.successor_codebook")),
        ["candidate_selector.successor_codebook"],
    ),
}


@pytest.mark.parametrize("name", SELECTOR)
def test_a_wrong_selector_is_refused(name: str, tmp_path: Path) -> None:
    form, edit, says = SELECTOR[name]
    folder, target = made(tmp_path / "d", form, edit, "dflash2")
    with pytest.raises(CheckpointError) as refused:
        load(folder, "dflash2", target)
    assert all(part in str(refused.value) for part in says), refused.value


def test_a_method_and_a_folder_that_disagree_are_named(tmp_path: Path) -> None:
    folder, target = made(tmp_path / "d", "deepseek-ai", keys(), "dspark")
    with pytest.raises(CheckpointError, match="holds a drafter for method=dspark"):
        load(folder, "dflash", target)


def test_a_pickled_mask_embedding_is_refused(tmp_path: Path) -> None:
    """Unread: its content is no pickle at all."""
    folder, target = made(tmp_path / "d", "z-lab", drop("mask_embedding"))
    (folder / "mask_embedding.pt").write_bytes(b"no pickle")
    with pytest.raises(CheckpointError, match="pickle, and loading a pickle runs code") as refused:
        load(folder, "dflash", target)
    assert repr(str(folder / "mask_embedding.pt")) in str(refused.value)


@pytest.mark.parametrize("is_dict", [True, False])
def test_the_remedy_for_a_pickled_mask_embedding_works(
    is_dict: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an embedding that is converted and then not read, as an index does not list it: the
    drafts would be poor in silence. Releases have the pickle beside an index."""
    folder, target = made(tmp_path / "d", "z-lab", drop("mask_embedding"))
    names = load_file(folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    row = torch.arange(16.0)
    saved = {"mask_token_id": 3, "embedding": row} if is_dict else row[None]
    torch.save(saved, folder / "mask_embedding.pt")
    with pytest.raises(CheckpointError) as refused:
        load(folder, "dflash", target)
    command = str(refused.value).partition("python -c ")[2]
    monkeypatch.chdir(folder)
    exec(command.strip('"'))
    assert load(folder, "dflash", target).mask_embedding.tolist() == row.tolist()


def test_a_mask_embedding_of_another_width_is_refused(tmp_path: Path) -> None:
    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors["mask_embedding"] = torch.zeros(3)

    folder, target = made(tmp_path / "d", "z-lab", edit)
    with pytest.raises(CheckpointError, match="mask_embedding"):
        load(folder, "dflash", target)


@pytest.mark.parametrize("count", [1, 3])
def test_layers_are_spread_where_z_labs_config_names_none(count: int) -> None:
    """As their code does it: of 6 layers and a draft of 3, the outputs 1, 2 and 3."""
    assert spread_layers(6, count) == {1: (3,), 3: (1, 2, 3)}[count]
    assert spread_layers(36, 5) == (1, 9, 17, 25, 33)


def test_a_gemma_block_with_experts_is_refused(tmp_path: Path) -> None:
    edit = keys(architectures=["Gemma4DSparkModel"], enable_moe_block=True)
    folder, target = made(tmp_path / "d", "deepseek-ai", edit)
    with pytest.raises(CheckpointError, match="enable_moe_block is True; expected 0 or false"):
        load(folder, "dflash", target)

"""Keys and values of context features: one product for all layers writes what each layer's own
projection writes.

Catches columns of another layer, queries among them, a bias that is left out, keys of another rank,
and a copy that outlives the weights it was made of.
"""

from __future__ import annotations

import json
import random
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from block_folders import (
    FORMATS,
    draw_block,
    draw_block_weights,
    draw_dflash2,
    write_block,
)
from block_gemma4 import draw_gemma_block, write_gemma_block
from block_rows import load
from eagle_folders import FakeTarget, matrix
from eagle_rows import CLOSE, PagedRows
from quantised_folders import drawn_scheme, library_config, quantised_tensors
from safetensors.torch import load_file, save_file
from thread_ranks import as_ranks
from torch import Tensor

from hydraspec.models.block_drafter import context
from hydraspec.models.block_drafter.head import BlockHead
from hydraspec.models.checkpoint.quantization_config import KEY
from hydraspec.models.kv_groups import FULL, SLIDING
from hydraspec.models.parts import memory_bytes
from hydraspec.parallel.group import SOLO, TensorGroup
from hydraspec.parallel.layout import Layout
from hydraspec.parallel.vocabulary import Vocabulary

NUM_HEADS = 24
SIZE, VOCAB, NUM_TOKENS = 16, 40, 9
BIAS, NO_BIAS = {"attention_bias": True}, {"attention_bias": False}
TWO_KINDS = {
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"layer_types": [SLIDING, FULL, SLIDING], "use_sliding_window": True, "sliding_window": 4},
}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def as_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "SEPARATE_ON", ())


def make_target(group: TensorGroup = SOLO) -> FakeTarget:
    target = FakeTarget(np.random.default_rng(1), hidden_size=SIZE, vocab_size=VOCAB)
    target.vocabulary = Vocabulary(VOCAB, group)
    return target


def written(head: BlockHead, features: Tensor) -> list[Tensor]:
    """The caches after a context in two parts, the second after rows that were rejected."""
    torch.manual_seed(7)  # of the block table
    paged, ids, cut = PagedRows(head, NUM_TOKENS), torch.arange(NUM_TOKENS), 4  # type: ignore[arg-type]
    head.write_context(paged.rows(ids[:cut], 0), features[:cut], paged.caches)
    head.write_context(paged.rows(ids[cut:], cut), features[cut:] * 0.5 + 1, paged.caches)
    head.write_context(paged.rows(ids[cut:], cut), features[cut:], paged.caches)
    return paged.caches


def by_layers(head: BlockHead) -> BlockHead:
    """The head without the product for all layers."""
    found = copy(head)
    found.context_projection = None
    return found


def check(head: BlockHead, features: Tensor) -> list[Tensor]:
    caches = written(head, features)
    assert all(cache.any() for cache in caches)
    torch.testing.assert_close(caches, written(by_layers(head), features), **CLOSE)
    return caches


def folder_of(folder: Path, changes: dict[str, Any]) -> Path:
    """A DFlash folder whose layers have the changes."""
    rng, target = np.random.default_rng([61, len(changes)]), make_target()
    plain = draw_block(rng, target, "speculators")
    plain.layer |= TWO_KINDS | changes
    plain.weights = {}
    rows = VOCAB if plain.ids is None else len(plain.ids)
    draw_block_weights(rng, plain, target, rows=rows)
    return write_block(folder, plain, target, "speculators")


@pytest.mark.parametrize("seed", range(NUM_HEADS))
def test_one_product_writes_what_the_layers_write(tmp_path: Path, seed: int) -> None:
    rng, target = np.random.default_rng([62, seed]), make_target()
    kind = ("dflash", "dflash2", "gemma4")[seed % 3]
    method, form = kind, FORMATS[seed % 2]
    if kind == "gemma4":
        method = "dspark"
        folder = write_gemma_block(tmp_path, draw_gemma_block(rng, target), target)
    else:
        draw = draw_block if kind == "dflash" else draw_dflash2
        folder = write_block(tmp_path, draw(rng, target, form), target, form)
    head = load(folder, method, target)
    assert (head.context_projection is None) == (len(head.layers) == 1)
    check(head, matrix(rng, NUM_TOKENS, SIZE) * 4)


def test_a_cpu_takes_a_product_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a copy that a CPU holds and does not read."""
    folder, features = folder_of(tmp_path, BIAS), matrix(np.random.default_rng(8), NUM_TOKENS, SIZE)
    on_device = load(folder, "dflash", make_target())
    monkeypatch.undo()
    head = load(folder, "dflash", make_target())
    assert head.context_projection is None
    assert head.memory_bytes() == memory_bytes(head.tensors()) < on_device.memory_bytes()
    torch.testing.assert_close(written(head, features), written(on_device, features), **CLOSE)


@pytest.mark.parametrize("changes", [BIAS, NO_BIAS], ids=["bias", "no bias"])
def test_layers_of_two_kinds_take_one_product(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    head = load(folder_of(tmp_path, changes), "dflash", make_target())
    assert (head.layers[0].attention.qkv.bias is not None) == changes["attention_bias"]
    features = matrix(np.random.default_rng(3), NUM_TOKENS, SIZE)
    check(head, features)
    for layer in head.layers:
        monkeypatch.setattr(layer.attention, "project_kv", None)
    written(head, features)


@pytest.mark.parametrize("num_kv_heads", [1, 2], ids=["shared KV heads", "divided KV heads"])
def test_ranks_write_their_own_heads(tmp_path: Path, num_kv_heads: int) -> None:
    folder = folder_of(tmp_path, BIAS | {"num_key_value_heads": num_kv_heads})
    features = matrix(np.random.default_rng(4), NUM_TOKENS, SIZE)
    whole = check(load(folder, "dflash", make_target()), features)

    def of_rank(ranks: Any) -> tuple[BlockHead, int]:
        with torch.no_grad():
            return load(folder, "dflash", make_target(ranks.group)), ranks.rank

    for head, rank in as_ranks(Layout(tensor=2), of_rank):
        kv = head.layers[0].attention.kv
        assert kv.count == 1
        assert kv.first == rank * (num_kv_heads - 1)
        found = check(head, features)
        for ours, wanted in zip(found, whole, strict=True):
            torch.testing.assert_close(ours, wanted[:, :, kv.first : kv.first + 1], **CLOSE)


def test_an_edited_layer_is_not_read_from_the_copy(tmp_path: Path) -> None:
    """The doctor edits copies of heads."""
    head = load(folder_of(tmp_path, NO_BIAS), "dflash", make_target())
    features = matrix(np.random.default_rng(5), NUM_TOKENS, SIZE)
    edited, layer = copy(head), copy(head.layers[1])
    layer.attention = copy(layer.attention)
    layer.attention.qkv = layer.attention.qkv.with_weight(layer.attention.qkv.weight * 2)
    edited.layers = [head.layers[0], layer, head.layers[2]]
    pairs = zip(check(edited, features), check(head, features), strict=True)
    assert [torch.allclose(*pair, **CLOSE) for pair in pairs] == [True, False, True]


def test_quantised_layers_keep_their_own_projections(tmp_path: Path) -> None:
    """Even if some alone are quantised."""
    folder, scheme = folder_of(tmp_path, NO_BIAS), drawn_scheme("fp8_dynamic", random.Random(1))
    file, config = folder / "model.safetensors", folder / "config.json"
    parts = tuple(f"layers.1.self_attn.{part}_proj" for part in "qkvo")
    made = quantised_tensors(load_file(file), parts, scheme=scheme)
    save_file({name: each.contiguous() for name, each in made.tensors.items()}, file)
    others = ("lm_head", "fc", "re:.*layers.[02].*", "re:.*mlp.*")
    settings = library_config(scheme, others).model_dump(mode="json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {KEY: settings}))
    head = load(folder, "dflash", make_target())
    assert [layer.attention.qkv.slab is None for layer in head.layers] == [True, False, True]
    assert head.context_projection is None
    check(head, matrix(np.random.default_rng(6), NUM_TOKENS, SIZE))


def test_the_copy_counts_as_memory(tmp_path: Path) -> None:
    """Three layers of keys and values for two heads each, in float64."""
    head = load(folder_of(tmp_path, BIAS | {"head_dim": 8}), "dflash", make_target())
    copied = 3 * 2 * (2 * 8) * (SIZE + 1) * 8
    assert head.memory_bytes() - memory_bytes(head.tensors()) == copied
    assert by_layers(head).memory_bytes() == memory_bytes(head.tensors())

"""Block drafters against their plain definition: every option, every format, a context in chunks
with rows that were rejected.

Catches features without their norm, a key with the input norm on it, a position off by one, a block
that does not see itself, a window counted from the wrong row: in the field each shows only as lower
acceptance.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from block_folders import FORMATS, draw_block, draw_dflash2, draw_dspark, write_block
from block_gemma4 import draw_gemma_block, write_gemma_block
from block_rows import check_block, check_in_turn, check_selected, load
from eagle_folders import FakeTarget

from hydraspec.models.detect import resolve

NUM_HEADS = 30


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("seed", range(NUM_HEADS))
def test_a_block_equals_the_plain_loop(tmp_path: Path, seed: int) -> None:
    form = FORMATS[seed % len(FORMATS)]
    rng = np.random.default_rng([41, seed])
    target = FakeTarget(rng, hidden_size=16, vocab_size=40)
    plain = draw_block(rng, target, form)
    folder = write_block(tmp_path / "d", plain, target, form)
    found = resolve("zoo:tiny_mistral", str(folder))  # method=auto
    assert (found.method, found.num_speculative_tokens) == (
        "dflash",
        plain.block_size - (not plain.samples_anchor),
    )
    head = load(folder, "dflash", target)
    assert head.spec.aux_layer_ids == plain.aux_layer_ids
    for _ in range(3):
        check_block(rng, plain, head, target)


@pytest.mark.parametrize("seed", range(NUM_HEADS))
def test_dspark_equals_the_plain_loop(tmp_path: Path, seed: int) -> None:
    """Drafts in view of each other, and their confidence."""
    form = FORMATS[1 + seed % 2]
    rng = np.random.default_rng([42, seed])
    target = FakeTarget(rng, hidden_size=16, vocab_size=40)
    plain = draw_dspark(rng, target, form)
    folder = write_block(tmp_path / "d", plain, target, form)
    assert resolve("zoo:tiny_mistral", str(folder)).method == "dspark"
    head = load(folder, "dspark", target)
    for _ in range(3):
        check_in_turn(rng, plain, head, target)


@pytest.mark.parametrize("seed", range(NUM_HEADS))
def test_dflash2_equals_the_plain_loop(tmp_path: Path, seed: int) -> None:
    """Convolutions that end at a block's first row, and drafts among candidates."""
    form = ("z-lab", "speculators")[seed % 2]
    rng = np.random.default_rng([44, seed])
    target = FakeTarget(rng, hidden_size=16, vocab_size=40)
    plain = draw_dflash2(rng, target, form)
    folder = write_block(tmp_path / "d", plain, target, form)
    found = resolve("zoo:tiny_mistral", str(folder))
    assert (found.method, found.num_speculative_tokens) == ("dflash2", plain.block_size - 1)
    head = load(folder, "dflash2", target)
    for _ in range(3):
        check_selected(rng, plain, head, target)


@pytest.mark.parametrize("seed", range(NUM_HEADS // 3))
def test_dspark_of_gemma_layers_equals_the_plain_loop(tmp_path: Path, seed: int) -> None:
    """With and without separate values; the scaled embedding, the soft cap, the layer's scalar."""
    rng = np.random.default_rng([43, seed])
    target = FakeTarget(rng, hidden_size=16, vocab_size=40)
    plain = draw_gemma_block(rng, target)
    folder = write_gemma_block(tmp_path / "d", plain, target)
    assert resolve("zoo:tiny_mistral", str(folder)).method == "dspark"
    head = load(folder, "dspark", target)
    for _ in range(3):
        check_in_turn(rng, plain, head, target)

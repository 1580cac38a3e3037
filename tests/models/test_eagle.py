"""EAGLE heads against their plain definition: every flag, every format, one step and whole chains.

Catches a swapped concatenation, a norm left out or applied twice, feedback of the wrong state, a
shifted position, a window off by one, a wrong row order of Mistral's files: in the field each shows
only as lower acceptance.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from eagle_folders import (
    FP8,
    FakeTarget,
    draw_eagle1,
    draw_eagle3,
    draw_ministral3,
    matrix,
    write,
    write_authors,
    write_consolidated,
    write_hugging_face,
    write_speculators,
)
from eagle_gemma4 import draw_gemma_eagle3, write_gemma_eagle3
from eagle_rows import CLOSE, PagedRows, check_chain, draw_text, load, target_step
from grids import slow_unless

from hydraspec.models.detect import resolve
from hydraspec.types import CheckpointError

NUM_CONFIGS = 24
SEEDS = slow_unless(lambda seed: seed < NUM_CONFIGS // 2, ((seed,) for seed in range(NUM_CONFIGS)))


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("seed", SEEDS)
def test_eagle3_chain(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng([31, seed])
    target = FakeTarget(rng, hidden_size=16, vocab_size=40)
    plain = draw_eagle3(rng, target)
    if seed % 2:
        folder = write_speculators(tmp_path / "d", plain)
    else:
        folder = write_authors(tmp_path / "d", plain, prefix="model." if seed % 4 else "")
    head = load(folder, "eagle3", target)
    assert head.spec.aux_layer_ids == plain.aux_layer_ids
    assert head.spec.feedback == ("post_norm" if plain.flags["norm_output"] else "pre_norm")
    check_chain(rng, plain, head, target)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_chain_of_a_gemma_layer(tmp_path: Path, seed: int) -> None:
    """As deepseek-ai publishes it for the 12B."""
    rng = np.random.default_rng([37, seed])
    target = FakeTarget(rng, hidden_size=16, vocab_size=40)
    plain = draw_gemma_eagle3(rng, target)
    folder = write_gemma_eagle3(tmp_path / "d", plain, target)
    assert resolve("zoo:tiny_mistral", str(folder)).method == "eagle3"
    head = load(folder, "eagle3", target)
    assert (head.spec.aux_layer_ids, head.spec.num_layers) == (plain.aux_layer_ids, 1)
    check_chain(rng, plain, head, target)


def test_a_deeper_head_of_gemma_layers_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    target = FakeTarget(rng, hidden_size=16, vocab_size=40)
    plain = draw_gemma_eagle3(rng, target)
    plain.layer["num_hidden_layers"] = 2
    folder = write_gemma_eagle3(tmp_path / "d", plain, target)
    with pytest.raises(CheckpointError, match="num_hidden_layers is 2; expected 1"):
        load(folder, "eagle3", target)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("is_mistral", [True, False], ids=["mistral", "llama"])
def test_eagle1_chain(tmp_path: Path, seed: int, is_mistral: bool) -> None:
    rng = np.random.default_rng([32, seed, is_mistral])
    target = FakeTarget(rng, hidden_size=16, vocab_size=40)
    plain = draw_eagle1(rng, target, is_mistral=is_mistral)
    if is_mistral:
        plain.layer.pop("rope_scaling", None)
        folder = write_consolidated(tmp_path / "d", plain)
    else:
        config = {**plain.layer, "architectures": ["EagleLlamaForCausalLM"]}
        tensors = {n: t.contiguous() for n, t in plain.weights.items() if n != "lm_head.weight"}
        folder = write(tmp_path / "d", config, tensors)
    head = load(folder, "eagle", target)
    assert head.embedding is target.table  # also where the file holds a copy
    assert head.head is target.head
    assert head.spec.feedback == ("post_norm" if is_mistral else "pre_norm")
    check_chain(rng, plain, head, target)


@pytest.mark.parametrize("seed", SEEDS)
def test_peagle_masks(tmp_path: Path, seed: int) -> None:
    """The newest row and K - 1 mask rows behind a cached prefix, in one pass."""
    rng = np.random.default_rng([33, seed])
    target = FakeTarget(rng, hidden_size=16, vocab_size=40)
    plain = draw_eagle3(rng, target, "peagle")
    write_folder = write_speculators if seed % 2 else write_authors
    head = load(write_folder(tmp_path / "d", plain), "peagle", target)
    k, n = int(rng.integers(1, 8)), int(rng.integers(3, 14))
    text, aux, final = draw_text(rng, plain, target, n)
    drafts, states = plain.draft(text, aux, final, k)
    hidden = head.combine_target_hidden(target_step(final, aux))
    assert head.mask_hidden is not None
    torch.testing.assert_close(head.mask_hidden, plain.mask_state(), **CLOSE)
    paged = PagedRows(head, n + k)
    head.forward(paged.rows(text[1:-1], 0), hidden[:-1], paged.caches, step=0)
    tokens = torch.cat((text[-1:], torch.full((k - 1,), plain.mask_token)))
    entering = torch.cat((hidden[-1:], head.mask_hidden.expand(k - 1, -1)))
    found, _ = head.forward(paged.rows(tokens, n - 2), entering, paged.caches, step=0)
    torch.testing.assert_close(found, states, **CLOSE)
    assert head.greedy_tokens(found).tolist() == drafts.tolist()


def test_embeddings_are_shared_raw_where_the_file_has_none(tmp_path: Path) -> None:
    """A target that scales its embedding lends the table, not the scaled rows."""
    rng = np.random.default_rng(5)
    target = FakeTarget(rng, hidden_size=16, vocab_size=40)
    plain = draw_eagle3(rng, target)
    while plain.layer["hidden_size"] != 16:
        plain = draw_eagle3(rng, target)
    plain.weights["embed_tokens.weight"] = target.table.weight
    kept = load(write_speculators(tmp_path / "copy", plain), "eagle3", target)
    left_out = write_speculators(tmp_path / "none", plain, without=("embed_tokens.weight",))
    shared = load(left_out, "eagle3", target)
    assert kept.embedding is target.table
    assert shared.embedding is target.table
    assert shared.spec.shares_embedding
    assert kept.memory_bytes() == shared.memory_bytes()
    check_chain(rng, plain, shared, target)


def test_a_head_that_the_target_stands_in_for_is_named(tmp_path: Path) -> None:
    """Catches a dropped lm_head: the target's takes its place, and no draft is accepted."""
    rng = np.random.default_rng(5)
    target = FakeTarget(rng, hidden_size=16, vocab_size=40)
    plain = draw_eagle3(rng, target)
    while plain.layer["hidden_size"] != 16 or plain.ids is not None:
        plain = draw_eagle3(rng, target)
    for lacking in ((), ("embed_tokens.weight",), ("lm_head.weight",)):
        folder = write_speculators(tmp_path / "".join(("d", *lacking)), plain, without=lacking)
        notes = [n for n in load(folder, "eagle3", target).spec.notes if "lack" in n]
        assert len(notes) == ("lm_head.weight" in lacking)
        if notes:
            assert "files lack lm_head.weight, which heads of its kind bring" in notes[0]


def test_suppressed_tokens_are_never_drafted(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    target = FakeTarget(rng, hidden_size=16, vocab_size=40)
    plain = draw_eagle3(rng, target)
    while plain.ids is None:
        plain = draw_eagle3(rng, target)
    states = matrix(rng, 200, plain.layer["hidden_size"])
    target.suppress_token_ids = tuple(plain.choose(states).unique()[:3].tolist())
    head = load(write_speculators(tmp_path / "d", plain), "eagle3", target)
    chosen = set(head.greedy_tokens(states).tolist())
    assert not chosen & set(target.suppress_token_ids)
    assert chosen <= set(plain.ids.tolist())


@pytest.mark.parametrize("is_fp8", [False, True], ids=["float", "fp8"])
@pytest.mark.parametrize("write_folder", [write_consolidated, write_hugging_face])
def test_the_head_of_mistral_medium(
    write_folder: Callable[..., Path], is_fp8: bool, tmp_path: Path
) -> None:
    """Two layers, no tables, YaRN and growing queries; in FP8 every matrix, fc's too."""
    rng = np.random.default_rng(10)
    target = FakeTarget(rng, hidden_size=16, vocab_size=40)
    plain = draw_ministral3(rng, target, is_fp8=is_fp8)
    folder = write_folder(tmp_path / "d", plain)
    assert resolve("zoo:tiny_mistral", str(folder)).method == "eagle"  # method=auto
    head = load(folder, "eagle", target)
    assert (head.embedding, head.head) == (target.table, target.head)
    assert (head.spec.feedback, head.spec.num_layers) == ("post_norm", 2)
    assert (head.quantization or {}).get("fc") == (str(FP8) if is_fp8 else None)
    for _ in range(4):
        check_chain(rng, plain, head, target)


MISTRAL_FORMATS: dict[str, dict[str, str | list[str]]] = {
    "by its layers": {},
    "by its class": {"model_type": "llama", "architectures": ["EagleMistralForCausalLM"]},
}


@pytest.mark.parametrize("name", MISTRAL_FORMATS)
def test_a_mistral_head_is_the_same_in_both_formats(name: str, tmp_path: Path) -> None:
    """Catches the other EAGLE-1 heads' rule, which has neither and feeds back the unnormed."""
    rng = np.random.default_rng(9)
    target = FakeTarget(rng, hidden_size=16, vocab_size=40)
    plain = draw_eagle1(rng, target, is_mistral=True)
    plain.layer.pop("rope_scaling", None)
    own = load(write_consolidated(tmp_path / "own", plain), "eagle", target)
    config = {"architectures": ["EagleForCausalLM"]} | plain.layer | MISTRAL_FORMATS[name]
    tables = ("embed_tokens.weight", "lm_head.weight")
    tensors = {n: t.contiguous() for n, t in plain.weights.items() if n not in tables}
    theirs = load(write(tmp_path / "hf", config, tensors), "eagle", target)
    assert theirs.spec.feedback == own.spec.feedback == "post_norm"
    tokens, hidden = torch.from_numpy(rng.integers(0, 40, 6)), matrix(rng, 6, 16)
    states = []
    for head in (own, theirs):
        torch.manual_seed(0)
        paged = PagedRows(head, 6)
        states.append(head.forward(paged.rows(tokens, 0), hidden, paged.caches, step=0))
    expected = plain.run(tokens, hidden)
    for found in states:
        for ours, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, wanted, **CLOSE)

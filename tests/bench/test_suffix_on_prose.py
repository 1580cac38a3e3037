"""Suffix decoding on prose, on tiny targets and on released shapes with a tiny vocabulary."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import suffix_on_prose
import torch

from hydraspec.models import load_target
from hydraspec.models.checkpoint.reader import open_checkpoint
from hydraspec.models.parts import held
from hydraspec.models.tokenizer import load_tokenizer
from hydraspec.shipped import ZOO

SHAPE = "small_e"  # tiny_gemma4_e with the vocabulary of a large model


@pytest.fixture
def small_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    config = json.loads((ZOO / "tiny_gemma4_e" / "config.json").read_bytes())
    config |= {"vocab_size": 5000, "vocab_size_per_layer_input": 5000, "eos_token_id": 4000}
    (tmp_path / SHAPE).mkdir()
    (tmp_path / SHAPE / "config.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.setattr(suffix_on_prose, "SHAPES", tmp_path)
    return SHAPE


@pytest.mark.parametrize("shape", ["gemma4_e4b", "gemma4_31b", "qwen3_8b"])
def test_a_shape_has_the_vocabulary_of_a_tiny_target(shape: str, tmp_path: Path) -> None:
    """Catches a table of its own size, for inputs of each layer, and released special tokens."""
    folder = tmp_path / shape
    suffix_on_prose.write_shape(folder, shape, "tiny_gemma4")
    target = load_target(
        str(folder),
        weights="empty",
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        seed=0,
        max_model_len=None,
    )
    assert target.vocab_size == 768
    tensors = target.tensors()  # type: ignore[attr-defined]
    assert {len(held(each)) for name, each in tensors.items() if "embed_tokens" in name} == {768}
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.token_ids("eos_token_id", 768) == (1, 5)
    assert checkpoint.config["bos_token_id"] == 2
    mine, tiny = load_tokenizer(folder), load_tokenizer(ZOO / "tiny_gemma4")
    assert mine is not None
    assert tiny is not None
    assert mine.encode("A map.") == tiny.encode("A map.")


def test_a_shape_is_compared_with_none_on_the_same_sentences(
    small_shape: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches weights of the tiny target, overrides that are not read, and outputs of random
    weights that repeat themselves."""
    monkeypatch.setattr(suffix_on_prose, "LOADS", ((2, 3),))
    monkeypatch.setattr(suffix_on_prose, "NUM_TOKENS", 24)
    typed = ["tiny_gemma4", "2", "--shape", small_shape, "target.dtype=float32"]
    monkeypatch.setattr(sys, "argv", ["suffix_on_prose.py", *typed])
    suffix_on_prose.main()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{small_shape} suffix 2: CPU ")
    numbers = re.search(r"(\d+) of (\d+) decode steps have drafts, (\d+) more rows, (\d+)", line)
    assert numbers is not None
    drafted, steps, _, accepted = map(int, numbers.groups())
    assert drafted < steps / 4
    assert accepted <= 2

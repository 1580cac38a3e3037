"""The mixed load with pictures, and the folders of released shapes that it is measured on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import image_load
import pytest
import torch
from image_shapes import IDS, TOWERS, write_shape
from transformers import AutoConfig, AutoTokenizer

from hydraspec.models import load_target
from hydraspec.models.checkpoint.reader import open_checkpoint
from hydraspec.models.pictures.format import read_picture_format
from hydraspec.types import IMAGE


@pytest.mark.parametrize("name", TOWERS)
def test_a_shape_reads_pictures(name: str, tmp_path: Path) -> None:
    """The native engine reads the released numbers, and transformers the files that its processor
    and vLLM need: without tokens of audio the processor refuses every prompt, and without
    default_output_length vLLM does not start."""
    write_shape(tmp_path, name)
    target = load_target(
        str(tmp_path),
        weights="empty",
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        seed=0,
        max_model_len=None,
    )
    images_see_ahead = target.images_see_ahead  # type: ignore[attr-defined]
    form = read_picture_format(open_checkpoint(str(tmp_path)), None)
    assert form is not None
    assert (form.image_id, form.max_tokens, form.may_be_cut) == (258880, 280, not images_see_ahead)
    assert images_see_ahead == (name in ("26b_a4b", "31b"))
    config = AutoConfig.from_pretrained(tmp_path)
    encoder = target.encoder  # type: ignore[attr-defined]
    assert config.vision_config.default_output_length == 280
    assert len(encoder.layers) == config.vision_config.num_hidden_layers
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    names = ("boi_token", IMAGE + "_token", "eoi_token", "audio_token", "boa_token", "eoa_token")
    ids = [tokenizer.convert_tokens_to_ids(getattr(tokenizer, name)) for name in names]
    assert ids[:3] == list(IDS.values())
    assert ids[3:] == [258881, 256000, 258883]


@pytest.mark.parametrize("method", image_load.METHODS)
def test_the_load_says_what_the_encoder_takes(
    method: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a pass that finds its pictures encoded by the one before."""
    monkeypatch.setattr(image_load, "PROMPT", (12.0, 0.5, 4, 24))
    monkeypatch.setattr(image_load, "OUTPUT", (4.0, 0.5, 2, 8))
    typed = ["tiny", "--methods", method, "--requests", "6", "--passes", "2"]
    monkeypatch.setattr(sys, "argv", ["image_load.py", *typed])
    image_load.main()
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    for row in (first, second):
        assert row["num_images"] == 3
        assert 3 * 50 < row["image_tokens"] < row["prompt_tokens"]
        assert 0 < row["tower_seconds"] < row["seconds"]
        assert row["tower_share"] == pytest.approx(row["tower_seconds"] / row["seconds"])
    assert first["num_output_tokens"] == second["num_output_tokens"] > 6 * 2

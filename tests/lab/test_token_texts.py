"""Texts of single tokens: where there is a tokenizer, and only where a run shows tokens."""

from __future__ import annotations

import pytest

from hydraspec.config.schema import RunConfig
from hydraspec.lab.token_texts import decoder


@pytest.mark.parametrize("name", ["trace", "all_positions"])
def test_the_targets_tokenizer_gives_them(config: RunConfig, name: str) -> None:
    config.target.checkpoint = "zoo:tiny_gemma4"
    assert decoder(config) is None, "no tokens are shown"
    setattr(config.metrics, name, True)
    decode = decoder(config)
    assert decode is not None
    assert decode([6]) == "!"
    assert decode([10**9]) == decode([10**30]) == decode([-1]) == ""


@pytest.mark.parametrize("checkpoint", ["zoo:tiny_fake", "shape:gemma4_e4b"])
def test_without_one_there_are_none(config: RunConfig, checkpoint: str) -> None:
    config.metrics.trace = True
    config.target.checkpoint = checkpoint
    assert decoder(config) is None

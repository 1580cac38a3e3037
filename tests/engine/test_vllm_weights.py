"""target.weights=random in vLLM: drawn as in the native engine, not its dummy ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hydraspec.config.schema import Weights
from hydraspec.engine.vllm.engine import VllmEngine
from hydraspec.engine.vllm.weights import DUMMY_WEIGHTS


def test_random_weights_are_drawn_as_in_the_native_engine(
    start: Callable[..., VllmEngine],
) -> None:
    engine = start(weights=Weights.random)
    layer = engine.parts.engine.model
    assert float(layer.proj.weight.detach().float().std()) == pytest.approx(64**-0.5, rel=0.1)
    assert torch.equal(layer.proj.bias, torch.zeros(32, dtype=torch.bfloat16))
    assert torch.equal(layer.norm.weight, torch.ones(64))
    assert torch.equal(layer.layer_scalar, torch.ones(1))
    assert torch.equal(layer.slots, torch.arange(3))
    assert torch.equal(layer.rope_table, torch.full((4, 4), 0.25))
    assert DUMMY_WEIGHTS not in engine.info.warnings


def test_a_checkpoint_is_left_as_it_is(start: Callable[..., VllmEngine]) -> None:
    layer = start(weights=Weights.checkpoint).parts.engine.model
    assert layer.proj.weight.abs().max() <= 1e-3
    assert layer.layer_scalar.abs().max() <= 1e-3


def test_dummy_weights_in_other_processes_are_warned_of(
    start: Callable[..., VllmEngine],
) -> None:
    assert start(weights=Weights.random, data=2).info.warnings[1] == DUMMY_WEIGHTS

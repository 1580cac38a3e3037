"""engine=vllm where it cannot start: whose fault it is, and what the message says."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import fake_vllm
import pytest
import torch

from hydraspec.cli.compose import plan
from hydraspec.config.schema import RunConfig
from hydraspec.engine.vllm.engine import VllmEngine
from hydraspec.types import CheckpointError, ConfigurationError, UserError


def planned(*overrides: str) -> RunConfig:
    return plan(["engine=vllm", *overrides]).jobs[0].config


def test_a_missing_vllm_or_gpu_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    config = planned("method=none")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match="needs a CUDA device"):
        VllmEngine(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'vllm>=0\.26'"):
        VllmEngine(config)
    fake_vllm.install(monkeypatch, version="0.25.3")
    with pytest.raises(ConfigurationError, match=r"finds vLLM 0\.25\.3"):
        VllmEngine(config)
    broken = fake_vllm.install(monkeypatch)
    del broken.LLMEngine  # as where a package that it needs is missing or too old
    with pytest.raises(ConfigurationError, match="cannot be imported here"):
        VllmEngine(config)
    assert "VLLM_NO_USAGE_STATS" not in os.environ


def test_what_vllm_refuses_while_starting_names_both_checkpoints(
    start: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(args: Any, **options: Any) -> None:
        raise ValueError("head size 8 is not supported\nand more")

    monkeypatch.setattr(fake_vllm.LLMEngine, "from_engine_args", refuse)
    with pytest.raises(CheckpointError, match=r"ValueError: head size 8 is not supported\)"):
        start()
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ


@pytest.mark.parametrize(
    ("error", "known", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), UserError, "free device memory"),
        (RuntimeError("CUDA error: out of memory\nand more"), UserError, "free device memory"),
        (ValueError("No available memory for the cache blocks."), UserError, "for the cache"),
        (NotImplementedError("no such layer"), CheckpointError, "no such layer"),
        (RuntimeError("Engine core initialization failed."), RuntimeError, "core init"),
    ],
    ids=lambda value: str(value)[:12] if isinstance(value, Exception) else "",
)
def test_only_what_a_checkpoint_is_to_blame_for_is_said_of_it(
    start: Callable[..., VllmEngine],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    known: type[Exception],
    said: str,
) -> None:
    def fail(args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(fake_vllm.LLMEngine, "from_engine_args", fail)
    with pytest.raises(known, match=said) as caught:
        start()
    assert type(caught.value) is known
    if known is RuntimeError:
        assert "vLLM cannot start with target" in caught.value.__notes__[0]
    elif known is UserError:
        assert caught.value.exit_code == 1  # type: ignore[attr-defined]


def test_block_verification_needs_the_newer_runner(
    start: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fake_vllm.LLMEngine.__init__

    def older(self: Any, *args: Any) -> None:
        made(self, *args)
        self.vllm_config.use_v2_model_runner = False

    monkeypatch.setattr(fake_vllm.LLMEngine, "__init__", older)
    block = type(planned().method.verification)("block")
    with pytest.raises(ConfigurationError, match="VLLM_USE_V2_MODEL_RUNNER=1"):
        start(verification=block)

"""vLLM over a fake of its interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_vllm
import pytest
from tiny_targets import assistant_config, gemma4_config, run_config, write_folder

from hydraspec.adapters.vllm.engine import VllmEngine
from hydraspec.config.schema import Dtype

MAX_MODEL_LEN = 96


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., VllmEngine]]:
    """Start an engine over the fake; it is closed at the end."""
    fake_vllm.install(monkeypatch)
    target = gemma4_config(eos_token_id=63)
    folder = write_folder(tmp_path / "target", target)
    drafter = write_folder(tmp_path / "assistant", assistant_config(target))
    engines: list[VllmEngine] = []

    def start_engine(method: str = "gemma4_mtp", **changes: Any) -> VllmEngine:
        record_steps, vllm = changes.pop("record_steps", True), changes.pop("vllm", {})
        splits = {axis: changes.pop(axis, 1) for axis in ("tensor", "pipeline", "data")}
        splits["pipeline_layers"] = changes.pop("pipeline_layers", None)
        config = run_config(
            folder,
            method=method,
            drafter=None if method == "none" else drafter,
            dtype=Dtype.float32,
            max_model_len=MAX_MODEL_LEN,
            **changes,
        )
        config.engine.device = type(config.engine.device)("auto")
        config.engine.name = "vllm"
        config.engine.vllm.record_steps = record_steps
        for name, value in vllm.items():
            setattr(config.engine.vllm, name, value)
        for axis, size in splits.items():
            setattr(config.parallelism, axis, size)
        engines.append(VllmEngine(config))
        return engines[-1]

    yield start_engine
    for engine in engines:
        engine.close()

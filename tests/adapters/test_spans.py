"""Other engines refuse spans of prompts as the native one does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from records import request
from tiny_targets import gemma4_config, run_config, write_folder

from hydraspec.adapters.transformers.engine import TransformersEngine
from hydraspec.config.schema import Dtype
from hydraspec.engine.base import Engine
from hydraspec.types import Span, WorkloadError

IMAGE = Span(kind="image", start=0, length=2, digest="aa", may_be_cut=False)
REQUEST = request(id="r0", prompt_token_ids=[3, 4], spans=(IMAGE,))


def test_vllm_refuses_a_span_of_a_prompt(start: Callable[..., Engine]) -> None:
    with pytest.raises(WorkloadError, match=r"r0: .* engine=vllm has no encoder"):
        start("none").tokenize([REQUEST])


def test_transformers_refuses_a_span_of_a_prompt(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "target", gemma4_config())
    engine = TransformersEngine(run_config(folder, dtype=Dtype.float32))
    with pytest.raises(WorkloadError, match=r"r0: .* engine=transformers has no encoder"):
        engine.tokenize([REQUEST])

"""engine=vllm with pictures over a fake of vLLM's interface: prompts have a placeholder for each
picture, and prompts that vLLM counts otherwise are errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_vllm
import numpy as np
import pytest
from fake_engine import target_token
from picture_folders import drawn, shown, wrapper_config
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from hydraspec.adapters.vllm.engine import VllmEngine
from hydraspec.adapters.vllm.images import OTHER_TOKENS
from hydraspec.adapters.vllm.loading import engine_arguments
from hydraspec.cli.compose import plan
from hydraspec.engine.pictures import put_images, read_pictures
from hydraspec.models.checkpoint.reader import Checkpoint
from hydraspec.models.pictures.format import PictureFormat, read_picture_format
from hydraspec.types import Completion, Request

BEGIN, IMAGE, END = 61, 60, 62  # of the fake's 64 ids
SMALL, WIDE = drawn(20, 30), drawn(30, 400)


def form_of(**changes: Any) -> PictureFormat:
    found = read_picture_format(Checkpoint(Path("a"), wrapper_config(), {}), 70)
    assert found is not None
    return replace(found, begin_id=BEGIN, image_id=IMAGE, end_id=END, **changes)


@pytest.fixture
def processed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Prompts that the fake is given; it expands placeholders by transformers' processor."""
    given: list[dict[str, Any]] = []
    processor, add = Gemma4ImageProcessorPil(max_soft_tokens=70), fake_vllm.LLMEngine.add_request

    def add_request(engine: Any, name: str, prompt: dict[str, Any], params: Any) -> None:
        given.append(prompt)
        pictures = iter(prompt.get("multi_modal_data", {}).get("image", ()))
        ids: list[int] = []
        for token in prompt["prompt_token_ids"]:
            if token != IMAGE:
                ids.append(token)
                continue
            (count,) = processor(next(pictures))["num_soft_tokens_per_image"]
            ids += [BEGIN, *[IMAGE] * int(count), END]
        assert next(pictures, None) is None
        add(engine, name, {"prompt_token_ids": ids}, params)

    monkeypatch.setattr(fake_vllm.LLMEngine, "add_request", add_request)
    return given


def prepared(form: PictureFormat, ids: list[int], *pixels: np.ndarray, index: int = 0) -> Request:
    request = shown(*pixels, index=index)
    put_images(request, ids, read_pictures([request], form)[index], form)
    assert request.error is None
    return request


def completions(engine: VllmEngine, requests: list[Request]) -> list[Completion]:
    events = engine.run(requests, concurrency=None)
    done = [event for event in events if isinstance(event, Completion)]
    return sorted(done, key=lambda completion: completion.index)


def test_prompts_have_a_placeholder_for_each_picture(
    start: Callable[..., VllmEngine], processed: list[dict[str, Any]]
) -> None:
    engine, form = start(method="none"), form_of()
    engine.parts.pictures = form
    requests = [
        prepared(form, [5, IMAGE, 6, 7], SMALL),
        Request(index=1, id="r1", prompt_token_ids=[8, 9], sampling=shown().sampling),
        prepared(form, [IMAGE, 5, 6], WIDE, index=2),
    ]
    later = prepared(form, [4, IMAGE], SMALL, index=3)
    later.after = 1
    done = completions(engine, [*requests, later])
    assert [prompt["prompt_token_ids"] for prompt in processed[:3]] == [
        [5, IMAGE, 6, 7],
        [8, 9],
        [IMAGE, 5, 6],
    ]
    pictures = [prompt.get("multi_modal_data", {}).get("image", []) for prompt in processed]
    pixels = [[np.asarray(picture) for picture in each] for each in pictures]
    for found, wanted in zip(pixels, ([SMALL], [], [WIDE], [SMALL]), strict=True):
        np.testing.assert_array_equal(found, wanted)
    for request, completion in zip(requests, done, strict=False):
        tokens = list(request.prompt_token_ids or [])
        for _ in range(request.sampling.max_tokens):
            tokens.append(target_token(tokens))
        assert [*completion.prompt_token_ids, *completion.output_token_ids] == tokens
    assert [completion.error for completion in done] == [None] * 4


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_run_encodes_its_pictures_anew(
    start: Callable[..., VllmEngine], processed: list[dict[str, Any]], replicas: int
) -> None:
    """Catches later rounds over the same prompts that find every picture encoded; a run of text
    has nothing to forget."""
    engine, form = start(method="none", data=replicas), form_of()
    vllm: Any = engine.parts.engine
    vllm = vllm if replicas == 1 else vllm._engine.inner
    completions(engine, [replace(shown(), prompt_token_ids=[5])])
    assert vllm.num_encoder_resets == 0
    engine.parts.pictures = form
    for number in (1, 2):
        completions(engine, [prepared(form, [5, IMAGE], SMALL)])
        assert vllm.num_encoder_resets == number


def test_prompts_that_are_counted_otherwise_are_errors(
    start: Callable[..., VllmEngine], processed: list[dict[str, Any]]
) -> None:
    """The form has more tokens for a picture than the processor, as if either were wrong."""
    engine, form = start(method="none"), form_of(max_tokens=80)
    engine.parts.pictures = form
    requests = [
        prepared(form, [5, IMAGE], drawn(100, 71)),
        Request(index=1, id="r1", prompt_token_ids=[8, 9], sampling=shown().sampling),
    ]
    done = completions(engine, requests)
    assert [completion.error for completion in done] == [OTHER_TOKENS, None]


def test_a_picture_without_its_file_is_its_requests_error(
    start: Callable[..., VllmEngine], processed: list[dict[str, Any]]
) -> None:
    engine, form = start(method="none"), form_of()
    engine.parts.pictures = form
    request = replace(prepared(form, [5, IMAGE], SMALL), pictures=())
    (completion,) = completions(engine, [request])
    assert "the file of picture" in (completion.error or "")
    assert processed == []


def test_encoder_and_processor_are_loaded_for_pictures_alone() -> None:
    config = plan(["engine=vllm", "method=none", "target=gemma4_e2b"]).jobs[0].config
    text = engine_arguments(config, Path("/models/target"), None)
    pictures = engine_arguments(config, Path("/models/target"), None, form_of())
    changed = {key: value for key, value in pictures.items() if text.get(key) != value}
    assert changed == {
        "skip_tokenizer_init": False,
        "language_model_only": False,
        "limit_mm_per_prompt": {"audio": 0, "video": 0},
        "mm_processor_kwargs": {"max_soft_tokens": 70},
    }

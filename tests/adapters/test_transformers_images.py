"""engine=transformers reads the images of prompts as transformers' own model does, in batches of
prompts with several, one and none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from picture_folders import IMAGE_ID, drawn, shown, write_wrapper
from vision_oracle import padded

from hydraspec.adapters.transformers.engine import TransformersEngine
from hydraspec.cli.compose import plan
from hydraspec.config.schema import RunConfig
from hydraspec.types import Completion, Request

SMALL, WIDE = drawn(20, 30), drawn(30, 400)
NUM_TOKENS = 6


def requests() -> list[Request]:
    return [
        shown("What colour is it?", SMALL, max_tokens=NUM_TOKENS),
        shown("2 + 3 =", index=1, max_tokens=NUM_TOKENS),
        shown(WIDE, "or", SMALL, "?", index=2, max_tokens=NUM_TOKENS),
    ]


def oracle_logits(model: Any, request: Request, output: Sequence[int]) -> torch.Tensor:
    """Logits [V] after a request's prompt and an output, from one forward pass."""
    ids = torch.tensor([[*(request.prompt_token_ids or []), *output]])
    inputs: dict[str, Any] = {"mm_token_type_ids": (ids == IMAGE_ID).long()}
    if request.images:
        inputs["pixel_values"], inputs["image_position_ids"] = padded(list(request.images), 3)
    with torch.no_grad():
        return model(ids, **inputs, use_cache=False).logits[0, -1]


@pytest.mark.parametrize("bidirectional", [False, True])
def test_tokens_and_logits_are_the_models(bidirectional: bool, tmp_path: Path) -> None:
    model = write_wrapper(tmp_path, seed=3, bidirectional=bidirectional)
    engine = TransformersEngine(config_of(tmp_path))
    asked = requests()
    engine.tokenize(asked)
    assert [len(r.images) for r in asked] == [1, 0, 2]
    events = list(engine.run(asked, concurrency=None))
    done = {event.index: event for event in events if isinstance(event, Completion)}
    for request in asked:
        output: list[int] = []
        while len(output) < NUM_TOKENS:
            output.append(int(oracle_logits(model, request, output).argmax()))
        assert done[request.index].output_token_ids == output
        assert done[request.index].spans == request.spans
        found = engine.next_token_logits(
            [*(request.prompt_token_ids or []), *output], request.spans, request.images
        )
        wanted = oracle_logits(model, request, output).double().numpy()
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def config_of(folder: Path, *overrides: str) -> RunConfig:
    target = ("target=custom", f"target.checkpoint={folder}", "target.dtype=float32")
    others = ("engine=transformers", "method=none", "tracker=none")
    return plan([*target, *others, *overrides]).jobs[0].config


def test_max_soft_tokens_is_a_key_of_the_target(tmp_path: Path) -> None:
    write_wrapper(tmp_path)
    asked = [shown(SMALL, max_tokens=1)]
    TransformersEngine(config_of(tmp_path)).tokenize(asked)
    more = [shown(SMALL, max_tokens=1)]
    TransformersEngine(config_of(tmp_path, "target.max_soft_tokens=140")).tokenize(more)
    assert (asked[0].images[0].num_tokens, more[0].images[0].num_tokens) == (60, 126)

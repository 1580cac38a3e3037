"""Requests, records and completions are the same after their way between ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from records import request

from hydraspec.parallel.engines.calls import Images
from hydraspec.parallel.engines.wire import (
    from_event,
    from_image,
    from_requests,
    to_event,
    to_image,
    to_requests,
)
from hydraspec.types import Completion, Image, Span, TokenLogprob

SPANS = (
    Span(kind="image", start=1, length=2, digest="0af3", may_be_cut=False),
    Span(kind="audio", start=3, length=1, digest="77", may_be_cut=True),
)


IMAGE, OTHER = (
    Image(patches=np.ones((4, 3), np.float32), positions=np.zeros((4, 2), int), num_tokens=n)
    for n in (1, 2)
)


def test_requests_keep_their_spans() -> None:
    requests = [
        request(
            index,
            stop=("a",),
            stop_token_ids=(3,),
            logit_bias=((4, -1.5),),
            bad_words=((5,), (6, 7)),
            logprobs=2,
            prompt_token_ids=[5, 6, 7, 8],
            spans=spans,
            images=(IMAGE,) if spans else (),
            error="no picture" if spans else None,
            arrival_s=0.5,
        )
        for index, spans in enumerate(((), SPANS))
    ]
    data = json.loads(json.dumps(from_requests(requests)))
    assert to_requests(data, {"0af3": IMAGE, "77": OTHER}) == requests
    assert [r.images for r in to_requests(data, {})] == [(), ()]


@pytest.mark.parametrize("is_exact", [True, False])
def test_images_keep_every_bit(is_exact: bool) -> None:
    """Levels of pixels travel as bytes, a quarter of the size; other values as they are."""
    rng = np.random.default_rng(3)
    levels = rng.integers(0, 256, (500, 12)).astype(np.uint8)
    patches = levels.astype(np.float32) * np.float32(1 / 255)
    if not is_exact:
        patches[3, 7] = np.nextafter(patches[3, 7], np.float32(2))
    where = np.stack([np.arange(500), np.arange(500) // 9], axis=1)
    image = Image(patches=patches, positions=where, num_tokens=7)
    data = json.dumps(from_image(image))
    found = to_image(json.loads(data))
    assert found.patches.dtype == np.float32
    np.testing.assert_array_equal(found.patches, patches)
    np.testing.assert_array_equal(found.positions, where)
    assert (found.num_tokens, len(data) < 20_000) == (7, is_exact)


def test_completions_keep_their_spans() -> None:
    completion = Completion(
        index=3,
        prompt_token_ids=[5, 6, 7, 8],
        output_token_ids=[9],
        text="b",
        finish_reason="length",
        error=None,
        ttft_ms=1.0,
        latency_ms=2.0,
        inter_token_ms=[0.5],
        spans=SPANS,
        logprobs=[TokenLogprob(9, -0.5, [(9, -0.5), (4, -1.0)])],
        prompt_logprobs=[],
    )
    assert to_event(json.loads(json.dumps(from_event(completion)))) == completion


def test_an_image_is_announced_once_in_all_calls() -> None:
    class Recording:
        all_ranks: ClassVar = [0, 1, 2]
        told: ClassVar[list[Any]] = []

        def tell(self, ranks: list[int], topic: str, message: Any) -> None:
            self.told.append((ranks, topic, message[1], message[2]["digest"]))

    fields = {"prompt_token_ids": [5, 6, 7, 8], "spans": SPANS, "images": (IMAGE,)}
    other = [replace(SPANS[0], digest="b1")]
    requests = [request(0, **fields), request(1, **fields)]
    images, control = Images(), Recording()
    images.send(control, requests)  # type: ignore[arg-type]
    images.send(control, [*requests, request(2, **{**fields, "spans": other})])  # type: ignore[arg-type]
    assert control.told == [([0, 1, 2], "call", "image", digest) for digest in ("0af3", "b1")]

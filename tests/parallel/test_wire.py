"""Requests, records and completions are the same after their way between ranks."""

from __future__ import annotations

import json

from records import request

from hydraspec.parallel.engines.wire import from_event, from_requests, to_event, to_requests
from hydraspec.types import Completion, Span

SPANS = (
    Span(kind="image", start=1, length=2, digest="0af3", may_be_cut=False),
    Span(kind="audio", start=3, length=1, digest="77", may_be_cut=True),
)


def test_requests_keep_their_spans() -> None:
    requests = [
        request(
            index,
            stop=("a",),
            stop_token_ids=(3,),
            prompt_token_ids=[5, 6, 7, 8],
            spans=spans,
            arrival_s=0.5,
        )
        for index, spans in enumerate(((), SPANS))
    ]
    assert to_requests(json.loads(json.dumps(from_requests(requests)))) == requests


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
    )
    assert to_event(json.loads(json.dumps(from_event(completion)))) == completion

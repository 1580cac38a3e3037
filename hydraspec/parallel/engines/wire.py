"""Requests, images, records and completions as plain data, and back."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields

import numpy as np

from hydraspec.parallel.control import Plain
from hydraspec.types import (
    Completion,
    Image,
    Prompt,
    Request,
    RequestStep,
    SamplingParams,
    Span,
    StepRecord,
    Structured,
    TokenLogprob,
    images_of,
)

PROMPT_FIELDS = ("prompt_token_ids", "spans")
LOGPROBS = ("logprobs", "prompt_logprobs")
LEVEL = np.float32(1 / 255)  # of a pixel's value
STEP_FIELDS = [field.name for field in fields(RequestStep)]
RECORD_FIELDS = [field.name for field in fields(StepRecord) if field.name != "requests"]
COMPLETION_FIELDS = [field.name for field in fields(Completion) if field.name not in PROMPT_FIELDS]


def from_requests(requests: Sequence[Request]) -> Plain:
    """Plain data of tokenised requests: the fields that an engine reads, but images, which travel
    apart."""
    return [
        [
            *(r.index, r.id, from_prompt(r.tokens), asdict(r.sampling)),
            *(r.arrival_s, r.after, r.error, r.may_reason, r.num_filled),
        ]
        for r in requests
    ]


def to_requests(data: Plain, images: Mapping[str, Image]) -> list[Request]:
    """The requests of `from_requests`, with those of the images, by the digests of their spans,
    that are theirs."""
    return [
        Request(
            index=index,
            id=id_,
            prompt_token_ids=prompt[0],
            spans=(spans := _spans(prompt[1])),
            images=images_of(spans, images),
            sampling=_sampling(sampling),
            arrival_s=arrival_s,
            after=after,
            error=error,
            may_reason=may_reason,
            num_filled=num_filled,
        )
        for index, id_, prompt, sampling, arrival_s, after, error, may_reason, num_filled in data
    ]


def from_image(image: Image) -> Plain:
    """Plain data of an image. Patches of whole levels of 255 travel as bytes."""
    levels = np.rint(image.patches * 255).astype(np.uint8)
    is_exact = np.array_equal(levels * LEVEL, image.patches)
    patches = _from_array(levels if is_exact else image.patches)
    return [patches, _from_array(image.positions), image.num_tokens]


def to_image(data: Plain) -> Image:
    """The image of `from_image`."""
    patches, positions, num_tokens = data
    found = _to_array(patches)
    return Image(
        patches=found * LEVEL if found.dtype == np.uint8 else found,
        positions=_to_array(positions),
        num_tokens=num_tokens,
    )


def _from_array(array: np.ndarray) -> Plain:
    content = np.ascontiguousarray(array)
    return [content.dtype.str, content.shape, base64.b64encode(content.data).decode("ascii")]


def _to_array(data: Plain) -> np.ndarray:
    dtype, shape, content = data
    return np.frombuffer(base64.b64decode(content), dtype).reshape(shape)


def from_prompt(prompt: Prompt) -> Plain:
    """Plain data of a prompt: token ids, then the fields of each span."""
    return [prompt.token_ids, [asdict(span) for span in prompt.spans]]


def _spans(data: Plain) -> tuple[Span, ...]:
    return tuple(Span(**span) for span in data)


def _sampling(data: Plain) -> SamplingParams:
    sampling = SamplingParams(**data)
    sampling.stop = tuple(sampling.stop)
    sampling.stop_token_ids = tuple(sampling.stop_token_ids)
    sampling.logit_bias = tuple((token, bias) for token, bias in sampling.logit_bias)
    sampling.bad_words = tuple(tuple(word) for word in sampling.bad_words)
    if data["structured"] is not None:
        sampling.structured = Structured(**data["structured"])
    return sampling


def from_event(event: StepRecord | Completion) -> Plain:
    """Plain data of an event: [record, null] of a step, or [null, completion]."""
    if isinstance(event, Completion):
        values = [getattr(event, name) for name in COMPLETION_FIELDS]
        return [None, [from_prompt(event.prompt), values]]
    steps = [[getattr(step, name) for name in STEP_FIELDS] for step in event.requests]
    return [[[getattr(event, name) for name in RECORD_FIELDS], steps], None]


def to_event(data: Plain) -> StepRecord | Completion:
    """The event of `from_event`."""
    record, completion = data
    if record is None:
        (ids, spans), values = completion
        rest = dict(zip(COMPLETION_FIELDS, values, strict=True))
        for name in LOGPROBS:
            rest[name] = rest[name] and [TokenLogprob.of(each) for each in rest[name]]
        return Completion(prompt_token_ids=ids, spans=_spans(spans), **rest)
    values, steps = record
    return StepRecord(
        **dict(zip(RECORD_FIELDS, values, strict=True)),
        requests=[RequestStep(**dict(zip(STEP_FIELDS, step, strict=True))) for step in steps],
    )

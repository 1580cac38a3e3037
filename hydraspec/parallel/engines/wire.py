"""Requests, records and completions as plain data, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields

from hydraspec.parallel.control import Plain
from hydraspec.types import (
    Completion,
    Prompt,
    Request,
    RequestStep,
    SamplingParams,
    Span,
    StepRecord,
)

PROMPT_FIELDS = ("prompt_token_ids", "spans")
STEP_FIELDS = [field.name for field in fields(RequestStep)]
RECORD_FIELDS = [field.name for field in fields(StepRecord) if field.name != "requests"]
COMPLETION_FIELDS = [field.name for field in fields(Completion) if field.name not in PROMPT_FIELDS]


def from_requests(requests: Sequence[Request]) -> Plain:
    """Plain data of tokenised requests: the fields that an engine reads."""
    return [
        [r.index, r.id, from_prompt(r.tokens), asdict(r.sampling), r.arrival_s, r.after]
        for r in requests
    ]


def to_requests(data: Plain) -> list[Request]:
    """The requests of `from_requests`."""
    return [
        Request(
            index=index,
            id=id_,
            prompt_token_ids=prompt[0],
            spans=_spans(prompt[1]),
            sampling=_sampling(sampling),
            arrival_s=arrival_s,
            after=after,
        )
        for index, id_, prompt, sampling, arrival_s, after in data
    ]


def from_prompt(prompt: Prompt) -> Plain:
    """Plain data of a prompt: token ids, then the fields of each span."""
    return [prompt.token_ids, [asdict(span) for span in prompt.spans]]


def to_prompt(data: Plain) -> Prompt:
    """The prompt of `from_prompt`."""
    return Prompt(data[0], _spans(data[1]))


def _spans(data: Plain) -> tuple[Span, ...]:
    return tuple(Span(**span) for span in data)


def _sampling(data: Plain) -> SamplingParams:
    sampling = SamplingParams(**data)
    sampling.stop = tuple(sampling.stop)
    sampling.stop_token_ids = tuple(sampling.stop_token_ids)
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
        return Completion(prompt_token_ids=ids, spans=_spans(spans), **rest)
    values, steps = record
    return StepRecord(
        **dict(zip(RECORD_FIELDS, values, strict=True)),
        requests=[RequestStep(**dict(zip(STEP_FIELDS, step, strict=True))) for step in steps],
    )

"""Requests, records and completions as plain data, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields

from hydraspec.parallel.control import Plain
from hydraspec.types import Completion, Request, RequestStep, SamplingParams, StepRecord

STEP_FIELDS = [field.name for field in fields(RequestStep)]
RECORD_FIELDS = [field.name for field in fields(StepRecord) if field.name != "requests"]
COMPLETION_FIELDS = [field.name for field in fields(Completion)]


def from_requests(requests: Sequence[Request]) -> Plain:
    """The part of tokenised requests that an engine reads."""
    return [
        [r.index, r.id, r.prompt_token_ids, asdict(r.sampling), r.arrival_s, r.after]
        for r in requests
    ]


def to_requests(data: Plain) -> list[Request]:
    """The requests of `from_requests`."""
    return [
        Request(
            index=index,
            id=id_,
            prompt_token_ids=token_ids,
            sampling=_sampling(sampling),
            arrival_s=arrival_s,
            after=after,
        )
        for index, id_, token_ids, sampling, arrival_s, after in data
    ]


def _sampling(data: Plain) -> SamplingParams:
    sampling = SamplingParams(**data)
    sampling.stop = tuple(sampling.stop)
    sampling.stop_token_ids = tuple(sampling.stop_token_ids)
    return sampling


def from_event(event: StepRecord | Completion) -> Plain:
    """A list of two entries, of which one is null."""
    if isinstance(event, Completion):
        return [None, [getattr(event, name) for name in COMPLETION_FIELDS]]
    steps = [[getattr(step, name) for name in STEP_FIELDS] for step in event.requests]
    return [[[getattr(event, name) for name in RECORD_FIELDS], steps], None]


def to_event(data: Plain) -> StepRecord | Completion:
    """The event of `from_event`."""
    record, completion = data
    if record is None:
        return Completion(**dict(zip(COMPLETION_FIELDS, completion, strict=True)))
    values, steps = record
    return StepRecord(
        **dict(zip(RECORD_FIELDS, values, strict=True)),
        requests=[RequestStep(**dict(zip(STEP_FIELDS, step, strict=True))) for step in steps],
    )

"""A few requests to look at: prompt, output, and which output tokens were accepted drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydraspec.metrics.files import Json
from hydraspec.metrics.meter import Meter
from hydraspec.metrics.sinks import Side, Sink
from hydraspec.study.thumbnails import thumbnail
from hydraspec.types import Request, RequestStep, StepRecord

MAX_SAMPLES = 6
MAX_PICTURES = 4  # of a sample
PICTURE = "[picture]"  # stands for one in a prompt
PROMPT_CHARACTERS = 360
PROMPT_TOKENS = 24


@dataclass(slots=True, frozen=True, kw_only=True)
class Sample:
    """A request as the page shows it; `error` is None if it completed without one."""

    id: str
    tags: Sequence[tuple[str, str]]  # (kind: "good", "bad" or "", text)
    prompt: str
    pictures: Sequence[tuple[str, str]]  # (name, data URL) of the first few of the prompt
    error: str | None
    text: str
    # Output tokens by verification, each with whether it is a draft; empty without drafts.
    steps: Sequence[Sequence[tuple[int, bool]]]


class SampleSink(Sink):
    """Sink that keeps the decode steps of a few requests in memory: the first request of each
    category, then further requests in order.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        firsts = list({r.category: r for r in reversed(requests)}.values())[::-1]
        chosen = {r.index: r for r in [*firsts, *requests][: MAX_SAMPLES + len(firsts)]}
        self.requests = dict(sorted(list(chosen.items())[:MAX_SAMPLES]))
        self.steps: dict[int, list[RequestStep]] = {index: [] for index in self.requests}

    def on_step(self, side: Side, record: StepRecord, meter: Meter) -> None:
        if side is Side.method:
            for part in record.requests:
                if part.index in self.steps and not part.is_prefill:
                    self.steps[part.index].append(part)

    def samples(self, rows: Mapping[str, Json]) -> list[Sample]:
        """The samples of requests that ended; `rows` has the rows of requests.jsonl by id."""
        return [
            _sample(request, rows[request.id], self.steps[index])
            for index, request in self.requests.items()
            if request.id in rows
        ]


def _sample(request: Request, row: Json, steps: Sequence[RequestStep]) -> Sample:
    return Sample(
        id=request.id,
        tags=_tags(request, row),
        prompt=_prompt_tail(request),
        pictures=[
            (picture.name, thumbnail(image))
            for picture, image in zip(request.pictures, request.images[:MAX_PICTURES], strict=False)
        ],
        error=row["error"],
        text=_ids(row["output_token_ids"]) if row["text"] is None else row["text"],
        steps=_output_by_step(row, steps) if any(s.draft_token_ids for s in steps) else (),
    )


def _tags(request: Request, row: Json) -> list[tuple[str, str]]:
    tags = [("", request.category)] if request.category else []
    if row["num_drafts"]:
        length = 1 + sum(row["accepted_per_position"]) / row["num_drafts"]
        tags.append(("", f"acceptance length {length:.2f}"))
    if row["correct"] is not None:
        tags.append(("good", "correct") if row["correct"] else ("bad", "wrong"))
    return [*tags, ("bad" if row["error"] else "", row["finish_reason"])]


def _output_by_step(row: Json, steps: Sequence[RequestStep]) -> list[list[tuple[int, bool]]]:
    """Output tokens grouped by the step that emitted them, each with whether it is an accepted
    draft. A step's input token is at `num_computed_tokens`, its first output follows.
    """
    output, num_prompt = row["output_token_ids"], len(row["prompt_token_ids"])
    starts = {step.num_computed_tokens + 1 - num_prompt: step for step in steps}
    groups, position = [], 0
    while position < len(output):
        step = starts.get(position)
        size = max(1, len(step.output_token_ids)) if step else 1
        num_accepted = step.num_accepted if step else 0
        ids = output[position : position + size]
        groups.append([(token, i < num_accepted) for i, token in enumerate(ids)])
        position += size
    return groups


def _prompt_tail(request: Request) -> str:
    text = request.prompt
    if text is None and request.messages:
        content = request.messages[-1]["content"]
        is_text = isinstance(content, str)
        text = content if is_text else " ".join(part.get("text", PICTURE) for part in content)
    if text is None:
        return _ids(request.prompt_token_ids or [])
    return text if len(text) <= PROMPT_CHARACTERS else "… " + text[-PROMPT_CHARACTERS:]


def _ids(ids: Sequence[int]) -> str:
    shown = " ".join(map(str, ids[-PROMPT_TOKENS:]))
    return f"token ids: {'… ' if len(ids) > PROMPT_TOKENS else ''}{shown}"

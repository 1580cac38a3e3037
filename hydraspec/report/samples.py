"""A few requests to look at: prompt, output, and which output tokens were accepted drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from hydraspec.metrics.files import Json
from hydraspec.metrics.meter import Meter
from hydraspec.metrics.sinks import Side, Sink
from hydraspec.report.style import card, legend
from hydraspec.types import Request, RequestStep, StepRecord

MAX_SAMPLES = 6
PROMPT_CHARACTERS = 360
PROMPT_TOKENS = 24


class SampleSink(Sink):
    """Keeps the decode steps of a few requests in memory: the first of each category, then the
    next.
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

    def render(self, rows: Mapping[str, Json]) -> str:
        """The card of requests that completed; rows of requests.jsonl by id."""
        shown = [
            _request(request, rows[request.id], self.steps[index])
            for index, request in self.requests.items()
            if request.id in rows
        ]
        if not shown:
            return ""
        drafted = any(part.draft_token_ids for steps in self.steps.values() for part in steps)
        key = legend([("accepted draft", "var(--accepted)"), ("the target's own", "var(--own)")])
        note = "Each block is one output token; blocks of one verification stand together."
        listed = f'<div class="requests">{"".join(shown)}</div>'
        return card("A few requests", key if drafted else "", listed, note=note if drafted else "")


def _request(request: Request, row: Json, steps: Sequence[RequestStep]) -> str:
    text = row["text"] if row["text"] is not None else _ids(row["output_token_ids"])
    body = f"<pre>{escape(_prompt_tail(request))}</pre>"
    if row["error"]:
        body += f"<pre>{escape(row['error'])}</pre>"
    else:
        body += f"{_strip(row, steps)}<pre>{escape(text)}</pre>"
    return f'<div class="request"><b>{escape(request.id)}</b>{_tags(request, row)}{body}</div>'


def _tags(request: Request, row: Json) -> str:
    tags = [("", request.category)] if request.category else []
    if row["num_drafts"]:
        length = 1 + sum(row["accepted_per_position"]) / row["num_drafts"]
        tags.append(("", f"acceptance length {length:.2f}"))
    if row["correct"] is not None:
        tags.append(("good", "correct") if row["correct"] else ("bad", "wrong"))
    tags.append(("bad" if row["error"] else "", row["finish_reason"]))
    return "".join(f'<span class="tag {kind}">{escape(str(name))}</span>' for kind, name in tags)


def _strip(row: Json, steps: Sequence[RequestStep]) -> str:
    """A block per output token, by its place: a step's newest token is number
    num_computed_tokens.
    """
    if not any(part.draft_token_ids for part in steps):
        return ""
    num_prompt, num_output = len(row["prompt_token_ids"]), len(row["output_token_ids"])
    starts = {part.num_computed_tokens + 1 - num_prompt: part for part in steps}
    groups, position = [], 0
    while position < num_output:
        part = starts.get(position)
        size = max(1, len(part.output_token_ids)) if part else 1
        accepted = part.num_accepted if part else 0
        ids = row["output_token_ids"][position : position + size]
        blocks = [
            f'<b title="token {token}"{" class=accepted" if i < accepted else ""}></b>'
            for i, token in enumerate(ids)
        ]
        groups.append(f"<span>{''.join(blocks)}</span>")
        position += size
    return f'<div class="strip">{"".join(groups)}</div>'


def _prompt_tail(request: Request) -> str:
    text = request.prompt
    if text is None and request.messages:
        text = request.messages[-1]["content"]
    if text is None:
        return _ids(request.prompt_token_ids or [])
    return text if len(text) <= PROMPT_CHARACTERS else "… " + text[-PROMPT_CHARACTERS:]


def _ids(ids: Sequence[int]) -> str:
    shown = " ".join(map(str, ids[-PROMPT_TOKENS:]))
    return f"token ids: {'… ' if len(ids) > PROMPT_TOKENS else ''}{shown}"

"""Conversations: each turn is sent after the answer to the one before, with the conversation so far
as its prompt (docs/adr/0027)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from hydraspec.engine.finish import OfferedRequest
from hydraspec.types import Completion, Prompt, Request, by_digest, images_of

Offered = TypeVar("Offered", bound=OfferedRequest)


class Conversations:
    """Order of the turns in one run. A request without turns is a conversation of one.

    Attributes:
        starts: the first turn of each conversation, in workload order.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.starts = [request for request in requests if request.after is None]
        self._next = {r.after: r for r in requests if r.after is not None}
        if len(self.starts) + len(self._next) != len(requests):
            raise ValueError("two requests have the same Request.after: a turn has one next turn")
        if not {request.index for request in requests}.issuperset(self._next):
            raise ValueError("Request.after must be the index of a request of the same run")

    def next_turn(self, index: int) -> Request | None:
        """The turn after request `index`; None: it was the last one."""
        return self._next.get(index)


@dataclass(slots=True, frozen=True)
class _Answer:
    completion: Completion
    came_at: float  # time.perf_counter()


class History:
    """Answers of one run that are part of a later turn's prompt, until that turn is offered."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._ids = {request.index: request.id for request in requests}
        self._awaited = {request.after for request in requests}
        self._answers: dict[int, _Answer] = {}
        self._causes: dict[int, str] = {}  # turn that was not sent -> why
        self._images = {
            digest: image
            for request in requests
            for digest, image in by_digest(request.spans, request.images).items()
        }

    def add(self, completion: Completion) -> None:
        """Keep the completion of a request that ended now, if a later turn needs it."""
        if completion.index in self._awaited:
            self._answers[completion.index] = _Answer(completion, time.perf_counter())

    def offer(
        self, kind: type[Offered], request: Request, offered_at: float | None = None
    ) -> Offered:
        """The request as a `kind`, offered at `offered_at` (None: now). A later turn has its whole
        prompt, and was offered when the previous answer came; if that answer is an error, the turn
        has failed too."""
        if request.after is None:
            return kind.of(request, offered_at)
        before = self._answers.pop(request.after)
        prompt = followed_prompt(before.completion, request.tokens)
        whole = replace(
            request,
            prompt_token_ids=list(prompt.token_ids),
            spans=prompt.spans,
            images=images_of(prompt.spans, self._images),
        )
        sequence = kind.of(whole, before.came_at)
        if before.completion.finish_reason == "error":
            cause = self._causes.pop(request.after, None) or (
                f"{self._ids[request.after]} ended with an error: {before.completion.error}"
            )
            self._causes[request.index] = cause
            sequence.fail(f"not sent, as an earlier turn of its conversation failed: {cause}")
        return sequence


def followed_prompt(before: Completion, new: Prompt) -> Prompt:
    """Prompt of the turn after `before`: its prompt and its output, token by token, then the `new`
    tokens. A stop token that ended the answer, and with which `new` begins, appears once."""
    ids = list(new.token_ids)
    is_text = not new.spans or new.spans[0].start > 0
    is_ended = before.finish_reason == "stop" and before.ended_by_token
    if is_text and is_ended and before.output_token_ids[-1:] == ids[:1]:
        del ids[0]
    text = [*before.prompt_token_ids, *before.output_token_ids, *ids]
    offset = len(text) - len(new.token_ids)
    moved = (replace(span, start=span.start + offset) for span in new.spans)
    return Prompt(text, (*before.spans, *moved))

"""Conversion of a request's prompt, messages or ids to checked token ids, for every engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from hydraspec.engine.base import EngineInfo
from hydraspec.engine.bounded import OutOfBoundsError, bounded
from hydraspec.engine.pictures import put_images, read_pictures
from hydraspec.models.pictures.format import PictureFormat
from hydraspec.models.tokenizer import Tokenizer
from hydraspec.types import Request, SamplingParams, WorkloadError

LOGPROBS = ("logprobs", "prompt_logprobs")  # keys of sampling
ANSWER = "answer-{}-of-this-conversation"  # stands in a chat for an answer not given yet


def tokenize(
    requests: Sequence[Request],
    tokenizer: Tokenizer | None,
    info: EngineInfo,
    checkpoint: str,
    form: PictureFormat | None = None,
) -> None:
    """Fills in prompts as `Engine.tokenize` says; `checkpoint` is the target's, for messages, and
    `form` the form in which it reads pictures (None: it reads none).

    For a later turn of a conversation only the text after the previous answer is encoded: the chat
    template's text between that answer and the next one. Answers stay the token ids that were
    emitted.
    """
    for request in requests:
        needs_text = request.prompt_token_ids is None
        if tokenizer is None and (needs_text or request.sampling.stop):
            what = "a text prompt" if needs_text else "sampling.stop"
            raise WorkloadError(
                f"request {request.id}: {what} needs a tokenizer, and {checkpoint} has none: give "
                "prompt_token_ids and no stop strings, or add tokenizer.json to the folder",
                request_id=request.id,
            )
        _refuse_spans(request, info)
        if request.pictures and form is None:
            raise WorkloadError(
                f"request {request.id}: its messages have parts other than text, and "
                f"target={info.target} with engine={info.engine} reads none\n"
                "  allowed: messages of text alone\n  to do: "
                "choose a target with an image encoder (with engine=vllm also "
                "engine.vllm.images=true), or leave these parts out",
                request_id=request.id,
            )
    if tokenizer is not None:
        _encode(requests, tokenizer, form)
    for request in requests:
        ids = request.prompt_token_ids or []
        bad = [token for token in ids if not 0 <= token < info.vocab_size]
        if bad:
            raise WorkloadError(
                f"request {request.id}: prompt token id {bad[0]} is outside the vocabulary of "
                f"{info.target}: allowed is 0 to {info.vocab_size - 1}",
                request_id=request.id,
            )
        if not ids:
            raise WorkloadError(
                f"request {request.id}: the prompt is empty after tokenisation",
                request_id=request.id,
            )


def refuse_sampling(requests: Sequence[Request], without: Mapping[str, str]) -> None:
    """Refuse requests with sampling keys that an engine lacks; `without` says of each key why.

    Raises:
        WorkloadError: naming the first such request and key.
    """
    unset = SamplingParams()
    for request in requests:
        for key, why in without.items():
            if getattr(request.sampling, key) != getattr(unset, key):
                raise WorkloadError(
                    f"request {request.id}: sampling.{key} is not available: {why}; leave the key "
                    "out, or choose engine=native without pipeline stages",
                    request_id=request.id,
                )


def _refuse_spans(request: Request, info: EngineInfo) -> None:
    """Refuse a span that the engine has no encoder for."""
    known = info.encoded_kinds
    for i, span in enumerate(request.spans):
        if span.kind not in known:
            raise WorkloadError(
                f"request {request.id}: spans[{i}].kind={span.kind!r}: engine={info.engine} has no "
                f"encoder for it\n  allowed: {', '.join(known) or 'text alone'}\n"
                "  to do: give the prompt without this span, as text or token ids alone",
                request_id=request.id,
            )


def _encode(every: Sequence[Request], tokenizer: Tokenizer, form: PictureFormat | None) -> None:
    """Fill prompt_token_ids, spans and images. Raises WorkloadError for the first request on which
    the chat template or the tokenizer fails."""
    requests = [request for request in every if request.prompt_token_ids is None]
    pictures = {} if form is None else read_pictures(requests, form)
    chats = _chats(every)
    texts = [chats.get(request.index, request.prompt or "") for request in requests]
    with closing(bounded(partial(_token_ids, tokenizer), texts)) as encoded:
        for request in requests:
            try:
                found = next(encoded)
            except OutOfBoundsError as error:
                chat = "" if request.messages is None else "chat template or "
                found = (
                    f"the {chat}tokenizer of this checkpoint cannot encode it: {error}; shorten "
                    "the request, mend the checkpoint's files or download them again, or give "
                    "prompt_token_ids"
                )
            if isinstance(found, str):
                raise WorkloadError(f"request {request.id}: {found}", request_id=request.id)
            request.prompt_token_ids = found
            if form is not None and request.error is None:
                put_images(request, found, pictures.get(request.index, ()), form)


@dataclass(slots=True, frozen=True)
class _Chat:
    """Messages of a conversation up to a turn, and the previous answer (None: the first turn)."""

    messages: list[Mapping[str, Any]]
    after: str | None
    thinking: bool | None


def _chats(requests: Sequence[Request]) -> dict[int, _Chat]:
    """Chats of the requests with messages, by request index. `requests` has a conversation's turns
    in order."""
    found: dict[int, _Chat] = {}
    for request in requests:
        if request.messages is None:
            continue
        before = None if request.after is None else found[request.after]
        if before is None:
            found[request.index] = _Chat(list(request.messages), None, request.thinking)
        else:
            answer = ANSWER.format(len(before.messages))
            said = [*before.messages, {"role": "assistant", "content": answer}]
            messages = [*said, *request.messages]
            found[request.index] = _Chat(messages, answer, request.thinking)
    return found


def _token_ids(tokenizer: Tokenizer, text: str | _Chat) -> list[int] | str:
    """The prompt's token ids, or the text of the error."""
    try:
        if isinstance(text, _Chat):
            return tokenizer.encode_chat(text.messages, after=text.after, thinking=text.thinking)
        return tokenizer.encode(text)
    except WorkloadError as error:
        return str(error)

"""From a request's prompt, messages or ids to checked token ids, the same in every engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial

from hydraspec.engine.base import EngineInfo
from hydraspec.engine.bounded import OutOfBoundsError, bounded
from hydraspec.models.tokenizer import Tokenizer
from hydraspec.types import Request, WorkloadError


def tokenize(
    requests: Sequence[Request], tokenizer: Tokenizer | None, info: EngineInfo, checkpoint: str
) -> None:
    """What `Engine.tokenize` says; `checkpoint` is the target's, for messages."""
    for request in requests:
        needs_text = request.prompt_token_ids is None
        if tokenizer is None and (needs_text or request.sampling.stop):
            what = "a text prompt" if needs_text else "sampling.stop"
            raise WorkloadError(
                f"request {request.id}: {what} needs a tokenizer, and {checkpoint} has none: give "
                "prompt_token_ids and no stop strings, or add tokenizer.json to the folder",
                request_id=request.id,
            )
    if tokenizer is not None:
        _encode([r for r in requests if r.prompt_token_ids is None], tokenizer)
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


def _encode(requests: Sequence[Request], tokenizer: Tokenizer) -> None:
    """Fill prompt_token_ids; the first request that template or tokenizer fails on is named."""
    with closing(bounded(partial(_token_ids, tokenizer), requests)) as encoded:
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


def _token_ids(tokenizer: Tokenizer, request: Request) -> list[int] | str:
    """The prompt's ids, or why there are none."""
    try:
        if request.messages is not None:
            return tokenizer.encode_chat(request.messages)
        return tokenizer.encode(request.prompt or "")
    except WorkloadError as error:
        return str(error)

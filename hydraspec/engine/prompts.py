"""From a request's prompt, messages or ids to checked token ids, the same in every engine."""

from __future__ import annotations

from collections.abc import Sequence

from hydraspec.engine.base import EngineInfo
from hydraspec.models.tokenizer import Tokenizer
from hydraspec.types import Request, WorkloadError


def tokenize(
    requests: Sequence[Request], tokenizer: Tokenizer | None, info: EngineInfo, checkpoint: str
) -> None:
    """What `Engine.tokenize` says; `checkpoint` is the target's, for messages."""
    for request in requests:
        request.prompt_token_ids = _encode(request, tokenizer, checkpoint)
        bad = [token for token in request.prompt_token_ids if not 0 <= token < info.vocab_size]
        if bad:
            raise WorkloadError(
                f"request {request.id}: prompt token id {bad[0]} is outside the vocabulary of "
                f"{info.target}: allowed is 0 to {info.vocab_size - 1}"
            )
        if not request.prompt_token_ids:
            raise WorkloadError(f"request {request.id}: the prompt is empty after tokenisation")


def _encode(request: Request, tokenizer: Tokenizer | None, checkpoint: str) -> list[int]:
    if request.prompt_token_ids is not None and not request.sampling.stop:
        return request.prompt_token_ids
    if tokenizer is None:
        what = "a text prompt" if request.prompt_token_ids is None else "sampling.stop"
        raise WorkloadError(
            f"request {request.id}: {what} needs a tokenizer, and {checkpoint} has none: give "
            "prompt_token_ids and no stop strings, or add tokenizer.json to the folder"
        )
    if request.prompt_token_ids is not None:
        return request.prompt_token_ids
    if request.messages is not None:
        return tokenizer.encode_chat(request.messages)
    return tokenizer.encode(request.prompt or "")

"""Pictures for vLLM, which prepares and counts them itself: pixels of files, beside prompts with a
placeholder for each. Run with vLLM 0.33 on H200s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hydraspec.config.messages import refusal
from hydraspec.config.schema import RunConfig
from hydraspec.models.checkpoint.reader import Checkpoint
from hydraspec.models.pictures.decoding import decode, to_pillow
from hydraspec.models.pictures.format import PictureFormat, read_picture_format
from hydraspec.types import IMAGE, Picture, Request

OTHER_TOKENS = (
    "vLLM reads the request as other tokens than those that were prepared: its processor counts "
    "the rows of a picture differently; choose engine=native or engine=transformers"
)


def picture_form(config: RunConfig, opened: Checkpoint) -> PictureFormat | None:
    """The form of pictures with engine.vllm.images, else None.

    Raises:
        ConfigurationError: the target reads no pictures.
    """
    if not config.engine.vllm.images:
        return None
    form = read_picture_format(opened, config.target.max_soft_tokens)
    if form is None:
        raise refusal(
            "engine.vllm.images",
            True,
            "needs a target with an image encoder",
            allowed=f"false with target.checkpoint={config.target.checkpoint}",
            remedy="leave the key out, or choose another target",
        )
    return form


def arguments(form: PictureFormat | None) -> dict[str, Any]:
    """Arguments of vLLM's EngineArgs. Only with pictures does it load encoder and processor, which
    reads the tokenizer's files."""
    if form is None:
        return {"skip_tokenizer_init": True, "language_model_only": True}
    return {
        "skip_tokenizer_init": False,
        "language_model_only": False,
        "limit_mm_per_prompt": {"audio": 0, "video": 0},
        "mm_processor_kwargs": {"max_soft_tokens": form.max_tokens},
    }


def by_content(requests: Iterable[Request]) -> dict[str, Picture]:
    """The files of requests' pictures by the digests of their spans."""
    found: dict[str, Picture] = {}
    for request in requests:
        spans = (span for span in request.spans if span.kind == IMAGE)
        found |= {span.digest: p for span, p in zip(spans, request.pictures, strict=False)}
    return found


def prompt_of(
    request: Request,
    ids: Sequence[int],
    form: PictureFormat | None,
    known: Mapping[str, Picture],
) -> dict[str, Any]:
    """vLLM's prompt for a request's token ids: one placeholder stands for each picture and the two
    tokens around it. `known` has the pictures by digest.

    Raises:
        ValueError: the file of a picture is not known.
    """
    spans = [span for span in request.spans if span.kind == IMAGE]
    if form is None or not spans:
        return {"prompt_token_ids": list(ids)}
    tokens: list[int] = []
    at = 0
    for span in spans:
        tokens += [*ids[at : span.start - 1], form.image_id]
        at = span.end + 1
    missing = [span.digest for span in spans if span.digest not in known]
    if missing:
        raise ValueError(f"the file of picture {missing[0][:12]} is not known")
    pictures = [to_pillow(decode(known[span.digest].content)) for span in spans]
    return {"prompt_token_ids": [*tokens, *ids[at:]], "multi_modal_data": {"image": pictures}}

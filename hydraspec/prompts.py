"""A tokenised prompt as one object. The module imports no other room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(slots=True, frozen=True, kw_only=True)
class Span:
    """A run of prompt tokens that stand for other content than text, such as an image."""

    kind: str  # names the encoder that reads the content
    start: int  # position of its first token in the prompt
    length: int  # tokens
    digest: str  # hexadecimal digest of the content; spans of equal digests have equal content
    may_be_cut: bool  # False: all its tokens are read in one step

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + self.length


@dataclass(slots=True, frozen=True, kw_only=True)
class Image:
    """A picture as an image encoder reads it: patches in raster order, without padding."""

    patches: np.ndarray  # [patches, values of a patch] float32 in 0 to 1, channels last in a patch
    positions: np.ndarray  # [patches, 2] int64: column, row
    num_tokens: int  # rows that the encoder makes of it: those of its span


@dataclass(slots=True, frozen=True, kw_only=True)
class ImageRows:
    """Consecutive rows of a step that read encoder rows of one image."""

    digest: str  # of the image's span
    row: int  # of the step: the first of these rows
    first: int  # encoder row of the image that it reads
    count: int
    last_position: int  # of the image's last token in its prompt


@dataclass(slots=True, frozen=True)
class Prompt:
    """A tokenised prompt: token ids, and the spans of them that are no text, in rising order.

    Raises:
        ValueError: spans are empty, overlap, or do not lie within the prompt.
    """

    token_ids: Sequence[int]
    spans: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        at = 0
        for span in self.spans:
            if not at <= span.start < span.end <= len(self.token_ids):
                raise ValueError(
                    f"{span} is empty, before position {at}, where the span before it ends, or "
                    f"after the {len(self.token_ids)} tokens of the prompt"
                )
            at = span.end


IMAGE = "image"  # a span's kind


def by_digest(spans: Sequence[Span], images: Sequence[Image]) -> dict[str, Image]:
    """The images of a prompt by the digests of their spans."""
    digests = (span.digest for span in spans if span.kind == IMAGE)
    return dict(zip(digests, images, strict=False))


def images_of(spans: Sequence[Span], known: Mapping[str, Image]) -> tuple[Image, ...]:
    """The images of spans, of those known by their digests."""
    return tuple(known[s.digest] for s in spans if s.kind == IMAGE and s.digest in known)

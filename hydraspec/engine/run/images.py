"""Encoder outputs of the images in prompts: each is encoded when a step first reads it, outside
every graph, and kept for the steps and requests that read it next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from hydraspec.models.base import TargetModel
from hydraspec.models.image_batch import sent
from hydraspec.types import IMAGE, EncodedRows, Image, ImageRows, Request, Span, by_digest

MOST_ROWS = 1 << 13  # encoder rows that are kept, beside those of the newest step


class EncodedImages:
    """The images of an engine's requests by the digests of their spans, and the encoder rows of
    those read last, on the target's device. Every rank that embeds tokens has its own.

    Attributes:
        num_encoded: images encoded so far.
    """

    def __init__(self, target: TargetModel) -> None:
        # A plugin's target may have neither.
        encoder = getattr(target, "encoder", None)
        self.encoder, self.num_encoded = encoder, 0
        self._sees_ahead = encoder is not None and target.images_see_ahead
        self._is_held = encoder is not None and encoder.is_held
        self._dtype, self._device, self._width = target.dtype, target.device, target.hidden_size
        self._images: dict[str, Image] = {}
        self._faults: dict[str, str | None] = {}
        self._kept: OrderedDict[str, Tensor] = OrderedDict()

    def learn(self, requests: Iterable[Request]) -> None:
        """Take the images of a run's requests in place of those of earlier ones, and forget what
        was encoded: rounds over the same prompts take the same time. Requests without images leave
        the known ones: later turns and repeated prompts name them by digest."""
        found: dict[str, Image] = {}
        for request in requests:
            found |= by_digest(request.spans, request.images)
        self._kept.clear()
        if found:
            self._images, self._faults = found, {}

    def fault(self, spans: Sequence[Span]) -> str | None:
        """Words for what makes these spans unreadable, as the error of their request; None: they
        are sound. Without an encoder spans are read as text: `tokenize` refuses them before."""
        for i, span in enumerate(spans if self.encoder is not None else ()):
            found = self._fault(span)
            if found is not None:
                return f"spans[{i}] of kind {span.kind!r} cannot be read: {found}"
        return None

    def _fault(self, span: Span) -> str | None:
        assert self.encoder is not None
        if span.kind != IMAGE:
            return "the target has no encoder for it"
        image = self._images.get(span.digest)
        if image is None:
            return "Request.images has no image of it"
        if image.num_tokens != span.length:
            return f"it has {span.length} tokens, and its image {image.num_tokens}"
        if self._sees_ahead and span.may_be_cut:
            return "may_be_cut is true, and rows of an image see each other both ways"
        if span.digest not in self._faults:
            self._faults[span.digest] = self.encoder.fault(image)
        return self._faults[span.digest]

    def rows(self, parts: Sequence[ImageRows], num_rows: int | None) -> EncodedRows | None:
        """Encoder outputs for a step's rows; None where no row is an image's. num_rows: T, of the
        target; None: of a drafter, whose rows see no later ones. Nothing is waited for."""
        if not parts or self.encoder is None:
            return None
        places = np.concatenate([np.arange(part.row, part.row + part.count) for part in parts])
        until = None
        if self._sees_ahead and num_rows is not None:
            last = np.zeros(num_rows, dtype=np.int64)
            for part in parts:
                last[part.row : part.row + part.count] = part.last_position
            until = sent(last, self._device)
        return EncodedRows(
            rows=sent(places, self._device), states=self._states(parts), sees_until=until
        )

    def padding(self, num_rows: int) -> EncodedRows | None:
        """Rows of a step that reads an image, for compiling its kernels; None without an encoder.
        num_rows: T."""
        if self.encoder is None:
            return None
        none = torch.zeros(num_rows, dtype=torch.int64, device=self._device)
        states = torch.zeros(1, self._width, dtype=self._dtype, device=self._device)
        return EncodedRows(
            rows=none[:1], states=states, sees_until=none if self._sees_ahead else None
        )

    def encode_largest(self) -> None:
        """Encode a black image for its memory: as much as any images of a step take."""
        if self.encoder is not None and self._is_held:
            self.encoder.encode([self.encoder.largest_image()])

    @property
    def kept_bytes(self) -> int:
        """Bytes that kept encoder rows take at most."""
        return MOST_ROWS * self._width * self._dtype.itemsize if self._is_held else 0

    def _states(self, parts: Sequence[ImageRows]) -> Tensor:
        if not self._is_held:  # no row is embedded on this stage
            return torch.empty(0, self._width, dtype=self._dtype, device=self._device)
        encoded = self._encoded([part.digest for part in parts])
        states = [encoded[part.digest][part.first : part.first + part.count] for part in parts]
        return states[0] if len(states) == 1 else torch.cat(states)

    def _encoded(self, digests: Sequence[str]) -> dict[str, Tensor]:
        """Encoder rows [tokens, D] of these images; those that are not kept are encoded."""
        assert self.encoder is not None
        wanted = list(dict.fromkeys(digests))
        new = [digest for digest in wanted if digest not in self._kept]
        if new:
            encoded = self.encoder.encode([self._images[digest] for digest in new])
            self._kept |= zip(new, (rows.clone() for rows in encoded), strict=True)
            self.num_encoded += len(new)
        for digest in wanted:
            self._kept.move_to_end(digest)
        found = {digest: self._kept[digest] for digest in wanted}
        while sum(len(rows) for rows in self._kept.values()) > MOST_ROWS:
            self._kept.popitem(last=False)
        return found

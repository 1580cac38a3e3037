"""Keys of cached blocks: digests of all tokens up to a block's end, chained so that a longer
request hashes only what is new.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from hydraspec.types import Span


class PrefixKeys:
    """Keys of one request's blocks, from its tokens, which may grow, and its prompt's spans."""

    def __init__(
        self,
        token_ids: Sequence[int],
        unit: int,
        root: bytes,
        spans: Sequence[Span] = (),
        num_filled: int = 0,
    ) -> None:
        """unit: tokens per digest, of which every block size is a multiple; root: start of the
        chain, different for models whose KV of the same tokens differs (see `root_key`);
        num_filled: see Request."""
        self.token_ids = token_ids
        self.num_filled = num_filled
        self._spans = spans
        self._unit = unit
        self._digests = [root]  # entry i is the digest of the first i units

    def key(self, end: int, num_following: int) -> bytes:
        """The key of a block whose last token is number `end` - 1: its content depends on all
        tokens before `end` and on the `num_following` tokens after them. All of these must be
        known, and `end` is a multiple of the unit."""
        while len(self._digests) <= end // self._unit:
            self._extend()
        digest = self._digests[end // self._unit]
        if not num_following:
            return digest
        return digest + self._content(end, end + num_following)

    def _extend(self) -> None:
        start = (len(self._digests) - 1) * self._unit
        content = self._content(start, start + self._unit)
        self._digests.append(hashlib.sha256(self._digests[-1] + content).digest())

    def _content(self, start: int, end: int) -> bytes:
        """Token ids from `start` to `end`, then each span that touches them: its place relative to
        `start`, its kind and its digest."""
        content = array("q", self.token_ids[start:end]).tobytes()
        for span in self._spans:
            if span.start < end and start < span.end:
                parts = span.kind.encode(), span.digest.encode()
                sizes = span.start - start, span.length, *map(len, parts)
                content += array("q", sizes).tobytes() + b"".join(parts)
        return content


def root_key(*facts: str) -> bytes:
    """Start of a chain of keys: digest of the facts that decide which KV the same tokens have."""
    return hashlib.sha256("\0".join(facts).encode()).digest()

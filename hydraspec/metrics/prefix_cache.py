"""Figures of prefix caching over the requests of one meter: the tokens taken from the cache,
and those that could have been."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from hydraspec.metrics.statistics import ratio
from hydraspec.types import Completion, PrefixCaching, Prompt


@dataclass(slots=True)
class _Known:
    """Prefixes whose KV had been computed in a run: digests of whole blocks, and the token that
    came after each block."""

    digests: set[bytes] = field(default_factory=set)
    next_tokens: set[tuple[bytes, int]] = field(default_factory=set)

    def add(self, prompt: Prompt, num_computed: int, block_size: int) -> None:
        tokens = prompt.token_ids
        for end, digest in _digests(prompt, num_computed, block_size):
            self.digests.add(digest)
            if end < len(tokens):
                self.next_tokens.add((digest, tokens[end]))


@dataclass(slots=True, kw_only=True)
class Eligible:
    """Tokens of one request's prompt that a cache could have given."""

    num_tokens: int = 0  # see PrefixHits.eligible
    num_border_tokens: int = 0  # see PrefixHits.num_border_tokens


class PrefixHits:
    """Tokens that completed requests took from the cache, and could have taken. The cache is empty
    when a run begins, and each run's requests are compared among themselves.

    Attributes:
        runs: for each run the first steps and ends of requests in order, as (index, has ended).
        num_queried_tokens: prompt tokens of the completed requests, all of them.
        num_hit_tokens: prompt tokens taken from the cache when a request was first admitted.
    """

    def __init__(self, caching: PrefixCaching) -> None:
        self._caching = caching
        self.runs: list[list[tuple[int, bool]]] = [[]]
        self._begun: set[int] = set()
        self._completions: dict[int, Completion] = {}
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def begin_run(self) -> None:
        """Record that a run begins, with an empty cache."""
        self.runs.append([])

    def begun(self, index: int) -> None:
        """Record that a request has a step; in its first one it looks into the cache."""
        if index not in self._begun:
            self._begun.add(index)
            self.runs[-1].append((index, False))

    def ended(self, completion: Completion) -> None:
        """Count a request that ended, unless it had no step and so did not look into the cache."""
        if completion.index in self._begun:
            self._completions[completion.index] = completion
            self.runs[-1].append((completion.index, True))
            self.num_queried_tokens += len(completion.prompt_token_ids)
            self.num_hit_tokens += completion.num_cached_tokens

    def hit_rate(self) -> float | None:
        """Share of prompt tokens taken from the cache: num_hit_tokens / num_queried_tokens."""
        return ratio(self.num_hit_tokens, self.num_queried_tokens)

    def eligible(self) -> dict[int, Eligible]:
        """The longest prefix that a cache without limits could have given, by request index.

        It is the longest common prefix with any earlier request of the same run (of all replicas),
        rounded down to a multiple of the block size that hits have, and shorter than the prompt.
        A request is earlier if its first step came before; if it had also ended by then, its output
        counts too, up to the last token that has KV. The prefix is never shorter than the one
        that was taken, which may be the output of a request that still ran.
        """
        size, found = self._caching.block_size, {}
        for run in self.runs:
            known = _Known()
            for index, has_ended in run:
                done = self._completions.get(index)
                if done is None:
                    continue
                if has_ended:
                    tokens = [*done.prompt_token_ids, *done.output_token_ids]
                    known.add(Prompt(tokens, done.spans), len(tokens) - 1, size)
                else:
                    own = found[index] = self._eligible(done.prompt, known)
                    own.num_tokens = max(own.num_tokens, done.num_cached_tokens)
                    known.add(done.prompt, len(done.prompt_token_ids), size)
        return found

    def _eligible(self, prompt: Prompt, known: _Known) -> Eligible:
        last: tuple[int, bytes] | None = None
        most = len(prompt.token_ids) - 1
        for end, digest in _digests(prompt, most, self._caching.block_size):
            if digest not in known.digests:
                break
            last = end, digest
        if last is None:
            return Eligible()
        end, digest = last
        parts_here = (digest, prompt.token_ids[end]) not in known.next_tokens
        lost = self._caching.block_size if parts_here and self._caching.has_draft_kv else 0
        return Eligible(num_tokens=end - lost, num_border_tokens=lost)

    def eligible_hit_rate(self) -> float | None:
        """num_hit_tokens / tokens of `eligible`, without border tokens. The rate is below 1 where
        blocks were evicted, not computed yet, or in another replica's cache."""
        return ratio(self.num_hit_tokens, sum(e.num_tokens for e in self.eligible().values()))

    def num_border_tokens(self) -> int:
        """Tokens of blocks after which a prompt parts from every earlier request. The draft KV of
        the last row depends on the token after it, so a drafter with its own KV cannot use them."""
        return sum(each.num_border_tokens for each in self.eligible().values())

    def num_missed_tokens(self) -> int:
        """Tokens of `eligible` computed again, because they were evicted or published too late."""
        return sum(
            max(0, each.num_tokens - self._completions[index].num_cached_tokens)
            for index, each in self.eligible().items()
        )


def _digests(prompt: Prompt, num_tokens: int, block_size: int) -> Iterator[tuple[int, bytes]]:
    """Yield the end of each whole block in the first `num_tokens`, and a digest of all up to it."""
    array = np.asarray(prompt.token_ids[: num_tokens // block_size * block_size], dtype=np.int64)
    chain = hashlib.blake2b(digest_size=16)
    for end in range(block_size, len(array) + 1, block_size):
        chain.update(array[end - block_size : end].tobytes())
        for span in prompt.spans:
            if span.start < end and end - block_size < span.end:
                chain.update(repr(span).encode())
        yield end, chain.digest()

"""Drafts from a trie of each request's text, and from one of finished outputs."""

from __future__ import annotations

from collections.abc import Sequence

from hydraspec_kernels.lookup import Lookup

from hydraspec.config.options import SuffixOptions
from hydraspec.speculators.host import DraftedText, HostDrafts
from hydraspec.speculators.suffix.trie import BYTES_PER_NODE, ROOT, Limits, Path, SuffixTrie

NUM_GENERATIONS = 2
LONGEST_LOOKUP = 4  # tokens of a match on the device; longer ones accept no more


class FinishedOutputs:
    """Tries of finished outputs: the newest ones, and those before them. When the first trie holds
    half of what is allowed, it takes the place of the second, which is dropped."""

    def __init__(self, options: SuffixOptions, vocab_size: int) -> None:
        self._depth, self._vocab_size = options.max_tree_depth, vocab_size
        self._most_texts = options.max_cached_requests // NUM_GENERATIONS
        num_bytes = options.max_cache_mib << 20
        self._most_nodes = num_bytes // BYTES_PER_NODE // NUM_GENERATIONS
        self.tries: tuple[SuffixTrie, ...] = ()  # the newest first

    @property
    def num_nodes(self) -> int:
        """Number of nodes of all tries."""
        return sum(trie.num_nodes for trie in self.tries)

    @property
    def num_texts(self) -> int:
        """Number of outputs."""
        return sum(trie.num_texts for trie in self.tries)

    def add(self, token_ids: Sequence[int]) -> None:
        """Add an output; what does not fit of a very long one is left out."""
        if not self._most_texts:
            return
        longest = self._most_nodes // 2 - 1
        if not self.tries or self._is_full(self.tries[0], min(len(token_ids), longest)):
            newest = SuffixTrie(self._depth, self._vocab_size, self._most_nodes)
            self.tries = (newest, *self.tries[: NUM_GENERATIONS - 1])
        self.tries[0].append(token_ids[:longest])
        self.tries[0].end_text()

    def _is_full(self, trie: SuffixTrie, num_more: int) -> bool:
        if trie.is_full or trie.num_texts >= self._most_texts:
            return True
        # A token adds itself and a child of the root; half of the room is left to longer strings.
        return max(trie.num_nodes, 2 * len(trie.text)) + 2 * (num_more + 1) > self._most_nodes


class _Match:
    """The place of a text's last tokens in a trie of this text or of others."""

    def __init__(self, trie: SuffixTrie) -> None:
        self.trie = trie
        self._num_texts = 0
        self._num_tokens = 0
        self._entries = [ROOT]

    def path(self, token_ids: Sequence[int], limits: Limits) -> Path:
        """The best continuation of a text that has grown since the last call."""
        trie, num_tokens = self.trie, len(token_ids)
        if self._num_texts != trie.num_texts:  # nodes have changed
            self._entries, self._num_texts, self._num_tokens = [ROOT], trie.num_texts, 0
        self._entries = trie.follow(self._entries, token_ids, num_tokens - self._num_tokens)
        self._num_tokens = num_tokens
        return trie.best_path(self._entries, limits) if len(self._entries) > 1 else Path()


class _SuffixText(DraftedText):
    """A request's text with its trie."""

    def __init__(self, drafts: SuffixDrafts) -> None:
        self._drafts = drafts
        self._own = _Match(SuffixTrie(drafts.options.max_tree_depth, drafts.vocab_size))
        self._tries: tuple[SuffixTrie, ...] = ()
        self._matches: list[_Match] = []

    def continuation(self, token_ids: Sequence[int], num_pending: int) -> list[int]:
        limits, own = self._drafts.limits[num_pending], self._own
        own.trie.append(token_ids[len(own.trie.text) :])
        best = own.path(token_ids, limits)
        if self._tries is not self._drafts.outputs.tries:
            self._tries = self._drafts.outputs.tries
            known = {id(match.trie): match for match in self._matches}
            self._matches = [known.get(id(trie)) or _Match(trie) for trie in self._tries]
        for match in self._matches:
            path = match.path(token_ids, limits)
            if path.score > best.score:
                best = path
        self.match_length = best.match
        return best.tokens


class SuffixDrafts(HostDrafts):
    """Suffix decoding on the host.

    A continuation is chosen among those of every match length, of the request's own text and of
    finished outputs: the one that is expected to have the most right tokens; of equal ones that of
    the own text, then that of the longest match. Its length is at most `max_spec_factor` times that
    of the match, and its probability, by counts of what followed, at least `min_token_prob`.

    Source: Oliaro, Jia, Campos, Qiao, SuffixDecoding, 2024 (arXiv 2411.04975).
    """

    def __init__(self, options: SuffixOptions, num_drafts: int, vocab_size: int) -> None:
        self.options, self.num_drafts, self.vocab_size = options, num_drafts, vocab_size
        longest = min(LONGEST_LOOKUP, options.max_tree_depth - 1)
        self.lookup = Lookup(longest, options.max_spec_factor)
        self.min_acceptance = options.min_acceptance
        self.limits = [  # by the tokens that a step in flight may sample
            Limits(
                most=num_drafts + num_pending,
                num_pending=num_pending,
                factor=options.max_spec_factor,
                min_prob=options.min_token_prob,
            )
            for num_pending in range(num_drafts + 2)
        ]
        self.start_over()

    def new_text(self) -> DraftedText:
        return _SuffixText(self)

    def finished(self, output_token_ids: Sequence[int]) -> None:
        self.outputs.add(output_token_ids)

    def start_over(self) -> None:
        self.outputs = FinishedOutputs(self.options, self.vocab_size)
